"""matmul_reduce_scatter: y = the sum over all ranks of a @ b, each rank keeping its rows, in one kernel per rank.

What it computes. Every rank holds a slice of the depth: a [m, k_local] and b [k_local, n]. The sum of
all ranks' products is [m, n]; rank r gets rows r*m/world ... (r+1)*m/world of it, plus `bias` and
`residual`.

Who does what. One persistent launch per rank, in which all CTAs do the same (role `compute`). There
is no CTA that only adds or copies. Tile t of every rank's rows is computed by the same CTA on every
rank, so a CTA waits only for its namesakes. It has three kinds of tiles, taken in this order:

- rows of other nodes, tile after tile: first the parts of the rows whose local index is another rank of
  the node: pushed to that rank. Then the part of the rows with its own local index: it adds what the
  other ranks of its node pushed, stores the node's sum in a send slot, and asks the network to write it
  to the owner. So one sum of a node crosses the network, once, and the network starts early.
- rows of the other ranks of its node: pushed to them, beginning with the rank after itself, so that at
  any time the ranks of a node push to different ranks.
- its own rows, last: it adds what the ranks of its node pushed and what the other nodes sent, then bias
  and residual, and stores the result.

How tiles are dealt. The tiles of one rank's rows go round the CTAs. What is left for the last round is
dealt to other CTAs for every kind of tile, if there are enough (`_dealt`); else the CTAs at the front
would get one tile more for each rank.

The loop. Tiles and steps through k are one loop, so that Triton loads the first steps of a tile while
the sum of the tile before is stored. A tile's signal is sent after the next multiplication: the release
has to wait until the stores have reached the peer, and by then they have.

What is signalled. `partial[half, slot]`: the slot holds a part (or a node's sum) of the epoch. One
signal a tile; it holds the epoch and only grows.

Sums and rounding. Accumulation is in fp32. What travels is rounded to `reduce_dtype` (by default the
dtype of a): a part once, a node's sum once more. The owner's own part is never rounded. The order is
fixed: first the rank's own part, then those of the ranks behind it in its node, in turn, then the nodes
behind its own, in turn. So the same inputs give the same bits on every run. The error, beside that of
one product with all of k in fp32, is at most u * (the sum over all parts and node sums that travelled of
their absolute values), u = eps/2 of reduce_dtype, and eps/2 of the result's dtype times the result.

Why buffers are safe. Slots and signals have two halves, used in turn by the epoch's parity. A rank's
result needs a part of every rank. So a rank that begins epoch e knows that every rank has entered e-1,
and has left e-2, the last epoch that used this half: its slots have been read, what was sent from its
send slots has arrived, and nothing of that parity is in flight. No entry signal is needed.

Why it cannot deadlock. Pushing waits for nothing. Order what waits by (program id, place in the CTA's
sequence): a sum of the network's needs parts that CTAs of the same or a lower program id push, those of
the same id earlier in the same sequence; own rows need such parts, and node sums, which come earlier in
the sequence, too. So of all waiting CTAs the first in this order can always go on, even if a rank's CTAs
run one after the other. That is so if all ranks have the same number of CTAs; if not, it is enough that
all are resident, which the launch checks. A full request ring is emptied by the proxy, which waits for no
kernel. Waits have a timeout all the same.

What it costs. FLOPs 2*m*n*k_local. Each rank writes (gpus-1)*nodes*m/world*n elements over NVLink and
(nodes-1)*m/world*n over the network, and reads as many. Workspace: 2*m/world*n*(nodes*(gpus-1) +
2*(nodes-1)) elements of reduce_dtype, m/world and n rounded up to whole tiles.

Ways that lost. CTAs that only reduce, pulling from the peers (a prototype: floor fraction 0.66 with 4
ranks): they are idle at first, the others at the end. Adding with atomics: other bits on every run.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import triton
import triton.language as tl

from mkernel.lang.context import SEGMENT, current_epoch, rank_of, segment_of
from mkernel.lang.copy import pace
from mkernel.lang.device import clock
from mkernel.lang.epilogue import store_result
from mkernel.lang.flat_gemm import multiply_step
from mkernel.lang.order import swizzle_tile
from mkernel.lang.partials import load_partial, prefetch_partial, store_partial
from mkernel.lang.requests import Transfer, post
from mkernel.lang.roles import COMPUTE
from mkernel.lang.signals import PARTIAL, finish, notify, notify_in_loop, wait_again
from mkernel.lang.trace import LAST, PUSH_CHUNK, REDUCE, TILE, TILES, trace
from mkernel.runtime import hopper, planning, sums
from mkernel.runtime.config import Config
from mkernel.runtime.group import Group, Uses, collective, current
from mkernel.runtime.sums import Plan, Sum
from mkernel.runtime.tuned import Tunable
from mkernel.runtime.world import Array, Launch

OP = "matmul_reduce_scatter"
TUNABLE = Tunable(OP, agreed=("m", "n"), own=("k",), shared=("tile_m", "tile_n", "ctas"))


@triton.jit
def _dealt(tiles, SIZE: tl.constexpr):
    """(rounds, early, late): how many full rounds of each kind of tile this CTA has, and whether it has
    one more tile of some kind, first of all, or one more of its own rows, last of all.

    If the tiles that are left over go round once for all kinds together, CTA cta gets one of kind
    cta // left; kinds are numbered so that no CTA waits for a higher one (see `_taken`)."""
    cta = tl.program_id(0)
    ctas = tl.num_programs(0)
    left = tiles % ctas
    apart = left * SIZE <= ctas
    rounds = tiles // ctas + tl.where(apart, 0, tl.where(cta < left, 1, 0))
    early = tl.where(apart & (cta < left * (SIZE - 1)), 1, 0)
    late = tl.where(apart & (cta >= left * (SIZE - 1)) & (cta < left * SIZE), 1, 0)
    return rounds, early, late


@triton.jit
def _taken(place, tiles, rounds, early, SIZE: tl.constexpr, GPUS: tl.constexpr):
    """(nodes on, ranks on, tile): whose tile this CTA takes at a place of its sequence: of the rows of
    the rank that is so many nodes and so many local ranks behind this one, cyclically."""
    cta = tl.program_id(0)
    ctas = tl.num_programs(0)
    PEERS: tl.constexpr = GPUS - 1
    OTHERS: tl.constexpr = SIZE // GPUS - 1  # nodes
    left = tiles % ctas
    last = tiles - left
    nodes_on = place * 0
    ranks_on = place * 0
    tile = place * 0
    if place < early:
        # a tile of the last round; kinds: pushed for other nodes, pushed in the node, summed for other nodes
        kind = cta // tl.maximum(left, 1)
        tile = last + cta % tl.maximum(left, 1)
        if kind < OTHERS * PEERS:
            nodes_on = 1 + kind // max(PEERS, 1)
            ranks_on = 1 + kind % max(PEERS, 1)
        elif kind < (OTHERS + 1) * PEERS:
            ranks_on = 1 + kind - OTHERS * PEERS
        else:
            nodes_on = 1 + kind - (OTHERS + 1) * PEERS
    else:
        turn = place - early
        if turn < rounds * OTHERS * GPUS:
            which = turn % max(OTHERS * GPUS, 1)
            tile = turn // max(OTHERS * GPUS, 1) * ctas + cta
            if which < OTHERS * PEERS:
                nodes_on = 1 + which // max(PEERS, 1)
                ranks_on = 1 + which % max(PEERS, 1)
            else:
                nodes_on = 1 + which - OTHERS * PEERS
        else:
            turn -= rounds * OTHERS * GPUS
            if turn < rounds * PEERS:
                ranks_on = 1 + turn % max(PEERS, 1)
                tile = turn // max(PEERS, 1) * ctas + cta
            else:
                turn -= rounds * PEERS
                tile = tl.where(turn < rounds, turn * ctas + cta, last + cta - left * (SIZE - 1))
    return nodes_on, ranks_on, tile


@triton.jit
def _pushed_slot(nodes_on, place, tiles, tile, GPUS: tl.constexpr):
    """Slot of a part, in the memory of the rank that adds it: rows of the node that is `nodes_on` behind,
    pushed by the rank that is place + 1 behind the adding rank."""
    return tl.cast(nodes_on * (GPUS - 1) + place, tl.int64) * tiles + tile


@triton.jit
def _arriving_slot(place, tiles, tile, SIZE: tl.constexpr, GPUS: tl.constexpr):
    """Slot of the sum of the node that is place + 1 behind the owner's, in the owner's memory."""
    return tl.cast(SIZE // GPUS * (GPUS - 1) + place, tl.int64) * tiles + tile


@triton.jit
def _send_slot(nodes_on, tiles, tile, SIZE: tl.constexpr):
    """Slot in this rank's memory of its node's sum for the node that is `nodes_on` behind."""
    return tl.cast(SIZE - 1 + nodes_on - 1, tl.int64) * tiles + tile


@triton.jit
def _parts_are_here(context, epoch, nodes_on, tiles, tile, signals, SIZE: tl.constexpr, GPUS: tl.constexpr):
    """Wait for all that is to be added to this rank's part of a tile; 0.0, or NaN if the group gave up."""
    rank = rank_of(context)
    mine = segment_of(context, rank, tl.int64) + epoch % 2 * signals
    missing = 0.0
    for i in range(tl.where(nodes_on == 0, SIZE // GPUS + GPUS - 2, GPUS - 1)):
        slot = _pushed_slot(nodes_on, i, tiles, tile, GPUS)
        source = rank // GPUS * GPUS + (rank + 1 + i) % GPUS
        if i >= GPUS - 1:
            slot = _arriving_slot(i - (GPUS - 1), tiles, tile, SIZE, GPUS)
            source = (rank + (i - (GPUS - 1) + 1) * GPUS) % SIZE
        if not wait_again(context, mine + slot, epoch, COMPUTE, PARTIAL, source, tile):
            missing = float("nan")
    return missing


@triton.jit
def _prefetch_parts(
    context, epoch, nodes_on, tiles, tile, data_start, half,
    DTYPE: tl.constexpr, SIZE: tl.constexpr, GPUS: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """Bring what is to be added to this rank's part of a tile into the cache."""
    parts = segment_of(context, rank_of(context), DTYPE) + data_start + epoch % 2 * half
    for i in range(GPUS - 1):
        prefetch_partial(parts + _pushed_slot(nodes_on, i, tiles, tile, GPUS) * (TILE_M * TILE_N), TILE_M, TILE_N)
    for i in range(tl.where(nodes_on == 0, SIZE // GPUS - 1, 0)):
        prefetch_partial(parts + _arriving_slot(i, tiles, tile, SIZE, GPUS) * (TILE_M * TILE_N), TILE_M, TILE_N)


@triton.jit
def _push(
    context, total, epoch, nodes_on, ranks_on, tiles, tile, data_start, half, signals,
    DTYPE: tl.constexpr, GPUS: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """Push this rank's part of a tile to the rank of its node that adds it; the address of the signal
    that is due then."""
    rank = rank_of(context)
    parity = epoch % 2
    adder = rank // GPUS * GPUS + (rank + ranks_on) % GPUS
    slot = _pushed_slot(nodes_on, GPUS - 1 - ranks_on, tiles, tile, GPUS)
    parts = segment_of(context, adder, DTYPE) + data_start + parity * half
    store_partial(parts + slot * (TILE_M * TILE_N), total, TILE_M, TILE_N)
    return (segment_of(context, adder, tl.int64) + parity * signals + slot).to(tl.int64)


@triton.jit
def _send(
    context, total, epoch, nodes_on, tiles, tile, data_start, half, signals,
    DTYPE: tl.constexpr, SIZE: tl.constexpr, GPUS: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """Ask the network to write the node's sum of a tile to its owner."""
    rank = rank_of(context)
    parity = epoch % 2
    SLOT: tl.constexpr = TILE_M * TILE_N
    ELEMENT: tl.constexpr = DTYPE.primitive_bitwidth // 8
    start = data_start + parity * half
    slot = _send_slot(nodes_on, tiles, tile, SIZE)
    store_partial(segment_of(context, rank, DTYPE) + start + slot * SLOT, total, TILE_M, TILE_N)
    target = _arriving_slot(SIZE // GPUS - 1 - nodes_on, tiles, tile, SIZE, GPUS)
    segment = tl.load(context + SEGMENT)
    post(
        context,
        Transfer(
            (rank + nodes_on * GPUS) % SIZE,
            segment,
            (start + slot * SLOT) * ELEMENT,
            segment,
            (start + target * SLOT) * ELEMENT,
            SLOT * ELEMENT,
        ),
        (parity * signals + target) * 8,
        epoch,
        COMPUTE,
        True,
    )


@triton.jit
def _store(
    context, total, parts, c, bias, residual, tiles, tile, row, column, rows, n,
    c_row_stride, c_column_stride, residual_row_stride, residual_column_stride,
    SIZE: tl.constexpr, GPUS: tl.constexpr,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, RESIDUAL_DESCRIPTOR: tl.constexpr, C_DESCRIPTOR: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """Add what other nodes have sent to the node's sum of a tile of this rank's rows, and store it."""
    for i in range(SIZE // GPUS - 1):
        slot = _arriving_slot(i, tiles, tile, SIZE, GPUS)
        total += load_partial(parts + slot * (TILE_M * TILE_N), TILE_M, TILE_N)
    store_result(
        c, bias, residual, total, row, column, rows, n,
        c_row_stride, c_column_stride, residual_row_stride, residual_column_stride,
        BIAS, RESIDUAL, RESIDUAL_DESCRIPTOR, C_DESCRIPTOR, TILE_M, TILE_N,
    )  # fmt: skip


@triton.jit
def _sum(
    context, total, c, bias, residual, epoch, nodes_on, tiles, tile, row, column, rows, n,
    c_row_stride, c_column_stride, residual_row_stride, residual_column_stride,
    data_start, half, signals,
    DTYPE: tl.constexpr, SIZE: tl.constexpr, GPUS: tl.constexpr,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, RESIDUAL_DESCRIPTOR: tl.constexpr, C_DESCRIPTOR: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """Add what the node has pushed to this rank's part of a tile; then send the node's sum to its owner, or
    store it, if this rank is the owner."""
    parts = segment_of(context, rank_of(context), DTYPE) + data_start + epoch % 2 * half
    if SIZE > 1:
        total += _parts_are_here(context, epoch, nodes_on, tiles, tile, signals, SIZE, GPUS)
    for i in range(GPUS - 1):
        slot = _pushed_slot(nodes_on, i, tiles, tile, GPUS)
        total += load_partial(parts + slot * (TILE_M * TILE_N), TILE_M, TILE_N)
    if SIZE > GPUS:
        if nodes_on != 0:
            _send(
                context, total, epoch, nodes_on, tiles, tile, data_start, half, signals,
                DTYPE, SIZE, GPUS, TILE_M, TILE_N,
            )  # fmt: skip
        else:
            _store(
                context, total, parts, c, bias, residual, tiles, tile, row, column, rows, n,
                c_row_stride, c_column_stride, residual_row_stride, residual_column_stride,
                SIZE, GPUS, BIAS, RESIDUAL, RESIDUAL_DESCRIPTOR, C_DESCRIPTOR, TILE_M, TILE_N,
            )  # fmt: skip
    else:
        _store(
            context, total, parts, c, bias, residual, tiles, tile, row, column, rows, n,
            c_row_stride, c_column_stride, residual_row_stride, residual_column_stride,
            SIZE, GPUS, BIAS, RESIDUAL, RESIDUAL_DESCRIPTOR, C_DESCRIPTOR, TILE_M, TILE_N,
        )  # fmt: skip


@triton.jit
def matmul_reduce_scatter_kernel(
    context, a, a_row_stride, a_column_stride, b, b_row_stride, b_column_stride,
    c, c_row_stride, c_column_stride, bias, residual, residual_row_stride, residual_column_stride,
    rows, n, k, data_start, half, signals, nanoseconds_per_mib,
    DTYPE: tl.constexpr, SIZE: tl.constexpr, GPUS: tl.constexpr, PACED: tl.constexpr,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, RESIDUAL_DESCRIPTOR: tl.constexpr,
    A_DESCRIPTOR: tl.constexpr, B_DESCRIPTOR: tl.constexpr, B_TRANSPOSED: tl.constexpr, C_DESCRIPTOR: tl.constexpr,
    PRECISION: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """The whole operator; see the module's docstring. DTYPE is that of the parts, `rows` are a rank's."""
    epoch = current_epoch(context)
    rank = rank_of(context)
    row_blocks = tl.cdiv(rows, TILE_M)
    column_blocks = tl.cdiv(n, TILE_N)
    tiles = row_blocks * column_blocks
    rounds, early, late = _dealt(tiles, SIZE)
    steps = tl.maximum(tl.cdiv(k, TILE_K), 1)

    place = -1
    step = steps - 1
    nodes_on = 0
    ranks_on = 0
    tile = 0
    owner = 0
    row = 0
    column = 0
    signal = tl.full((), 0, tl.int64)  # address of the signal of the tile that was pushed last, if it is due
    pushed = tl.full((), 0, tl.int64)
    start = tl.full((), 0, tl.int64)
    if PACED:
        start = clock()
    total = tl.zeros((TILE_M, TILE_N), tl.float32)
    for _ in tl.range((rounds * SIZE + early + late) * steps):
        step = tl.where(step == steps - 1, 0, step + 1)
        if step == 0:
            place += 1
            nodes_on, ranks_on, tile = _taken(place, tiles, rounds, early, SIZE, GPUS)
            owner = (rank // GPUS + nodes_on) * GPUS % SIZE + (rank + ranks_on) % GPUS
            block, column_block = swizzle_tile(tile, row_blocks, column_blocks, GROUP)
            row = block * TILE_M
            column = column_block * TILE_N
        total = multiply_step(
            total, a, owner, row, rows, tl.cast(rows, tl.int64) * a_row_stride, a_row_stride, a_column_stride,
            b, column, n, step * TILE_K, k, b_row_stride, b_column_stride,
            TILE_M, TILE_N, TILE_K, A_DESCRIPTOR, B_DESCRIPTOR, B_TRANSPOSED, PRECISION,
        )  # fmt: skip
        if SIZE > 1:
            if (step == 0) & (ranks_on == 0):
                _prefetch_parts(
                    context, epoch, nodes_on, tiles, tile, data_start, half, DTYPE, SIZE, GPUS, TILE_M, TILE_N
                )
        if step == steps - 1:
            # Every way through here must use `total`: then it has been computed when it becomes zero again, and
            # the tensor cores may still be at work on it everywhere else in the loop.
            trace(context, TILES, TILE, owner, tile, LAST)
            if GPUS > 1:
                if signal != 0:
                    if PACED:
                        pace(start, pushed, nanoseconds_per_mib)
                    notify_in_loop(signal.to(tl.pointer_type(tl.int64)), epoch)
                    signal = tl.full((), 0, tl.int64)
                if ranks_on != 0:
                    signal = _push(
                        context, total, epoch, nodes_on, ranks_on, tiles, tile, data_start, half, signals,
                        DTYPE, GPUS, TILE_M, TILE_N,
                    )  # fmt: skip
                    pushed += TILE_M * TILE_N * (DTYPE.primitive_bitwidth // 8)
                    trace(context, TILES, PUSH_CHUNK, owner, tile, LAST)
                else:
                    _sum(
                        context, total, c, bias, residual, epoch, nodes_on, tiles, tile, row, column, rows, n,
                        c_row_stride, c_column_stride, residual_row_stride, residual_column_stride,
                        data_start, half, signals,
                        DTYPE, SIZE, GPUS, BIAS, RESIDUAL, RESIDUAL_DESCRIPTOR, C_DESCRIPTOR, TILE_M, TILE_N,
                    )  # fmt: skip
                    trace(context, TILES, REDUCE, owner, tile, LAST)
            else:
                _sum(
                    context, total, c, bias, residual, epoch, nodes_on, tiles, tile, row, column, rows, n,
                    c_row_stride, c_column_stride, residual_row_stride, residual_column_stride,
                    data_start, half, signals,
                    DTYPE, SIZE, GPUS, BIAS, RESIDUAL, RESIDUAL_DESCRIPTOR, C_DESCRIPTOR, TILE_M, TILE_N,
                )  # fmt: skip
                trace(context, TILES, REDUCE, owner, tile, LAST)
            total = tl.zeros((TILE_M, TILE_N), tl.float32)
    if GPUS > 1:
        if signal != 0:
            if PACED:
                pace(start, pushed, nanoseconds_per_mib)
            notify(signal.to(tl.pointer_type(tl.int64)), epoch)
    finish(context, epoch, SIZE)


def _tile(group: Group, rows: int, n: int, dtype: torch.dtype, config: Config | None) -> tuple[int, int]:
    """Rows and columns of a tile: from what is the same on every rank, since slots hold whole tiles."""
    choose = planning.chooser(config)
    wanted = planning.common_ctas(group) / group.size
    tile_m, tile_n = planning.tile_of_sum(group.device, dtype, rows, n, wanted)
    return choose("tile_m", tile_m), choose("tile_n", tile_n)


def plan(group: Group, call: Sum) -> Plan:
    """Decide how to run a call. Depends only on shapes, strides, alignment and the group."""
    rows, n = call.a.shape[0] // group.size, call.b.shape[1]
    tile_m, tile_n = _tile(group, rows, n, call.a.dtype, call.config)
    tiles = math.ceil(rows / tile_m) * math.ceil(n / tile_n)
    elements = tiles * tile_m * tile_n
    portable = sums.plan(
        OP,
        group,
        call,
        tile=(tile_m, tile_n),
        tiles=tiles,
        computed=tiles * group.size,
        ctas=min(planning.common_ctas(group), max(tiles * group.size, 1)),
        one_shot=False,
        pushed=elements * group.nodes * (group.gpus_per_node - 1),
        sent=elements * (group.nodes - 1),
    )
    if not (
        hopper.suits(group, rows, call.a.dtype, call.config, free={"ctas", "group_m"})
        and (tile_m, tile_n) == (hopper.TILE_M, hopper.TILE_N)
        and portable.a_described
        and portable.right.uses_tma
        and portable.out_described
        and call.travels == call.a.dtype
        and call.bias is None
        and call.residual is None
        and call.a.shape[1] > 0
    ):
        return portable
    return replace(
        portable,
        hopper=True,
        config=replace(portable.config, tile_k=hopper.TILE_K, stages=hopper.STAGES, warps=hopper.WARPS),
        reasons=(*portable.reasons, "the kernel for Hopper: while one warpgroup stores, the other one multiplies"),
    )


def prepare(group: Group, call: Sum) -> Launch:
    """The launch of a call whose arguments are in order. Collective when the workspace must grow."""
    call = sums.tuned(TUNABLE, group, call)
    decided = group.planned((OP, call.key), lambda: plan(group, call))
    c, size, element = decided.config, group.size, call.travels.itemsize
    slot = c.tile_m * c.tile_n * element
    workspace = group.workspace(
        OP,
        signal_words=max(2 * (size - 1) * decided.tiles, 2),
        half_bytes=(size - 1 + group.nodes - 1) * decided.tiles * slot,
    )
    if decided.hopper:
        from mkernel.ops import matmul_reduce_scatter_hopper

        return matmul_reduce_scatter_hopper.launch(group, decided, workspace, call)
    arguments = sums.arguments_of(group, decided, workspace, call, parts=size) | dict(
        rows=call.a.shape[0] // size, data_start=workspace.data_start // element,
        half=workspace.half_bytes // element, SIZE=size,
    )  # fmt: skip
    signals = workspace.signal_words // 2
    arrays = [
        Array("partial", 0, (2, size - 1, decided.tiles), 8, (signals, decided.tiles, 1)),
        *workspace.buffers(0, "parts", element, (size - 1) * decided.tiles, c.tile_m, c.tile_n),
        *workspace.buffers(
            (size - 1) * decided.tiles * slot, "sums to send", element,
            (group.nodes - 1) * decided.tiles, c.tile_m, c.tile_n,
        ),
    ]  # fmt: skip
    return Launch(
        op=OP,
        group=group,
        kernel=matmul_reduce_scatter_kernel,
        grid=c.ctas,
        arguments=arguments,
        options=dict(num_warps=c.warps, num_stages=c.stages),
        variant=sums.variant_of(decided, workspace),
        # what arrived; what was sent, the network may still be reading
        uses=Uses(workspace, arrays, [(0, (size - 1) * decided.tiles * slot)]),
        inputs=sums.INPUTS,
        results=sums.RESULTS,
    )


@collective
def matmul_reduce_scatter(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    reduce_dtype: torch.dtype | None = None,
    group: Group | None = None,
    out: torch.Tensor | None = None,
    config: Config | None = None,
) -> torch.Tensor:
    """Multiply `a` by `b` on every rank, add all ranks' products, and keep this rank's rows of the sum.

    Args:
        a: [m, k_local], this rank's slice of the depth; m and the dtype are the same on every rank and m is
            divisible by their number; k_local may differ. Any strides.
        b: [k_local, n]. A transposed view (`w.t()`) is read as it is.
        bias: [n], added to every row of the sum; the same on every rank.
        residual: [m/world, n], added to this rank's rows of the sum. It may be `out` itself.
        reduce_dtype: of what travels between ranks: torch.float32 or the dtype of a, which is the default.
        group: the group to reduce over; the current one by default.
        out: [m/world, n], where to put the result; must not overlap an input.
        config: tiles and CTAs; None takes good defaults. tile_m and tile_n are the same on every rank.

    Returns:
        [m/world, n]: rank r has rows r*m/world to (r+1)*m/world of the sum. bf16, fp16 or fp32, accumulated
        in fp32 in a fixed order of ranks: the same inputs give the same bits.

    Raises:
        ArgumentError: before anything is launched.
        CommTimeout: a peer did not come within the group's timeout. On a GPU, where calls return
            before they are done, the next call on the group or `group.synchronize()` raises it.
    """
    assert group is not None
    call = sums.call_of(TUNABLE, group, a, b, out, bias, residual, reduce_dtype, config, scatter=True)
    rows, n = call.out.shape
    tile_m, tile_n = _tile(group, rows, n, a.dtype, call.config)
    group.agree(OP, m=a.shape[0], n=n, dtype=a.dtype, reduce_dtype=call.travels, tile_m=tile_m, tile_n=tile_n)
    if call.out.numel():
        group.launch(prepare(group, call))
    else:
        group.confirm()
    return call.out


def explain(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    reduce_dtype: torch.dtype | None = None,
    group: Group | None = None,
    out: torch.Tensor | None = None,
    config: Config | None = None,
) -> Plan:
    """The plan that `matmul_reduce_scatter` with these arguments would carry out."""
    group = current(group)
    call = sums.call_of(TUNABLE, group, a, b, out, bias, residual, reduce_dtype, config, scatter=True)
    decided = plan(group, call)
    return replace(decided, reasons=(*decided.reasons, TUNABLE.origin(config, call.config)))
