"""moe_dispatch_matmul and moe_ffn compared with what they replace: exchange, permute, grouped GEMM, exchange.

A shape is (tokens of all ranks, out or inter, hidden). Every rank has 16 experts, and every token names 8 experts,
drawn at random. A single rank stands for one of 16: it has the first 16 of 256 experts, and other ids are dropped.

The baselines, each on the streams of all ranks at the same time:

- library: PyTorch's grouped GEMM (torch._grouped_mm; for types that it does not support, a GEMM per expert) on rows
  that are already in place. For moe_ffn, both GEMMs and the activation between them.
- gemm: the compute role of moe_dispatch_matmul alone, on rows that are already in place.
- host-driven: gathers rows into place at the rates of the links, then runs the library; for moe_ffn, also returns the
  weighted sums, at the same rates. It knows all counts beforehand, whereas a real implementation has to wait for them.
  A token is sent once to each rank (not node) that has one of its experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from mkernel.bench.benchmark import Benchmark, Latency, Published
from mkernel.bench.problems import worst_of
from mkernel.bench.published import GPUS_PER_NODE, NODES, RANKS
from mkernel.bench.timing import Link, time_ways
from mkernel.operators import Shape
from mkernel.ops.moe import dispatch_matmul as dispatch_op
from mkernel.ops.moe import ffn as ffn_op
from mkernel.ops.moe.grouped import Operands, Weights, multiply_block
from mkernel.ops.moe.routing import BLOCKS
from mkernel.ops.moe.workload import EXPERTS, SLOTS
from mkernel.runtime.config import Config
from mkernel.runtime.group import Group
from mkernel.runtime.world import Launch

LONE_WORLD = 16  # world size that a single rank is measured as a part of
CHECKED_TOKENS = 64
LATENCY_SHAPES = ((128, 2048, 7168), (1024, 2048, 7168))


@triton.jit
def _gemm_alone_kernel(context, rows, short_rows, w, y, gemm, tables, blocks):
    """The compute role of moe_dispatch_matmul, on the operands of an earlier launch and the `Tables` that it wrote."""
    for tile in range(tl.program_id(0), blocks * tl.cdiv(gemm.n, gemm.tiling.N), tl.num_programs(0)):
        multiply_block(context, Operands(rows, short_rows, Weights(w, gemm.w_strides), y), gemm, tables, tile)


def gemm_alone(launch: Launch, blocks: int) -> dict[str, Any]:
    """The arguments of the compute role alone, on the rows and the `blocks` blocks of an earlier launch of
    moe_dispatch_matmul."""
    same = {name: launch.arguments[name] for name in ("context", "rows", "short_rows", "w", "y", "gemm")}
    return dict(**same, tables=launch.arguments["routing"].tables, blocks=blocks)


@dataclass(frozen=True)
class Tokens:
    """The tokens of one rank, with their experts and weights, and the generator for its matrices."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    generator: torch.Generator

    def matrices(self, *shape: int) -> torch.Tensor:
        scale = shape[1] ** -0.5
        return torch.randn(*shape, device=self.x.device, dtype=self.x.dtype, generator=self.generator).mul_(scale)


def tokens_of(rank: int, size: int, tokens: int, hidden: int, dtype: torch.dtype, device: torch.device) -> Tokens:
    """The tokens of a rank. tokens: how many it has."""
    everyone = LONE_WORLD * EXPERTS if size == 1 else size * EXPERTS
    generator = torch.Generator(device).manual_seed(rank)
    x = torch.randn(tokens, hidden, device=device, dtype=dtype, generator=generator)
    ids = torch.rand(tokens, everyone, device=device, generator=generator).topk(SLOTS, dim=1).indices
    weights = torch.rand(tokens, SLOTS, device=device, generator=generator)
    return Tokens(x, torch.where(ids < size * EXPERTS, ids, -1), weights, generator)


def matrix_shapes(n: int, hidden: int, *, ffn: bool) -> list[tuple[int, int, int]]:
    """The shapes of a rank's matrices, in the order in which they are drawn. n is out, or inter for moe_ffn."""
    if ffn:
        return [(EXPERTS, hidden, 2 * n), (EXPERTS, n, hidden)]
    return [(EXPERTS, hidden, n)]


def rows_of(all_ids: Sequence[torch.Tensor], rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """For each row of a rank, in order: source rank * tokens + token, and its slot. Then the rows of each expert."""
    ids = torch.cat(list(all_ids))
    found = [(ids == expert).nonzero() for expert in range(rank * EXPERTS, (rank + 1) * EXPERTS)]
    counts = torch.tensor([len(part) for part in found], device=ids.device)
    both = torch.cat(found)
    return both[:, 0], both[:, 1], counts


class Inputs:
    """Tokens, ids, weights and matrices of one rank, and the ids of all ranks, which determine where rows go."""

    def __init__(self, group: Group, tokens: int, n: int, hidden: int, dtype: torch.dtype, *, ffn: bool):
        self.group = group
        self.mine = tokens_of(group.rank, group.size, tokens, hidden, dtype, group.device)
        self.x, self.ids, self.weights = self.mine.x, self.mine.ids, self.mine.weights
        self.matrices = [self.mine.matrices(*shape) for shape in matrix_shapes(n, hidden, ffn=ffn)]
        torch.cuda.current_stream(group.device).synchronize()
        xs = group.exchange("x", self.x)
        self.all_ids = [ids.to(group.device) for ids in group.exchange("ids", self.ids)]
        self.all_weights = [weights.to(group.device) for weights in group.exchange("weights", self.weights)]
        self.parts = torch.cat([x.to(group.device) for x in xs])  # all ranks' tokens
        self._sides = {x.device: torch.cuda.Stream(x.device) for x in xs if x.device != group.device}
        self._away = [self._from(source, x) for source, x in enumerate(xs) if x.device != group.device]

    def _from(self, source: int, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Another GPU's tokens, which of them have an expert here, and where these go in `parts`."""
        ids, first = self.all_ids[source], self.group.rank * EXPERTS
        needed = ((ids >= first) & (ids < first + EXPERTS)).any(1).nonzero().flatten()
        return x, needed.to(x.device), needed + source * len(self.x)

    def fetch(self) -> None:
        """Copy the tokens that this rank needs from other GPUs to `parts`. If all ranks share a GPU, there is nothing
        to copy: the paced link stands in for it."""
        stream = torch.cuda.current_stream(self.group.device)
        for x, there, here in self._away:
            side = self._sides[x.device]
            side.wait_stream(stream)
            with torch.cuda.stream(side):  # not the other rank's own stream, which is busy
                arrived = x.index_select(0, there).to(self.group.device, non_blocking=True)
            self.parts.index_copy_(0, here, arrived)

    def crossings(self) -> tuple[int, int, int]:
        """(tokens that a rank fetches over NVLink, that it sends over the network, and that it would send over the
        network if a token were sent to each rank instead of each node), each the maximum over all ranks."""
        group = self.group
        gpus = group.gpus_per_node
        needs = torch.stack(
            [
                torch.stack([((ids >= r * EXPERTS) & (ids < (r + 1) * EXPERTS)).any(1) for r in range(group.size)])
                for ids in self.all_ids
            ]
        )  # source, rank, token
        near = far = plain = 0
        for rank in range(group.size):
            node = rank // gpus
            fetched = sum(
                int(needs[s, rank].sum())
                for s in range(group.size)
                if s % gpus != rank % gpus or (s // gpus == node and s != rank)
            )
            nodes = needs[rank].view(group.nodes, gpus, -1).any(1).sum(1)
            sent = int(nodes.sum() - nodes[node])
            near, far = max(near, fetched), max(far, sent)
            plain = max(plain, int(needs[rank].sum() - needs[rank][node * gpus : (node + 1) * gpus].sum()))
        return near, far, plain


def grouped_mm(rows: torch.Tensor, w: torch.Tensor, ends: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """PyTorch's grouped GEMM."""
    if rows.dtype == torch.bfloat16:
        return torch._grouped_mm(rows, w, offs=ends)
    return torch.cat([part @ matrix for part, matrix in zip(rows.split(list(counts)), w, strict=True)])


def faster_layout(rows: torch.Tensor, w: torch.Tensor, ends: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """w, or a copy with contiguous columns: whichever the library multiplies faster."""
    best: tuple[float, torch.Tensor] | None = None
    for candidate in (w, w.transpose(1, 2).contiguous().transpose(1, 2)):
        try:
            grouped_mm(rows, candidate, ends, counts)
        except RuntimeError:  # the library does not support this layout
            continue
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(3):
            grouped_mm(rows, candidate, ends, counts)
        end.record()
        end.synchronize()
        if best is None or start.elapsed_time(end) < best[0]:
            best = (start.elapsed_time(end), candidate)
    assert best is not None, "the library supports neither layout"
    return best[1]


def library_of(
    matrices: Sequence[torch.Tensor], rows: torch.Tensor, counts: torch.Tensor
) -> Callable[[torch.Tensor], torch.Tensor]:
    """What the library computes from rows like these, `counts` for each expert: one grouped GEMM, or two with the
    activation in between."""
    sizes, ends = counts.tolist(), counts.cumsum(0).int()
    first = faster_layout(rows, matrices[0], ends, sizes)
    if len(matrices) == 1:
        return lambda arrived: grouped_mm(arrived, first, ends, sizes)
    second = faster_layout(rows.new_zeros(len(rows), matrices[1].shape[1]), matrices[1], ends, sizes)

    def both(arrived: torch.Tensor) -> torch.Tensor:
        gate, up = grouped_mm(arrived, first, ends, sizes).chunk(2, dim=1)
        return grouped_mm(torch.nn.functional.silu(gate) * up, second, ends, sizes)

    return both


def _wires(group: Group, inputs: Inputs, element: int, hidden: int) -> tuple[float, float, float]:
    """Milliseconds on NVLink, on the network, and for the host-driven exchange."""
    near, far, plain = inputs.crossings()
    links = group.world.links
    network = getattr(links, "network", None)
    row = hidden * element
    wire_ms = near * row / (links.nvlink * 1e6) if links.nvlink else 0.0
    latency = getattr(links, "network_latency", 0.0) * 1e3
    network_ms = far * row / (network * 1e6) + latency if network else 0.0
    plain_ms = plain * row / (network * 1e6) + latency if network else 0.0
    return wire_ms, network_ms, max(wire_ms, plain_ms)


def _figures(
    op: str, group: Group, shape: tuple[int, int, int], dtype: torch.dtype, wires: tuple[float, float],
    trips: int, measured: tuple[dict[str, float], dict[str, float]], error: float, bound: float, plan: str,
) -> dict[str, Any]:  # fmt: skip
    times, sustained = measured
    wire_ms, network_ms = (trips * wire for wire in wires)
    floor = max(wire_ms, network_ms)
    result = {
        "op": op, "m_total": shape[0], "n": shape[1], "k": shape[2], "dtype": str(dtype).removeprefix("torch."),
        "experts_per_rank": EXPERTS, "slots": SLOTS, "ranks": group.size, "nodes": group.nodes,
        "gpus": torch.cuda.device_count(), "link_gb_per_s": group.world.links.nvlink,
        "network_gb_per_s": getattr(group.world.links, "network", None),
        "emulated": group.size > torch.cuda.device_count() or group.world.links.nvlink is not None or group.nodes > 1,
        "fused_ms": times["fused"], "library_ms": times["library"], "wire_ms": wire_ms, "network_ms": network_ms,
        "host_driven_ms": times["host_driven"], "speedup": times["host_driven"] / times["fused"],
        "floor_fraction": max(times["library"], floor) / times["fused"],
        "sustained_fused_ms": sustained["fused"], "sustained_library_ms": sustained["library"],
        "sustained_host_driven_ms": sustained["host_driven"],
        "sustained_floor_fraction": max(sustained["library"], floor) / sustained["fused"],
        "max_error": error, "error_bound": bound, "plan": plan,
    }  # fmt: skip
    if "gemm" in times:
        result |= {"gemm_ms": times["gemm"], "gemm_against_library": times["library"] / times["gemm"]}
    return result


def measure_dispatch(
    group: Group, tokens_total: int, n: int, hidden: int, dtype: torch.dtype, config: Config | None, repeats: int
) -> dict[str, Any]:
    """Measure one shape of moe_dispatch_matmul. Runs on every rank and returns the same figures on each."""
    inputs = Inputs(group, tokens_total // group.size, n, hidden, dtype, ffn=False)
    (w,) = inputs.matrices
    where, _, counts = rows_of(inputs.all_ids, group.rank)
    sizes = counts.tolist()
    rows = inputs.parts[where]
    link = Link(group.device)
    wire_ms, network_ms, plain_ms = _wires(group, inputs, w.element_size(), hidden)
    multiply = library_of(inputs.matrices, rows, counts)

    def library() -> None:
        multiply(rows)

    def host_driven() -> None:
        link.open()
        inputs.fetch()
        arrived = inputs.parts[where]
        link.hold(int(plain_ms * 1e6))
        multiply(arrived)

    capacity = int(1.25 * len(where)) + 64
    agreed = dispatch_op.agree(group, inputs.x, inputs.ids, w, capacity, len(inputs.x), config)
    launch, y, handle = dispatch_op.prepare(group, inputs.x, inputs.ids, w, agreed, config)
    library()
    host_driven()
    group.launch(launch)
    group.synchronize()
    assert handle.counts.tolist() == sizes, "the kernel counts other rows than the reference"
    exact = torch.cat([part.double() @ m.double() for part, m in zip(rows.split(sizes), w, strict=True)])
    error = worst_of(group.exchange("errors", (y[: len(where)].double() - exact).abs().max().item()))
    del exact

    alone = gemm_alone(launch, int(handle.tables.summary[BLOCKS.value]))

    def gemm() -> None:
        _gemm_alone_kernel[(launch.grid,)](**alone, **launch.options)

    gemm()
    group.synchronize()
    measured = time_ways(group, dict(fused=launch, library=library, gemm=gemm, host_driven=host_driven), repeats)
    bound = 4 * torch.finfo(dtype).eps * (1 + (hidden**0.5 if dtype == torch.float32 else 0))
    plan = dispatch_op.explain(
        inputs.x, inputs.ids, w, group=group, capacity=capacity, max_tokens=len(inputs.x), config=config
    )
    return _figures(
        "moe_dispatch_matmul", group, (tokens_total, n, hidden), dtype, (wire_ms, network_ms), 1, measured,
        error, bound, str(plan),
    )  # fmt: skip


def measure_ffn(
    group: Group, tokens_total: int, inter: int, hidden: int, dtype: torch.dtype, config: Config | None, repeats: int
) -> dict[str, Any]:
    """Measure one shape of moe_ffn. Runs on every rank and returns the same figures on each."""
    inputs = Inputs(group, tokens_total // group.size, inter, hidden, dtype, ffn=True)
    gate_up, down = inputs.matrices
    where, slot, counts = rows_of(inputs.all_ids, group.rank)
    rows = inputs.parts[where]
    weights = torch.cat(list(inputs.all_weights))[where, slot].unsqueeze(1).to(dtype)
    tokens = len(inputs.x)
    partial = torch.zeros(len(inputs.parts), hidden, device=group.device, dtype=dtype)
    out = torch.empty_like(inputs.x)
    torch.cuda.current_stream(group.device).synchronize()
    partials = group.exchange("partial", partial)
    link = Link(group.device)
    wire_ms, network_ms, plain_ms = _wires(group, inputs, out.element_size(), hidden)
    experts = library_of(inputs.matrices, rows, counts)

    def library() -> None:
        experts(rows)

    def host_driven() -> None:
        link.open()
        inputs.fetch()
        arrived = inputs.parts[where]
        link.hold(int(plain_ms * 1e6))
        done = experts(arrived) * weights
        partial.zero_()
        partial.index_add_(0, where, done)
        link.open()
        mine = slice(group.rank * tokens, (group.rank + 1) * tokens)
        torch.stack([part[mine].to(group.device, non_blocking=True) for part in partials]).sum(0)
        link.hold(int(plain_ms * 1e6))

    capacity = int(1.25 * len(where)) + 64
    agreed = ffn_op.agree(group, inputs.x, inputs.ids, down, capacity, tokens, config)
    launch = ffn_op.prepare(group, inputs.x, inputs.ids, inputs.weights, gate_up, down, out, agreed, config)
    library()
    host_driven()
    out.fill_(float("nan"))
    group.synchronize()
    everyones = group.exchange("matrices", (gate_up, down))
    group.launch(launch)
    group.synchronize()
    error = worst_of(group.exchange("errors", ffn_error(inputs.mine, everyones, out)))

    measured = time_ways(group, dict(fused=launch, library=library, host_driven=host_driven), repeats)
    bound = 4 * torch.finfo(dtype).eps * (1 + (hidden**0.5 if dtype == torch.float32 else 0))
    plan = ffn_op.explain(
        inputs.x,
        inputs.ids,
        inputs.weights,
        gate_up,
        down,
        group=group,
        capacity=capacity,
        max_tokens=tokens,
        config=config,
    )
    return _figures(
        "moe_ffn", group, (tokens_total, inter, hidden), dtype, (wire_ms, network_ms), 2, measured, error, bound,
        str(plan),
    )  # fmt: skip


def ffn_error(inputs: Tokens, everyones: Iterable[tuple[torch.Tensor, torch.Tensor]], out: torch.Tensor) -> float:
    """The largest error of the first tokens against float64, relative to the sum of the magnitudes of what is added."""
    x, ids = inputs.x[:CHECKED_TOKENS].double(), inputs.ids[:CHECKED_TOKENS]
    weights = inputs.weights[:CHECKED_TOKENS].double()
    total, magnitude = torch.zeros_like(x), torch.zeros_like(x)
    for owner, (gate_up, down) in enumerate(everyones):
        for expert in range(EXPERTS):
            share = (weights * (ids == owner * EXPERTS + expert)).sum(1, keepdim=True)
            if not bool(share.any()):
                continue
            gate, up = (x @ gate_up[expert].to(x.device).double()).chunk(2, dim=1)
            inner = torch.nn.functional.silu(gate) * up
            matrix = down[expert].to(x.device).double()
            total += share * (inner @ matrix)
            magnitude += share * (inner.abs() @ matrix.abs())
    error = (out[:CHECKED_TOKENS].double() - total).abs() / magnitude.clamp_min(1e-12)
    return float(error.max().item()) if len(x) else 0.0


def _traffic(tokens: int) -> tuple[float, float]:
    """Top 8 of 256 experts: a token moves once to each rank that has one of them, and crosses the network once."""
    sent = tokens / RANKS * 7168 * 2
    ranks = GPUS_PER_NODE * (1 - (1 - 1 / RANKS) ** 8)  # of a node, on average
    return NODES * ranks * (GPUS_PER_NODE - 1) / GPUS_PER_NODE * sent, (1 - 0.5**8) * sent


def _traffic_of_ffn(tokens: int) -> tuple[float, float]:
    """Dispatch and combine."""
    return 2 * _traffic(tokens)[0], 2 * _traffic(tokens)[1]


def _published_shape(size: int, ranks: int) -> tuple[int, int, int]:
    return size // 16 * ranks, 2048, 7168


def _latency(ffn: bool) -> Callable[[Group, Shape, torch.dtype], Latency]:
    def latency(group: Group, shape: Shape, dtype: torch.dtype) -> Latency:
        tokens, n, hidden = shape[0] // group.size, *shape[1:]
        mine = tokens_of(group.rank, group.size, tokens, hidden, dtype, group.device)
        matrices = [mine.matrices(*sizes) for sizes in matrix_shapes(n, hidden, ffn=ffn)]
        counts = [tokens * SLOTS // EXPERTS + (expert < tokens * SLOTS % EXPERTS) for expert in range(EXPERTS)]
        ends = torch.tensor(counts, device=group.device).cumsum(0).to(torch.int32)
        rows = mine.x.repeat(SLOTS, 1)

        def call() -> object:
            if not ffn:
                return dispatch_op.moe_dispatch_matmul(mine.x, mine.ids, *matrices, group=group, max_tokens=tokens)
            return ffn_op.moe_ffn(mine.x, mine.ids, mine.weights, *matrices, group=group, max_tokens=tokens)

        return Latency(call, lambda: grouped_mm(rows, matrices[0], ends, counts), "torch._grouped_mm")

    return latency


DISPATCH_MATMUL = Benchmark(
    measure_dispatch,
    latency=_latency(ffn=False),
    latency_shapes=LATENCY_SHAPES,
    problem="mkernel.ops.moe.baselines:DispatchMatmul",
    published=Published(_published_shape, _traffic),
)
FFN = Benchmark(
    measure_ffn,
    latency=_latency(ffn=True),
    latency_shapes=LATENCY_SHAPES,
    problem="mkernel.ops.moe.baselines:Ffn",
    published=Published(_published_shape, _traffic_of_ffn),
)
