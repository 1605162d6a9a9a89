"""moe_ffn: a whole mixture-of-experts layer in one kernel per rank: dispatch, SwiGLU FFN of the experts, combine.

What it computes. For each token of this rank, the sum over the experts e that it names of its weight for e times
(silu(x @ gate_e) * (x @ up_e)) @ down_e, with biases added to the three products if there are any. Tokens move to the
ranks of their experts, and results return.

Who does what. One persistent launch per rank; a CTA takes its role from its program id. The first half is that of
moe_dispatch_matmul:

- CTA 0 announces the launch.
- `send`, `intra`: move the tokens to the ranks of their experts (dispatch.py).
- All CTAs except `send` publish the rank's routing table, ids and weights, and count rows (routing.py). The one with
  the highest program id makes the schedule of blocks (schedule.py).
- `compute`, and all other CTAs once their transfers are done: compute the tiles of both GEMMs, in one sequence
  (`interleaved` in tile_order.py), which a counter assigns. A tile of the first GEMM multiplies a block of rows by
  columns of gate and up, and stores silu(gate) * up. A tile of the second GEMM multiplies the resulting block by
  columns of down. Its result overwrites the block of tokens, which is no longer needed.
- All CTAs combine (reduction.py). The combine is divided into pieces, which another counter assigns to CTAs as they
  become free, in this order: for each chunk of tokens of other nodes, the partial sums, then the sums to send there;
  then the partial sums for chunks of tokens of this node; then the results of the rank's own chunks.

Order. The schedule has blocks with rows of other nodes before half of the blocks with rows of this node only; the first
half of those is computed while the network delivers rows. Phase 0 computes all tiles except those of the second half,
then the pieces for tokens of other nodes. Phase 1 computes the remaining tiles, while those results cross the network,
then the remaining pieces. With a single node, there is only phase 1.

What is signalled. The same as in moe_dispatch_matmul and moe_combine. Within the rank, each block of rows has three
counters: rows in place, tiles of the first GEMM and tiles of the second GEMM that are done. They are set to zero before
`counted` is signalled. `settled[parity, source, chunk]`: the tables of this rank say where the rows of that chunk are.
A piece of the combine waits for this signal, and for the second GEMM's tiles of all blocks that contain its rows.

Why buffers are safe. They have two halves, selected by the parity of the epoch, and are written after their readers
have entered e-1, as in the other two operators. Within the rank, tiles of the second GEMM overwrite a block of tokens
only after all tiles of the first GEMM have read it. A tile at the end of an expert also reads rows of the next block,
but stores nothing that it computes from them.

Why it cannot deadlock. The waits form a chain. `send` waits for entries and routing tables, and `intra` waits for
`send`. Tiles of the first GEMM wait for `intra`. Tiles of the second GEMM wait for tiles of the first, which are
earlier in the sequence, so they have been assigned already. Pieces of the combine wait for tiles and for earlier
pieces, on any rank. `send` and `intra` never wait for tiles, and tiles never wait for the combine. Pieces of phase 0
wait only for tiles of phase 0, because no other blocks contain rows of other nodes' tokens. So a CTA that has taken its
first tile of phase 1 may hold it while it works on pieces of phase 0. There is no barrier between the stages. All CTAs
must be resident, which the launch checks. Still, every wait has a timeout.

If the routing is invalid (rows beyond a capacity, ids beyond the last expert), all ranks find the same problem, fill
the result with NaN and finish. The host raises an error, and the group remains usable.

What it costs. 6*rows*hidden*inter FLOPs. The traffic is that of moe_dispatch_matmul and moe_combine. Memory on the
rank: rows*(hidden + inter) elements. Each half of the workspace has (ranks + 4*nodes - 3)*tokens*hidden elements.

Alternatives that were rejected without a measurement. All of the first GEMM, then all of the second: the combine, which
takes as long as the dispatch, would start only when most of the arithmetic is done. gate and up as one GEMM with
2*inter columns: silu needs both in one tile, so the columns of w_gate_up would have to be interleaved, which requires a
copy of it.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from mkernel.lang.context import Comm, Ranks, current_epoch
from mkernel.lang.device import acquire_for_descriptors, complete_descriptor_stores
from mkernel.lang.hints import used_below
from mkernel.lang.matrix import Block, Tile, Tiling
from mkernel.lang.roles import COMPUTE, take
from mkernel.lang.signals import finish, wait_again
from mkernel.lang.trace import TILE, TILES, trace, trace_time
from mkernel.ops.moe import protocol
from mkernel.ops.moe.arguments import check_activation, check_ffn, check_save
from mkernel.ops.moe.dispatch import dispatch_of, dispatch_tokens, fill_with_nan
from mkernel.ops.moe.grouped import (
    ROWS_BEFORE,
    Biases,
    Weights,
    bias_block,
    biased,
    empty_rows,
    gated,
    multiply_gated,
    multiply_rows,
    multiply_scaled_gated,
    multiply_scaled_rows,
    result_descriptor,
    rows_descriptor,
    store_quantized_rows,
    store_rows,
    store_rows_through_pointers,
    wait_placed,
    whole_of,
)
from mkernel.ops.moe.handle import Handle, new_handle
from mkernel.ops.moe.kinds import COMPUTED
from mkernel.ops.moe.packing import PackedLayer
from mkernel.ops.moe.pieces import COUNTERS, DONE, GATED, combine_pieces
from mkernel.ops.moe.plan import Allocation, FfnPlan, bytes_of, bytes_of_tables, plan_ffn
from mkernel.ops.moe.protocol import Batch, decode
from mkernel.ops.moe.reduction import combine_of
from mkernel.ops.moe.routing import BEFORE_NODE, BLOCKS, ENTRY, PIECES_TAKEN, TILES_TAKEN, routing_of
from mkernel.ops.moe.schedule import wait_scheduled
from mkernel.ops.moe.sizes import Sizes, capacity_of, row_stride_of, sized, slots_of
from mkernel.ops.moe.sizes import agree as agree_on_sizes
from mkernel.ops.moe.tile_order import interleaved, interleaved_until
from mkernel.runtime.collective import collective
from mkernel.runtime.config import Config
from mkernel.runtime.group import Group, current
from mkernel.runtime.layout import Layout
from mkernel.runtime.operands import constants, layout, matmul_precision, named_constants
from mkernel.runtime.scaling import SIDE
from mkernel.runtime.tuned import Tunable
from mkernel.runtime.world import Launch

TUNABLE = Tunable("moe_ffn", agreed=("tokens", "k", "hidden"), own=("inter", "experts"), shared=("chunk_rows",))
NO_BIASES = Biases()
# for the simulator: scales, which kernels only read
OF_SCALES = (
    "dispatch.packing.scales.data", "gemms.gate_up_scales.w.strides.scales.data",
    "gemms.down_scales.w.strides.scales.data",
)  # fmt: skip


class Operands(NamedTuple):
    """What the two GEMMs of the experts read and write: inner = silu(rows @ gate) * (rows @ up), then rows = inner @
    down."""

    rows: Any  # descriptor of the rows of all experts, for loads
    rows_out: Any  # descriptor of the same rows, for stores: see `result_descriptor`
    inner: Any  # descriptor
    gate_up: Any  # Weights
    down: Any  # Weights


class Gemms(NamedTuple):
    """The two GEMMs of a call, except for their `Operands`."""

    gate_up_strides: Any  # WeightStrides
    down_strides: Any
    inner_rows: Any  # Block: inner, for stores through pointers
    pre_rows: Any  # Block [row, 2*inter]: gate and up, if they are kept for a backward pass; or None
    gate_up_bias: Any  # Block [expert, 2*inter], or None
    down_bias: Any  # Block [expert, hidden], or None
    inner_scales: Any  # Block: scales of `inner`, one for each row of a tile; None unless SCALED
    gate_up_scales: Any  # ExpertScales, likewise
    down_scales: Any
    hidden: Any
    inter: Any
    tiling: Any  # Tiling
    SCALED: Any  # tokens, inner and matrices are fp8, and have scales
    ACTIVATION: Any  # of gate, see `gated`
    HALF: Any  # columns of gate in a tile, and of up


@triton.jit
def _wait_gated(context, counters, gates, block):
    """Wait until `gates` tiles of the first GEMM of a block are done and can be read through descriptors; false if the
    group gave up."""
    gated = wait_again(context, counters + GATED, gates, COMPUTE, COMPUTED, -1, block)
    acquire_for_descriptors()
    return gated


@triton.jit
def _count_tile(counter):
    """Count a tile that has been stored, through a descriptor or through pointers."""
    complete_descriptor_stores()
    tl.debug_barrier()
    tl.atomic_add(counter, 1, sem="release", scope="gpu")


@triton.jit
def _keep(gemms, tile, gate, up):
    """Store gate and up of a tile for the backward pass."""
    pre = gemms.pre_rows.data + gemms.inter
    store_rows_through_pointers(Block(pre, gemms.pre_rows.row_stride, 1), tile, up)
    store_rows_through_pointers(gemms.pre_rows, tile, gate)


@triton.jit
def _compute(context, operands, gemms, tables, tile, phase):
    """Compute `tile`, then tiles that the counter assigns. Phase 0 ends after the tiles that other nodes' tokens need,
    plus one per CTA, so that no CTA waits for the last of them. Returns the first tile that was taken but not computed.
    """
    N: tl.constexpr = gemms.tiling.N
    HALF: tl.constexpr = gemms.HALF
    GROUP: tl.constexpr = gemms.tiling.GROUP
    gates = tl.cdiv(gemms.inter, HALF)
    downs = tl.cdiv(gemms.hidden, N)
    blocks = tl.load(tables.summary + BLOCKS)
    tiles = blocks * (gates + downs)
    if phase == 0:
        far_tiles = interleaved_until(tl.load(tables.summary + BEFORE_NODE), blocks, gates, downs, GROUP)
        tiles = tl.minimum(far_tiles + tl.num_programs(0), tiles)
    while tile < tiles:
        second, index, column_block = interleaved(tile, blocks, gates, downs, GROUP)
        entry = tables.schedule + index * ENTRY
        expert = tl.load(entry)
        row = tl.load(entry + 1)
        rows = tl.load(entry + 2)
        block = tl.load(entry + 3)
        counters = tables.placed + block * COUNTERS
        if second:
            ready = _wait_gated(context, counters, gates, block)
            since = trace_time(context)
            used_below(operands.inner, row + rows)
            of_down = Tile(expert, row, row + rows, column_block * N, gemms.hidden)
            if gemms.SCALED:
                accumulator = multiply_scaled_rows(
                    operands.inner, operands.down, of_down, gemms.inter, gemms.tiling, gemms.down_scales
                )
            else:
                accumulator = multiply_rows(operands.inner, operands.down, of_down, gemms.inter, gemms.tiling)
            accumulator = biased(accumulator, gemms.down_bias, of_down, 0)
            accumulator += tl.where(ready, 0.0, float("nan"))
            store_rows(operands.rows_out, of_down, accumulator)
            trace(context, TILES, TILE, -1, tile, since)
        else:
            ready = wait_placed(context, counters, rows, block)
            since = trace_time(context)
            acquire_for_descriptors()
            used_below(operands.rows, row + rows)
            of_gate = Tile(expert, row, row + rows, column_block * HALF, gemms.inter)
            if gemms.SCALED:
                gate, up = multiply_scaled_gated(
                    operands.rows, operands.gate_up, of_gate, gemms.hidden,
                    Tiling(gemms.tiling.M, HALF, gemms.tiling.K, GROUP, gemms.tiling.PRECISION), gemms.gate_up_scales,
                )  # fmt: skip
            else:
                gate, up = multiply_gated(
                    operands.rows, operands.gate_up, of_gate, gemms.hidden,
                    Tiling(gemms.tiling.M, HALF, gemms.tiling.K, GROUP, gemms.tiling.PRECISION),
                )  # fmt: skip
            gate = biased(gate, gemms.gate_up_bias, of_gate, 0)
            up = biased(up, gemms.gate_up_bias, of_gate, gemms.inter)
            if gemms.pre_rows is not None:
                _keep(gemms, of_gate, gate, up)
            inner = gated(gate, up, gemms.ACTIVATION)
            inner += tl.where(ready, 0.0, float("nan"))
            if gemms.SCALED:
                store_quantized_rows(gemms.inner_rows, gemms.inner_scales, of_gate, inner)
            else:
                store_rows_through_pointers(gemms.inner_rows, of_gate, inner)
            trace(context, TILES, TILE, -1, tile, since)
        _count_tile(counters + tl.where(second, DONE, GATED))
        tile = take(tables.summary + TILES_TAKEN)
    return tile


@triton.jit
def _run(context, ranks, operands, routing, dispatch, gemms, combine, batch):
    """The stages. Each loads the epoch again: keeping it in a register would make the tiles spill."""
    dispatch_tokens(
        Comm(context, current_epoch(context), ranks.WORLD_SIZE, ranks.RANKS_PER_NODE), routing, dispatch, batch
    )
    tables = routing.tables
    scheduled = wait_scheduled(
        Comm(context, current_epoch(context), ranks.WORLD_SIZE, ranks.RANKS_PER_NODE), tables, batch.signals
    )
    if scheduled:
        tile = take(tables.summary + TILES_TAKEN)
        piece = take(tables.summary + PIECES_TAKEN)
        for phase in range(0 if ranks.WORLD_SIZE > ranks.RANKS_PER_NODE else 1, 2):
            tile = _compute(context, operands, gemms, tables, tile, phase)
            piece = combine_pieces(
                Comm(context, current_epoch(context), ranks.WORLD_SIZE, ranks.RANKS_PER_NODE),
                routing, gemms, combine, batch, piece, phase,
            )  # fmt: skip
    else:
        fill_with_nan(combine.out, batch.tokens, combine.columns, tl.program_id(0), tl.num_programs(0))
    finish(context, current_epoch(context), ranks.WORLD_SIZE)


@triton.jit
def moe_ffn_kernel(
    context, ranks, rows, rows_out, inner, gate_up, down, routing, dispatch, gemms, combine, batch
):  # fmt: skip
    """The whole operator. ranks: `Ranks`; rows, rows_out, inner, gate_up, down: see `Operands`; routing: `Routing`;
    dispatch: `Dispatch`; gemms: `Gemms`; combine: `Combine`; batch: `Batch`, encoded."""
    _run(
        context, ranks,
        Operands(
            rows, rows_out, inner, Weights(gate_up, gemms.gate_up_strides), Weights(down, gemms.down_strides)
        ),
        routing, dispatch, gemms, combine,
        Batch(
            decode(batch.tokens), decode(batch.max_tokens), decode(batch.experts), decode(batch.capacity),
            decode(batch.chunks), batch.nanoseconds_per_mib, batch.signals,
        ),
    )  # fmt: skip


class Memory(NamedTuple):
    """What a launch computes with, in the rank's own memory. y: the results of the second GEMM, `rows` unless these are
    kept for a backward pass; pre: gate and up, likewise."""

    rows: torch.Tensor
    inner: torch.Tensor
    y: torch.Tensor
    pre: torch.Tensor | None
    inner_scales: torch.Tensor | None = None


def _allocate(group: Group, plan: FfnPlan, w_down: torch.Tensor, keep: str) -> Memory:
    sizes, tile_m, dtype = plan.sizes, plan.config.tile_m, w_down.dtype
    _, inter, hidden = w_down.shape
    capacity, empty = max(sizes.capacity, 1), group.world.memory.empty
    inner = empty(group.world_rank, (capacity, row_stride_of(inter, dtype)), dtype)[:, :inter]
    y = empty_rows(group, capacity, hidden, dtype, tile_m)
    if keep != "activations":
        return Memory(y, inner, y, None)
    rows = empty_rows(group, capacity, hidden, dtype, ROWS_BEFORE)
    pre = empty(group.world_rank, (capacity, row_stride_of(2 * inter, dtype)), dtype)[:, : 2 * inter]
    return Memory(rows, inner, y, pre)


def launch_of(
    group: Group, plan: FfnPlan, memory: Layout, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor,
    w_gate_up: torch.Tensor, w_down: torch.Tensor, out: torch.Tensor, own: Memory, handle: Handle,
    activation: str, biases: Biases, packed: PackedLayer | None = None,
) -> Launch:  # fmt: skip
    """The launch that carries out a plan. Collective if the workspace must grow. packed: tokens and matrices in fp8;
    then rows are packed tokens."""
    workspace = memory.workspace(group)
    c, sizes = plan.config, plan.sizes
    _, inter, hidden = w_down.shape
    rows, inner, y, pre, inner_scales = own
    elements = rows if packed is None else packed.x.rows(rows)
    half = c.tile_n // 2 if packed is None else SIDE
    dispatch = dispatch_of(
        group, plan, memory, workspace, x, rows, ids=topk_ids, weights=topk_weights,
        packed=None if packed is None else packed.x, counters=COUNTERS.value, combines=True,
    )  # fmt: skip
    gemms = Gemms(
        gate_up_strides=plan.gate_up.strides(w_gate_up),
        down_strides=plan.down.strides(w_down),
        inner_rows=Block(inner, inner.stride(0), 1),
        pre_rows=None if pre is None else Block(pre, pre.stride(0), 1),
        gate_up_bias=bias_block(biases.gate_up),
        down_bias=bias_block(biases.down),
        inner_scales=None if inner_scales is None else Block(inner_scales, inner_scales.stride(0), 1),
        gate_up_scales=None if packed is None else packed.x.expert_scales(rows),
        down_scales=None if packed is None else packed.down_scales(inner_scales),
        hidden=hidden,
        inter=inter,
        tiling=Tiling(*constants(c.tile_m, c.tile_n, c.tile_k, c.group_m, plan.precision)),
        **named_constants(SCALED=packed is not None, ACTIVATION=activation, HALF=half),
    )
    combine = combine_of(group, memory, workspace, y, out, c.copy_bytes // 4)
    return Launch(
        op=plan.op,
        group=group,
        kernel=moe_ffn_kernel,
        grid=c.ctas,
        arguments=dict(
            context=workspace.context,
            ranks=Ranks(*constants(group.size, group.gpus_per_node)),
            rows=rows_descriptor(elements, c.tile_m, c.tile_k),
            rows_out=result_descriptor(y, c.tile_m, c.tile_n),
            inner=rows_descriptor(inner, c.tile_m, c.tile_k),
            gate_up=plan.gate_up.operand(w_gate_up, c.tile_k, half),
            down=plan.down.operand(w_down, c.tile_k, c.tile_n),
            routing=routing_of(sizes, memory, workspace, handle.tables, ids=True, weights=True),
            dispatch=dispatch,
            gemms=gemms,
            combine=combine,
            batch=protocol.batch_of(group, sizes, memory, workspace),
        ),
        options=dict(num_warps=c.warps, num_stages=c.stages),
        # including the size of the workspace: Triton compiles another binary for 64-bit integers
        variant=(plan, workspace.half_bytes, pre is not None, activation, biases.layouts),
        uses=memory.uses(workspace),
        inputs=(
            "dispatch.x.data", "dispatch.ids.data", "dispatch.weights.data", "gate_up", "down",
            "gemms.gate_up_bias.data", "gemms.down_bias.data", *(() if packed is None else OF_SCALES),
        ),
        results=("combine.out.data",),
        scratch=(
            whole_of(y, c.tile_m), *([] if packed else [whole_of(inner, 0)]), handle.memory.view(torch.float32)
        ),
    )  # fmt: skip


@collective
def moe_ffn(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    *,
    group: Any,
    b_gate_up: torch.Tensor | None = None,
    b_down: torch.Tensor | None = None,
    capacity: int | None = None,
    max_tokens: int | None = None,
    activation: str = "silu",
    out: torch.Tensor | None = None,
    config: Config | None = None,
) -> torch.Tensor:
    """`mk.moe_ffn`, without PyTorch's dispatcher."""
    passed = (x, topk_ids, topk_weights, w_gate_up, w_down, out, b_gate_up, b_down)
    key, made = _repeat(group, passed, (capacity, max_tokens, activation, config))
    if made is not None:
        return made[0] if out is None else out
    check_activation(activation)
    biases = Biases(b_gate_up, b_down)
    check_ffn(group, x, topk_ids, topk_weights, w_gate_up, w_down, biases, capacity, max_tokens, out, config)
    sizes = agree(group, x, topk_ids, w_down, capacity, max_tokens, config)
    result = group.world.memory.empty(group.world_rank, tuple(x.shape), x.dtype) if out is None else out
    launch = prepare(group, x, topk_ids, topk_weights, w_gate_up, w_down, result, sizes, config, activation, biases)
    group.launch(launch, key, passed, [result] * (out is None))
    return result


def _repeat(
    group: Group, passed: tuple[Any, ...], rest: tuple[Any, ...]
) -> tuple[Hashable | None, list[torch.Tensor] | None]:
    if rest[1] is None and group.size > 1:
        return None, None  # without max_tokens, the ranks exchange their numbers of tokens at every call
    return group.prepared.repeat("moe_ffn", passed, rest, out=5)


def repeat(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    *,
    group: Group,
    b_gate_up: torch.Tensor | None = None,
    b_down: torch.Tensor | None = None,
    capacity: int | None = None,
    capacity_factor: float | None = None,
    max_tokens: int | None = None,
    activation: str = "silu",
    out: torch.Tensor | None = None,
    config: Config | None = None,
) -> torch.Tensor | None:
    """The result of a prepared call of `mk.moe_ffn`; None for others."""
    capacity = capacity_of(capacity, capacity_factor, max_tokens, slots_of(topk_ids), group.size)
    passed = (x, topk_ids, topk_weights, w_gate_up, w_down, out, b_gate_up, b_down)
    _, made = _repeat(group, passed, (capacity, max_tokens, activation, config))
    return None if made is None else made[0] if out is None else out


def agree(
    group: Group, x: torch.Tensor, topk_ids: torch.Tensor, w_down: torch.Tensor, capacity: int | None,
    max_tokens: int | None, config: Config | None,
) -> Sizes:  # fmt: skip
    """The sizes of a call with valid arguments. Collective."""
    return agree_on_sizes(
        "moe_ffn", group, x, topk_ids, w_down.shape[0], capacity, max_tokens, config,
        lambda most: choose(group, x, topk_ids, w_down, most, config),
    )  # fmt: skip


def choose(
    group: Group, x: torch.Tensor, topk_ids: torch.Tensor, w_down: torch.Tensor, max_tokens: int, given: Config | None
) -> Config | None:
    """The configuration of a call in which no rank has more than max_tokens tokens. Its chunk size depends only on
    values that are the same on every rank, whether it is tuned or not."""
    experts, inter, hidden = w_down.shape
    return TUNABLE.choose(
        group, x.dtype, given, tokens=max_tokens, k=topk_ids.shape[1], hidden=hidden, inter=inter, experts=experts
    )


def prepare(
    group: Group, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, w_gate_up: torch.Tensor,
    w_down: torch.Tensor, out: torch.Tensor, sizes: Sizes, config: Config | None, activation: str = "silu",
    biases: Biases = NO_BIASES,
) -> Launch:  # fmt: skip
    """The launch of a call with valid arguments. Collective if the workspace must grow."""
    given = (x, topk_ids, topk_weights, w_gate_up, w_down)
    return prepare_kept(group, *given, out, sizes, config, "", activation, biases)[0]


def prepare_kept(
    group: Group, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, w_gate_up: torch.Tensor,
    w_down: torch.Tensor, out: torch.Tensor, sizes: Sizes, config: Config | None, keep: str,
    activation: str = "silu", biases: Biases = NO_BIASES,
) -> tuple[Launch, Handle, Memory]:  # fmt: skip
    """The same, with the handle of its routing and its memory, for a backward pass. keep: see backward.py."""
    config = choose(group, x, topk_ids, w_down, sizes.max_tokens, config)
    key = (
        "moe_ffn", layout(x), layout(topk_ids), layout(out), layout(topk_weights), layout(w_gate_up), layout(w_down),
        sizes, config, matmul_precision(x.dtype),
    )  # fmt: skip
    decided = group.planned(key, lambda: plan_ffn(group, x, w_gate_up, w_down, sizes, config))
    memory = protocol.layout("moe_ffn", sizes, x.dtype, decided.row_stride, dispatches=True, combines=True)
    own = _allocate(group, decided, w_down, keep)
    handle = new_handle(group, sizes, decided.config.tile_m)
    given = (x, topk_ids, topk_weights, w_gate_up, w_down)
    return launch_of(group, decided, memory, *given, out, own, handle, activation, biases), handle, own


def explain(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    *,
    group: Any = None,
    b_gate_up: torch.Tensor | None = None,
    b_down: torch.Tensor | None = None,
    capacity: int | None = None,
    capacity_factor: float | None = None,
    max_tokens: int | None = None,
    activation: str = "silu",
    save: str = "inputs",
    out: torch.Tensor | None = None,
    config: Config | None = None,
) -> FfnPlan:
    """The plan that `moe_ffn` would carry out with these arguments, if no rank had more than max_tokens tokens (by
    default, more than this rank)."""
    group = current(group)
    capacity = capacity_of(capacity, capacity_factor, max_tokens, slots_of(topk_ids), group.size)
    check_activation(activation)
    check_save(save)
    biases = Biases(b_gate_up, b_down)
    check_ffn(group, x, topk_ids, topk_weights, w_gate_up, w_down, biases, capacity, max_tokens, out, config)
    most = max(x.shape[0] if max_tokens is None else max_tokens, 1)
    chosen = choose(group, x, topk_ids, w_down, most, config)
    sizes = sized(group, topk_ids, w_down.shape[0], capacity, most, group.size * most, chosen)
    decided = plan_ffn(group, x, w_gate_up, w_down, sizes, chosen)
    allocated = _allocation(decided, x, w_down, save == "activations", out is None)
    return replace(
        decided, reasons=(*decided.reasons, str(allocated), TUNABLE.origin(config, chosen)), memory=allocated
    )


def _allocation(plan: FfnPlan, x: torch.Tensor, w_down: torch.Tensor, keeps: bool, allocates_out: bool) -> Allocation:
    """What a call allocates: see `_allocate` and `prepare_kept`."""
    sizes, dtype = plan.sizes, x.dtype
    _, inter, hidden = w_down.shape
    capacity = max(sizes.capacity, 1)
    own = bytes_of(plan.config.tile_m + capacity, hidden, dtype) + bytes_of(capacity, inter, dtype)
    if keeps:
        own += bytes_of(ROWS_BEFORE + capacity, hidden, dtype) + bytes_of(capacity, 2 * inter, dtype)
    memory = protocol.layout("moe_ffn", sizes, dtype, plan.row_stride, dispatches=True, combines=True)
    return Allocation(x.nbytes if allocates_out else 0, own, bytes_of_tables(sizes), memory.nbytes)
