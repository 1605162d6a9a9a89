"""Benchmarks of the backward pass of a product that is fused with its transfers: the gradients of both of its operands.

Each gradient is a product of its own, by a fused operator or by the library. The floor is the time of both products at
the library's speed, or that of all bytes on a link, whichever is longer: it assumes that the transfers of both overlap
with both products.

Up to two host-driven baselines are timed, and the faster one counts. In the first, every transfer and every product
waits for the one before. The second overlaps as Megatron and Transformer Engine do: a transfer runs on a stream of its
own, beside a product that does not depend on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mkernel.bench.problems import worst_of
from mkernel.bench.timing import Link, Step, Wires, time_ways, wires
from mkernel.operators import Shape
from mkernel.runtime.group import Group
from mkernel.runtime.world import Launch


@dataclass(frozen=True)
class Transfer:
    """A host-driven transfer of one rank. move: enqueues it. nvlink, network: bytes that the rank sends over them."""

    move: Callable[[], object]
    nvlink: int
    network: int

    def wires(self, group: Group) -> Wires:
        return wires(group, self.nvlink, self.network)

    def paced(self, group: Group) -> Callable[[], None]:
        """The transfer at the rate of the links, both used at the same time."""
        link, longest = Link(group.device), self.wires(group).ms

        def run() -> None:
            link.open()
            self.move()
            link.hold(int(longest * 1e6))

        return run


def beside(device: torch.device, one: Callable[[], object], other: Callable[[], object]) -> Callable[[], None]:
    """Both at the same time: `one`, which is enqueued first, on a stream of its own."""
    stream = torch.cuda.Stream(device)

    def run() -> None:
        here = torch.cuda.current_stream(device)
        stream.wait_stream(here)
        with torch.cuda.stream(stream):
            one()
        other()
        here.wait_stream(stream)

    return run


@dataclass(frozen=True)
class Backward:
    """What is measured of a backward pass: this rank's part of one shape.

    library: the products, by the library. fused: what autograd runs. host_driven: baselines by name. transfers: all
    that they move. errors: each gradient's largest error as a multiple of its bound, through autograd.
    """

    op: str
    dimensions: dict[str, int]
    dtype: torch.dtype
    library: Sequence[Step]
    fused: Sequence[Step]
    host_driven: dict[str, Sequence[Step]]
    transfers: Sequence[Transfer]
    errors: Callable[[], dict[str, float]]
    plans: Sequence[Any]


def measure(group: Group, measured: Backward, repeats: int) -> dict[str, Any]:
    """The figures of one shape. Collective; the same on every rank."""
    ways = {"library": measured.library, "fused": measured.fused, **measured.host_driven}
    for way in ways.values():
        for step in way:
            if not isinstance(step, Launch):
                step()  # loads what it launches: nothing may be loaded while kernels wait for each other
    torch.cuda.current_stream(group.device).synchronize()
    times, sustained = time_ways(group, ways, repeats)
    errors = {name: worst_of(group.exchange(name, error)) for name, error in measured.errors().items()}
    needed = [transfer.wires(group) for transfer in measured.transfers]
    nvlink_ms, network_ms = sum(one.nvlink for one in needed), sum(one.network for one in needed)
    links = group.world.links
    best = min(measured.host_driven, key=lambda name: times[name])

    def fraction(of: dict[str, float]) -> float:
        return max(of["library"], nvlink_ms, network_ms) / of["fused"]

    return {
        "op": measured.op,
        **measured.dimensions,
        "backward": True,
        "dtype": str(measured.dtype).removeprefix("torch."),
        "ranks": group.size,
        "nodes": group.nodes,
        "gpus": torch.cuda.device_count(),
        "link_gb_per_s": links.nvlink,
        "network_gb_per_s": links.network,
        "emulated": group.size > torch.cuda.device_count() or links.nvlink is not None or group.nodes > 1,
        "fused_ms": times["fused"],
        "library_ms": times["library"],
        "wire_ms": nvlink_ms,
        "network_ms": network_ms,
        "host_driven_ms": times[best],
        "host_driven_ways": {name: times[name] for name in measured.host_driven},
        "speedup": times[best] / times["fused"],
        "floor_fraction": fraction(times),
        "sustained_fused_ms": sustained["fused"],
        "sustained_library_ms": sustained["library"],
        "sustained_host_driven_ms": min(sustained[name] for name in measured.host_driven),
        "sustained_floor_fraction": fraction(sustained),
        "errors": errors,
        "max_error": max(errors.values()),
        "error_bound": 1.0,
        "plan": "\n".join(map(str, measured.plans)),
    }


def error_of(found: torch.Tensor, exact: torch.Tensor, bound: float) -> float:
    """The largest error of a gradient as a multiple of its bound; infinite if there is a NaN."""
    error = (found.double() - exact).abs().max().item() / bound
    return error if error == error else float("inf")


def named(shape: Shape) -> dict[str, int]:
    return dict(zip(("m_total", "n", "k"), shape))
