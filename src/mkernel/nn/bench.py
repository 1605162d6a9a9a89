"""The whole tensor-parallel MLP, forward and backward, beside the same steps driven by the host.

    python -m mkernel.nn.bench                       # 4 ranks; --nodes 2 --ranks 2 for two nodes of two

Ranks are threads. If they share a GPU, each has its share of the SMs and of the links, which are paced (*emulated*).
The steps are those of `ParallelSwiGLU`, which keeps its part of the input for the backward pass:

    fused        forward: gather x and multiply; silu(gate) * up; multiply and reduce-scatter
                 backward: gather dy, multiply, and keep the rows; multiply for the second weight; the slopes of silu;
                 multiply and reduce-scatter; gather x again and multiply for the first weight
    host-driven  the same products by cuBLAS, and every transfer before or after them, at the rates of the links
    overlapped   the same, but transfers run beside products that do not depend on them, on a stream of their own

The activation is PyTorch's in all of them. The floor is the time of all six products by cuBLAS, of the activation, or
of all bytes on a link, whichever is longest.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from mkernel.bench import NETWORK_LATENCY
from mkernel.bench.backward import Transfer, beside
from mkernel.bench.timing import BARRIER, Step, time_ways
from mkernel.ops import all_gather_matmul
from mkernel.ops.all_gather_matmul import weight_grad
from mkernel.ops.reduce import reduce_scatter
from mkernel.ops.reduce.bench import add_up
from mkernel.ops.reduce.call import Sum
from mkernel.runtime.group import Group
from mkernel.runtime.operands import DTYPES
from mkernel.runtime.spawn import spawn
from mkernel.runtime.world import Links

NVLINK, NETWORK = 450.0, 50.0  # GB/s of a GPU
REPEATS = 12


@dataclass
class Tensors:
    """What a rank computes. Rows: of this rank in x, dx, y and dy, of all ranks in the others."""

    x: torch.Tensor
    up: torch.Tensor  # gate_proj.weight above up_proj.weight: [2 * inner, hidden]
    down: torch.Tensor  # [hidden, inner]
    dy: torch.Tensor
    inner: torch.Tensor  # the products with `up`
    active: torch.Tensor
    y: torch.Tensor
    rows: torch.Tensor  # dy of all ranks
    dactive: torch.Tensor
    dinner: torch.Tensor
    dx: torch.Tensor
    dup: torch.Tensor
    ddown: torch.Tensor

    def results(self) -> list[torch.Tensor]:
        return [self.y, self.dx, self.dup, self.ddown]

    def activate(self) -> None:
        gate, up = self.inner.chunk(2, 1)
        torch.mul(F.silu(gate), up, out=self.active)

    def activate_backward(self) -> None:
        gate, up = self.inner.chunk(2, 1)
        dgate, dup = self.dinner.chunk(2, 1)
        torch.mul(self.dactive, F.silu(gate), out=dup)
        dgate.copy_(torch.ops.aten.silu_backward(self.dactive * up, gate))


def draw(group: Group, tokens: int, hidden: int, inner: int, dtype: torch.dtype) -> Tensors:
    """The tensors of a rank; inner: its own inner features."""
    generator = torch.Generator(group.device).manual_seed(group.rank)

    def randn(rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, device=group.device, dtype=dtype, generator=generator).mul_(scale)

    def empty(rows: int, columns: int) -> torch.Tensor:
        return torch.empty(rows, columns, device=group.device, dtype=dtype)

    own = tokens // group.size
    return Tensors(
        x=randn(own, hidden), up=randn(2 * inner, hidden, hidden**-0.5), down=randn(hidden, inner, inner**-0.5),
        dy=randn(own, hidden), inner=empty(tokens, 2 * inner), active=empty(tokens, inner), y=empty(own, hidden),
        rows=empty(tokens, hidden), dactive=empty(tokens, inner), dinner=empty(tokens, 2 * inner),
        dx=empty(own, hidden), dup=empty(2 * inner, hidden), ddown=empty(hidden, inner),
    )  # fmt: skip


def fused(group: Group, t: Tensors) -> list[Step]:
    """The steps of a rank, by fused operators."""
    return [
        all_gather_matmul.prepare(group, t.x, t.up.t(), t.inner, None, None),
        t.activate,
        reduce_scatter.prepare(group, Sum(t.active, t.down.t(), t.y)),
        all_gather_matmul.prepare(group, t.dy, t.down, t.dactive, t.rows, None),
        lambda: torch.mm(t.rows.t(), t.active, out=t.ddown),
        t.activate_backward,
        reduce_scatter.prepare(group, Sum(t.dinner, t.up, t.dx)),
        weight_grad.prepare(group, t.x, t.dinner, t.dup.t(), None),
    ]


def host_driven(group: Group, t: Tensors) -> tuple[dict[str, list[Step]], list[Transfer]]:
    """The steps of a rank by cuBLAS and copies, in order and overlapped, and all transfers."""
    tokens, hidden = t.rows.shape
    own = tokens // group.size
    gathered, product = torch.empty_like(t.rows), torch.empty_like(t.rows)
    torch.cuda.current_stream(group.device).synchronize()
    everyone = group.exchange("operands", (t.x, t.dy))
    addresses = torch.tensor(group.exchange("products", product.data_ptr()), dtype=torch.int64, device="cpu")
    products = addresses.to(group.device)
    block = own * hidden * t.x.element_size()
    sent = dict(nvlink=group.nodes * (group.gpus_per_node - 1) * block, network=(group.nodes - 1) * block)

    def gather(which: int, target: torch.Tensor) -> Transfer:
        def move() -> None:
            for source, parts in enumerate(everyone):
                target[source * own : (source + 1) * own].copy_(parts[which])

        return Transfer(move, **sent)

    def reduce(target: torch.Tensor) -> Transfer:
        offset = group.rank * own * hidden
        return Transfer(
            lambda: add_up(products, group.size, target.view(-1), offset, DTYPES[target.dtype]), **sent
        )  # fmt: skip

    transfers = [gather(0, gathered), reduce(t.y), gather(1, t.rows), reduce(t.dx), gather(0, gathered)]
    gather_x, reduce_y, gather_dy, reduce_dx, gather_again = (one.paced(group) for one in transfers)

    def multiply_for_down() -> None:
        torch.mm(t.rows.t(), t.active, out=t.ddown)

    def multiply_for_x() -> None:
        torch.mm(t.dinner, t.up, out=product)

    def multiply_for_up() -> None:
        torch.mm(t.dinner.t(), gathered, out=t.dup)

    forward: list[Step] = [
        gather_x, lambda: torch.mm(gathered, t.up.t(), out=t.inner), t.activate,
        lambda: torch.mm(t.active, t.down.t(), out=product), BARRIER, reduce_y, BARRIER,
    ]  # fmt: skip
    begin: list[Step] = [gather_dy, lambda: torch.mm(t.rows, t.down, out=t.dactive)]
    ways: dict[str, list[Step]] = {
        "in order": [
            *forward, *begin, multiply_for_down, t.activate_backward,
            multiply_for_x, BARRIER, reduce_dx, BARRIER, gather_again, multiply_for_up,
        ],
        "overlapped": [
            *forward, *begin, multiply_for_down, t.activate_backward,
            beside(group.device, gather_again, multiply_for_x), BARRIER,
            beside(group.device, reduce_dx, multiply_for_up),
        ],
        "library": [
            lambda: torch.mm(gathered, t.up.t(), out=t.inner), t.activate,
            lambda: torch.mm(t.active, t.down.t(), out=product), lambda: torch.mm(t.rows, t.down, out=t.dactive),
            multiply_for_down, t.activate_backward, multiply_for_x, multiply_for_up,
        ],
    }  # fmt: skip
    return ways, transfers


def measure(group: Group, tokens: int, hidden: int, intermediate: int, repeats: int) -> dict[str, Any]:
    """The figures of one shape. Collective; the same on every rank."""
    t = draw(group, tokens, hidden, intermediate // group.size, torch.bfloat16)
    ways, transfers = host_driven(group, t)
    steps = fused(group, t)
    for step in [step for way in (ways["in order"], ways["overlapped"], steps) for step in way]:
        if callable(step):
            step()  # loads what it launches: nothing may be loaded while kernels wait for each other
    torch.cuda.current_stream(group.device).synchronize()
    kept = {}
    for name, way in (("in order", ways["in order"]), ("fused", steps)):
        for result in t.results():
            result.fill_(float("nan"))
        time_ways(group, {name: way}, 4)
        group.synchronize()
        kept[name] = [result.double() for result in t.results()]
    differences = [
        ((one - other).norm() / other.norm()).item() for one, other in zip(kept["fused"], kept["in order"])
    ]  # fmt: skip
    times, sustained = time_ways(group, {"fused": steps, **ways}, repeats)
    needed = [transfer.wires(group) for transfer in transfers]
    wires = max(sum(one.nvlink for one in needed), sum(one.network for one in needed))
    best = min(("in order", "overlapped"), key=lambda name: times[name])
    return {
        "tokens": tokens, "hidden": hidden, "intermediate": intermediate, "nodes": group.nodes, "ranks": group.size,
        "fused_ms": times["fused"], "library_ms": times["library"], "wire_ms": wires,
        "in_order_ms": times["in order"], "overlapped_ms": times["overlapped"],
        "speedup": times[best] / times["fused"],
        "floor_fraction": max(times["library"], wires) / times["fused"],
        "sustained_floor_fraction": max(sustained["library"], wires) / sustained["fused"],
        "largest_difference": max(group.exchange("differences", max(differences))),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in dict(ranks=4, nodes=1, tokens=4096, hidden=8192, intermediate=28672, repeats=REPEATS).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    given = parser.parse_args()
    if torch.cuda.device_count() == 0:
        print("this measures time, which needs a GPU; this machine has none")
        sys.exit(1)
    sharing = -(-given.ranks * given.nodes // torch.cuda.device_count())
    links = Links(
        nvlink=NVLINK / sharing if given.ranks > 1 else None,
        network=NETWORK / sharing if given.nodes > 1 else None,
        network_latency=NETWORK_LATENCY if given.nodes > 1 else 0.0,
    )
    found = spawn(
        measure, given.tokens, given.hidden, given.intermediate, given.repeats,
        nodes=given.nodes, gpus_per_node=given.ranks, device="cuda", links=links, timeout=120.0,
    )[0]  # fmt: skip
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
