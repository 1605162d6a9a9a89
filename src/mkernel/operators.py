"""The operators that the demo, the benchmarks and the documentation show: an entry for each.

A new operator appears there when it has an entry here, a function of its name in `mkernel.demo.cases`, and, for
`mkernel bench`, a function `measure(group, *shape, dtype, config, repeats)` that returns a dictionary of figures.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkernel.demo.cases import Case

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Operator:
    """What there is to know about an operator without importing it.

    summary: what it does, in a line.
    dimensions: the numbers of a shape, in the order in which they are written on the command line.
    shared: those of them that are divided among the ranks.
    shapes, small: what `mkernel bench` measures by default, and in a hurry.
    of_paper: (the published size, ranks) -> the shape that gives each rank as much as it has there.
    bench: the module and the function that measure it; by default `measure` in the module of its name.
    options: what that function takes besides, yes or no, as the command line calls it.
    several_nodes: can it be measured on several nodes?
    co_resident: do CTAs of a launch wait for each other in both directions, so that all must be resident?
    """

    name: str
    summary: str
    dimensions: tuple[str, ...]
    shared: tuple[str, ...]
    shapes: tuple[Shape, ...]
    small: tuple[Shape, ...]
    of_paper: Callable[[int, int], Shape]
    bench: str = ""
    options: tuple[str, ...] = ()
    several_nodes: bool = True
    co_resident: bool = False

    @property
    def measure(self) -> Callable[..., dict[str, Any]]:
        module, _, function = (self.bench or f"{self.name}:measure").partition(":")
        return getattr(importlib.import_module(f"mkernel.bench.{module}"), function)

    @property
    def case(self) -> Callable[..., Case]:
        return getattr(importlib.import_module("mkernel.demo.cases"), self.name)


ALL = (
    Operator(
        "all_gather_matmul",
        "gathers every rank's rows and multiplies them by this rank's matrix",
        dimensions=("m_total", "n", "k"),
        shared=("m_total",),
        shapes=((16384, 2048, 8192), (8192, 2048, 8192), (8192, 8192, 8192)),
        small=((4096, 1024, 2048),),
        of_paper=lambda size, ranks: (size, size // 16, size),
    ),
    Operator(
        "matmul_reduce_scatter",
        "multiplies, adds the products of all ranks, and leaves each rank its rows of the sum",
        dimensions=("m_total", "n", "k"),
        shared=("m_total", "k"),
        shapes=((16384, 8192, 8192), (4096, 8192, 8192)),
        small=((4096, 2048, 2048),),
        of_paper=lambda size, ranks: (size, size, size // 16 * ranks),
    ),
    Operator(
        "matmul_all_reduce",
        "multiplies, and adds the products of all ranks on every rank",
        dimensions=("m_total", "n", "k"),
        shared=("k",),
        shapes=((16384, 8192, 8192), (128, 8192, 8192)),
        small=((4096, 2048, 2048),),
        of_paper=lambda size, ranks: (size, size, size // 16 * ranks),
    ),
    Operator(
        "ring_attention",
        "attention of this rank's queries over the keys and values of all ranks",
        dimensions=("batch", "heads", "positions", "dim"),
        shared=("positions",),
        shapes=((4, 16, 12288, 128), (4, 16, 49152, 128)),
        small=((1, 16, 8192, 128),),
        of_paper=lambda size, ranks: (4, 16, size // 16 * ranks, 128),
        options=("causal", "zigzag"),
        several_nodes=False,
    ),
    Operator(
        "moe_dispatch_matmul",
        "brings tokens to the ranks of their experts and multiplies them there",
        dimensions=("tokens", "out", "hidden"),
        shared=("tokens",),
        shapes=((8192, 2048, 7168), (32768, 2048, 7168)),
        small=((2048, 1024, 2048),),
        of_paper=lambda size, ranks: (size // 16 * ranks, 2048, 7168),
        bench="moe:measure_dispatch",
        co_resident=True,
    ),
    Operator(
        "moe_ffn",
        "a mixture-of-experts layer: tokens to their experts, SwiGLU there, weighted sums back",
        dimensions=("tokens", "inter", "hidden"),
        shared=("tokens",),
        shapes=((8192, 2048, 7168), (32768, 2048, 7168)),
        small=((2048, 1024, 2048),),
        of_paper=lambda size, ranks: (size // 16 * ranks, 2048, 7168),
        bench="moe:measure_ffn",
        co_resident=True,
    ),
)


# what is traced, tuned and checked by itself, too, but shown and measured only as a part of another one
PARTS = (
    Operator(
        "moe_combine",
        "brings the experts' rows back to their tokens' ranks, as weighted sums",
        dimensions=("tokens", "columns"),
        shared=("tokens",),
        shapes=((8192, 7168), (32768, 7168)),
        small=((2048, 2048),),
        of_paper=lambda size, ranks: (size // 16 * ranks, 7168),
        co_resident=True,
    ),
)


def here() -> dict[str, Operator]:
    """All of them, by name."""
    return {operator.name: operator for operator in ALL}


def with_parts() -> dict[str, Operator]:
    """All of them, and their parts."""
    return here() | {operator.name: operator for operator in PARTS}
