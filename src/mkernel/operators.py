"""The operators that the demo, the benchmarks and the documentation show: an entry for each.

A new operator appears there when it has an entry here, an operator's file in `mkernel.ops`, a `Case` of the
same name in `mkernel.demo.cases`, and, for `mkernel bench`, a module of the same name in `mkernel.bench` whose
`measure(group, *shape, dtype, config, repeats)` returns a dictionary of figures.
"""

from __future__ import annotations

import importlib
import importlib.util
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
    of_paper: (the published size, ranks) -> the shape that gives each rank as much to compute as there.
    """

    name: str
    summary: str
    dimensions: tuple[str, ...]
    shared: tuple[str, ...]
    shapes: tuple[Shape, ...]
    small: tuple[Shape, ...]
    of_paper: Callable[[int, int], Shape]

    @property
    def is_here(self) -> bool:
        return importlib.util.find_spec(f"mkernel.ops.{self.name}") is not None

    @property
    def has_bench(self) -> bool:
        return self.is_here and importlib.util.find_spec(f"mkernel.bench.{self.name}") is not None

    @property
    def measure(self) -> Callable[..., dict[str, Any]]:
        return importlib.import_module(f"mkernel.bench.{self.name}").measure

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
        dimensions=("batch", "heads", "sequence", "dim"),
        shared=("sequence",),
        shapes=((4, 16, 8192, 128), (4, 16, 32768, 128)),
        small=((1, 8, 8192, 128),),
        of_paper=lambda size, ranks: (4, 16, size // 16 * ranks, 128),
    ),
    Operator(
        "moe_dispatch_matmul",
        "brings tokens to the ranks of their experts and multiplies them there",
        dimensions=("tokens", "hidden", "out", "experts", "top_k"),
        shared=("tokens", "experts"),
        shapes=((8192, 7168, 2048, 64, 8),),
        small=((2048, 2048, 1024, 32, 4),),
        of_paper=lambda size, ranks: (size // 16 * ranks, 7168, 2048, 16 * ranks, 8),
    ),
    Operator(
        "moe_ffn",
        "a mixture-of-experts layer: tokens to their experts, SwiGLU there, weighted sums back",
        dimensions=("tokens", "hidden", "inter", "experts", "top_k"),
        shared=("tokens", "experts"),
        shapes=((8192, 7168, 2048, 64, 8),),
        small=((2048, 2048, 1024, 32, 4),),
        of_paper=lambda size, ranks: (size // 16 * ranks, 7168, 2048, 16 * ranks, 8),
    ),
)


def here() -> dict[str, Operator]:
    """Those that this version has, by name."""
    return {operator.name: operator for operator in ALL if operator.is_here}


def measurable() -> dict[str, Operator]:
    """Those of them that `mkernel bench` can measure."""
    return {operator.name: operator for operator in ALL if operator.has_bench}
