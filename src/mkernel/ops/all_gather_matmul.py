"""all_gather_matmul: y = concat of every rank's a, times this rank's b, in one kernel per rank.

What it computes. Every rank holds rows a [m, k] of a tall matrix and its own b [k, n]. The result on
each rank is the whole tall matrix [world*m, k] times its b.

Who does what. One persistent launch per rank; a CTA takes its role from its program id:

- `send` (only with several nodes, or when a's own rows cannot be read by TMA): copies the rank's rows
  into its own workspace, chunk by chunk, and asks the network to write each chunk to the rank of the
  same local index in every other node. A row crosses between two nodes once. Rows that already lie
  in the symmetric heap, contiguously, are sent from where they are.
- `intra`: pushes the rank's rows to the other ranks of its node, chunk by chunk, and signals each
  chunk. Then it does the same with the rows that arrive from other nodes, so the node spreads them.
- `compute`: takes tiles in the order in which their rows arrive: its own rows, those of the node,
  those of other nodes. Before the first use of rows it waits for their chunks.
- send and intra CTAs join the compute when they are done, with tiles of the rank's own rows that were
  left for them (see lang/roles.py).

What is signalled. `arrived[parity, rank, chunk]`: the chunk of that rank's rows is in my workspace. It
holds epochs and only grows.

Why buffers are safe. The workspace and the arrival signals have two halves, used in turn by the
epoch's parity. Epoch e writes into a peer's half without asking: a rank leaves an epoch only when rows of
every rank have arrived (also if it has no columns to compute, and calls without rows are not launched), so
a rank in epoch e knows that every rank has sent rows of e-1. That rank had left e-2 then, the last
epoch that read this half. The arrival signals need two halves too, because the
network promises no order: with one, the signal of epoch e+1 could overtake the data of epoch e and
satisfy its wait. A rank that has left e-2 has seen all arrivals of e-2, so nothing of that
parity is in flight any more; that also frees the rows that were staged for sending.

Why it cannot deadlock. send waits for nobody but the proxy, intra for other nodes' sends, compute for
both. So in every rank CTAs wait only for CTAs with lower program ids, of any rank, and
the launch of any rank waits only for launches of the same epoch. Waits have a timeout all the same.

What it costs. FLOPs 2*world*m*n*k; each rank writes (gpus-1)*nodes*m*k elements over NVLink and
(nodes-1)*m*k over the network, and its CTAs that copy are lost to the compute until they join it.
Workspace: 2*world*m*k elements per rank.

Ways that lost. Pulling (each rank reads from its peers) needs a's rows in the symmetric heap and
reads them once per peer. Handing out tiles by an atomic counter: see lang/roles.py. Reading own rows
through the workspace costs one more copy of m*k, so they are read where they are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl

from mkernel.lang.context import SEGMENT, current_epoch, rank_of, segment_of
from mkernel.lang.copy import pace, push_rows
from mkernel.lang.device import acquire_for_descriptors, clock
from mkernel.lang.gemm import multiply_tile, store_tile
from mkernel.lang.order import arriving, grouped
from mkernel.lang.requests import post, wait_sent
from mkernel.lang.roles import COMPUTE, INTRA, SEND, other_tiles_of, own_tiles_of
from mkernel.lang.signals import ARRIVED, finish, notify, wait
from mkernel.lang.trace import PUSH_CHUNK, SEND_CHUNK, TILE, TILES, trace, trace_time
from mkernel.runtime import hopper, planning
from mkernel.runtime.config import Config, Settings
from mkernel.runtime.group import Group, Uses, Workspace, collective, current
from mkernel.runtime.matmul import Right, check_out, check_product, check_tensor
from mkernel.runtime.operands import DTYPES, describable, descriptor, has_descriptors, layout, matmul_precision
from mkernel.runtime.tuned import Tunable
from mkernel.runtime.world import Array, Launch

TUNABLE = Tunable("all_gather_matmul", agreed=("m", "k"), own=("n",), shared=("chunk_rows",))


@triton.jit
def arrived(segment, parity, source, chunk, signals, SIZE: tl.constexpr):
    """Signal in a segment: a chunk of `source`'s rows has arrived. `signals` is how many a rank has in
    one half; it belongs to the workspace, not to the call, so that the halves never overlap."""
    return segment + (parity * SIZE + source).to(tl.int64) * signals + chunk


@triton.jit
def _send(
    context, a, a_stride, a_column_stride, a_segment, a_offset,
    epoch, m, k, row_stride, data_start, half, chunk_rows, chunks, signals, first, step,
    DTYPE: tl.constexpr, SIZE: tl.constexpr, GPUS: tl.constexpr, DIRECT: tl.constexpr, FLAT: tl.constexpr,
    COPY_ROWS: tl.constexpr, COPY_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Stage this rank's rows in its own workspace and post them to its counterparts."""
    rank = rank_of(context)
    parity = (epoch % 2).to(tl.int32)
    mine = segment_of(context, rank, tl.int64)
    segment = tl.load(context + SEGMENT)
    element: tl.constexpr = DTYPE.primitive_bitwidth // 8
    ticket = tl.full((), -1, tl.int64)
    # What Triton hoists out of this loop, or out of that of `_intra`, it keeps in registers through all tiles. Compiled
    # for Ampere, that spilled 320 bytes instead of 48.
    for chunk in tl.range(first, chunks, step, disable_licm=True):
        since = trace_time(context)
        row = chunk * chunk_rows
        rows = tl.minimum(m - row, chunk_rows)
        offset = data_start + parity.to(tl.int64) * half + (rank * m + row).to(tl.int64) * row_stride
        source_segment = a_segment
        source = (a_offset + row.to(tl.int64) * a_stride) * element
        if not DIRECT:
            source_segment = segment
            source = offset * element
            start = a + row.to(tl.int64) * a_stride
            if FLAT:
                push_rows(context, start, 0, 1, offset, 0, 1, rows * k, 0, 1, rank, 1, DTYPE, 1, COPY_COLUMNS)
            else:
                push_rows(
                    context, start, a_stride, a_column_stride, offset, row_stride, rows, k, 0, 1, rank,
                    1, DTYPE, COPY_ROWS, COPY_COLUMNS // COPY_ROWS,
                )  # fmt: skip
            notify(arrived(mine, parity, rank, chunk, signals, SIZE), epoch)
        signal = ((parity * SIZE + rank).to(tl.int64) * signals + chunk) * 8
        for i in range(1, SIZE // GPUS):
            peer = (rank + i * GPUS) % SIZE
            size = ((rows - 1).to(tl.int64) * row_stride + k) * element
            ticket = post(context, peer, source_segment, source, segment, offset * element, size, signal, epoch, SEND)
        trace(context, SEND, SEND_CHUNK, rank, chunk, since)
    if DIRECT:
        # the caller may overwrite a once the launch is over, so the network must have read it
        if ticket >= 0:
            wait_sent(context, ticket, SEND)


@triton.jit
def _intra(
    context, a, a_stride, a_column_stride,
    epoch, m, k, row_stride, data_start, half, chunk_rows, chunks, signals, nanoseconds_per_mib, first, step,
    DTYPE: tl.constexpr, SIZE: tl.constexpr, GPUS: tl.constexpr, FLAT: tl.constexpr, PACED: tl.constexpr,
    COPY_ROWS: tl.constexpr, COPY_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Push this rank's rows to its node, then those of its counterparts in other nodes as they arrive."""
    rank = rank_of(context)
    parity = (epoch % 2).to(tl.int32)
    base = rank // GPUS * GPUS
    local = rank % GPUS
    workspace = segment_of(context, rank, DTYPE)
    mine = segment_of(context, rank, tl.int64)
    start = clock()
    sent = tl.full((), 0, tl.int64)
    for item in tl.range(first, chunks * (SIZE // GPUS), step, disable_licm=True):
        chunk = item % chunks
        source_rank = (rank + item // chunks * GPUS) % SIZE
        row = chunk * chunk_rows
        rows = tl.minimum(m - row, chunk_rows)
        offset = data_start + parity.to(tl.int64) * half + (source_rank * m + row).to(tl.int64) * row_stride
        source = a + row.to(tl.int64) * a_stride
        source_stride = tl.cast(a_stride, tl.int64)
        source_column_stride = tl.cast(a_column_stride, tl.int64)
        if source_rank != rank:
            wait(
                context, arrived(mine, parity, source_rank, chunk, signals, SIZE), epoch,
                INTRA, ARRIVED, source_rank, chunk,
            )  # fmt: skip
            source = workspace + offset
            source_stride = tl.cast(row_stride, tl.int64)
            source_column_stride = tl.cast(1, tl.int64)
        since = trace_time(context)
        if FLAT:
            push_rows(
                context, source, 0, 1, offset, 0, 1, rows * k, local + 1, GPUS, base, GPUS - 1, DTYPE, 1, COPY_COLUMNS
            )
        else:
            push_rows(
                context, source, source_stride, source_column_stride, offset, row_stride, rows, k,
                local + 1, GPUS, base, GPUS - 1, DTYPE, COPY_ROWS, COPY_COLUMNS // COPY_ROWS,
            )  # fmt: skip
        if PACED:
            sent += rows.to(tl.int64) * k * (GPUS - 1) * (DTYPE.primitive_bitwidth // 8)
            pace(start, sent, nanoseconds_per_mib)
        trace(context, INTRA, PUSH_CHUNK, source_rank, chunk, since)
        for i in range(1, GPUS):
            peer = base + (local + i) % GPUS
            theirs = segment_of(context, peer, tl.int64)
            notify(arrived(theirs, parity, source_rank, chunk, signals, SIZE), epoch)


@triton.jit
def _rows_are_here(
    context, epoch, source, row, rows, m, chunk_rows, signals, SIZE: tl.constexpr
):  # fmt: skip
    """Wait for the chunks that hold rows row..row+rows-1 of `source`; false if the group gave up."""
    parity = (epoch % 2).to(tl.int32)
    mine = segment_of(context, rank_of(context), tl.int64)
    here = True
    for chunk in range(row // chunk_rows, tl.cdiv(tl.minimum(row + rows, m), chunk_rows)):
        here &= wait(
            context, arrived(mine, parity, source, chunk, signals, SIZE), epoch, COMPUTE, ARRIVED, source, chunk
        )
    return here


@triton.jit
def _copy_out(
    context, a, a_stride, gathered_out, gathered_stride, epoch, source, row, m, k, row_stride, data_start, half,
    DTYPE: tl.constexpr, OWN: tl.constexpr, TILE_M: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Copy a block of rows that are here to where the caller wants the gathered matrix."""
    parity = (epoch % 2).to(tl.int32)
    place = (source * m + row).to(tl.int64)
    if OWN:
        origin = a + row.to(tl.int64) * a_stride
        stride = tl.cast(a_stride, tl.int64)
    else:
        workspace = segment_of(context, rank_of(context), DTYPE)
        origin = workspace + data_start + parity.to(tl.int64) * half + place * row_stride
        stride = tl.cast(row_stride, tl.int64)
    target = gathered_out + place * gathered_stride
    rows = tl.minimum(m - row, TILE_M)
    for first in range(0, rows, ROWS):
        for column in range(0, k, COLUMNS):
            i = first + tl.arange(0, ROWS)[:, None]
            j = column + tl.arange(0, COLUMNS)[None, :]
            inside = (i < rows) & (j < k)
            block = tl.load(origin + i.to(tl.int64) * stride + j, mask=inside)
            tl.store(target + i.to(tl.int64) * gathered_stride + j, block, mask=inside)


@triton.jit
def _gather_only(
    context, a, a_stride, gathered_out, gathered_stride, epoch, m, k, row_stride, data_start, half,
    chunk_rows, signals, worker, workers,
    DTYPE: tl.constexpr, SIZE: tl.constexpr, STAGED: tl.constexpr, GATHERED_OUT: tl.constexpr,
    TILE_M: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """What a rank with no columns does instead of computing: it waits for all rows like the others.
    That it leaves an epoch only when all has arrived is what makes its buffers safe to write again."""
    rank = rank_of(context)
    blocks = tl.cdiv(m, TILE_M)
    if worker >= 0:
        for item in range(worker, blocks * SIZE, workers):
            source = item // blocks
            row = item % blocks * TILE_M
            if STAGED or source != rank:
                _rows_are_here(context, epoch, source, row, TILE_M, m, chunk_rows, signals, SIZE)
                if GATHERED_OUT:
                    _copy_out(
                        context, a, a_stride, gathered_out, gathered_stride, epoch, source, row, m, k,
                        row_stride, data_start, half, DTYPE, False, TILE_M, ROWS, COLUMNS,
                    )  # fmt: skip
            else:
                if GATHERED_OUT:
                    _copy_out(
                        context, a, a_stride, gathered_out, gathered_stride, epoch, source, row, m, k,
                        row_stride, data_start, half, DTYPE, True, TILE_M, ROWS, COLUMNS,
                    )  # fmt: skip


@triton.jit
def _compute(
    context, rows_of_a, a, a_stride, b, c, gathered_out,
    epoch, m, n, k, row_stride, data_start, half, chunk_rows, chunks, signals,
    b_row_stride, b_column_stride, c_row_stride, c_column_stride, gathered_stride,
    first, end, step,
    DTYPE: tl.constexpr, SIZE: tl.constexpr, GPUS: tl.constexpr,
    OWN: tl.constexpr, STAGED: tl.constexpr, GATHERED_OUT: tl.constexpr,
    A_DESCRIPTOR: tl.constexpr, B_DESCRIPTOR: tl.constexpr, B_TRANSPOSED: tl.constexpr, C_DESCRIPTOR: tl.constexpr,
    PRECISION: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, GROUP: tl.constexpr,
    COPY_ROWS: tl.constexpr, COPY_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute tiles first, first+step, ... below end. OWN: they are tiles of this rank's rows, which
    are read where the caller has them; else rows are read from the workspace, as they arrive there:
    those of all other ranks, and this rank's own too if they were STAGED there."""
    rank = rank_of(context)
    parity = (epoch % 2).to(tl.int32)
    blocks = tl.cdiv(m, TILE_M)
    column_blocks = tl.cdiv(n, TILE_N)
    skipped = 0 if STAGED else 1  # ranks whose rows do not come through the workspace
    for tile in tl.range(first, end, step):
        if OWN:
            source = rank
            block, column_block = grouped(tile, blocks, column_blocks, GROUP)
        else:
            place, column_block = grouped(tile, blocks * (SIZE - skipped), column_blocks, GROUP)
            source, block = arriving(place + blocks * skipped, rank, blocks, SIZE, GPUS)
        row = block * TILE_M
        column = column_block * TILE_N
        missing = 0.0
        if not OWN:
            here = _rows_are_here(context, epoch, source, row, TILE_M, m, chunk_rows, signals, SIZE)
            if A_DESCRIPTOR:
                acquire_for_descriptors()
            missing = tl.where(here, 0.0, float("nan"))
        since = trace_time(context)
        if GATHERED_OUT:
            if column_block == 0:
                _copy_out(
                    context, a, a_stride, gathered_out, gathered_stride, epoch, source, row, m, k,
                    row_stride, data_start, half, DTYPE, OWN, TILE_M, COPY_ROWS, COPY_COLUMNS // COPY_ROWS,
                )  # fmt: skip
        if OWN:
            accumulator = multiply_tile(
                rows_of_a, 0, row, m, 0, a_stride,
                b, column, n, k, b_row_stride, b_column_stride,
                TILE_M, TILE_N, TILE_K, A_DESCRIPTOR, B_DESCRIPTOR, B_TRANSPOSED, PRECISION,
            )  # fmt: skip
        else:
            accumulator = multiply_tile(
                rows_of_a, parity, source * m + row, (source + 1) * m, half, row_stride,
                b, column, n, k, b_row_stride, b_column_stride,
                TILE_M, TILE_N, TILE_K, A_DESCRIPTOR, B_DESCRIPTOR, B_TRANSPOSED, PRECISION,
            )  # fmt: skip
        if not OWN:
            accumulator += missing
        store_tile(
            c, source, row, column, m, n, c_row_stride, c_column_stride, accumulator,
            TILE_M, TILE_N, C_DESCRIPTOR,
        )  # fmt: skip
        trace(context, TILES, TILE, source, tile, since)


# what may differ from call to call, or from rank to rank, under one plan: another binary for it would be loaded
# while a peer spins
@triton.jit(do_not_specialize=["a_segment", "a_offset", "signals"])
def all_gather_matmul_kernel(
    context,
    own, a, a_stride, a_column_stride, a_segment, a_offset, gathered, b, b_row_stride, b_column_stride,
    c, c_row_stride, c_column_stride, gathered_out, gathered_stride,
    m, n, k, row_stride, data_start, half, chunk_rows, chunks, signals, join_tiles, nanoseconds_per_mib,
    DTYPE: tl.constexpr, SIZE: tl.constexpr, GPUS: tl.constexpr,
    SENDERS: tl.constexpr, INTRAS: tl.constexpr, STAGED: tl.constexpr, DIRECT: tl.constexpr, FLAT: tl.constexpr,
    GATHERED_OUT: tl.constexpr, PACED: tl.constexpr,
    A_DESCRIPTOR: tl.constexpr, B_DESCRIPTOR: tl.constexpr, B_TRANSPOSED: tl.constexpr, C_DESCRIPTOR: tl.constexpr,
    PRECISION: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, GROUP: tl.constexpr,
    COPY_ROWS: tl.constexpr, COPY_COLUMNS: tl.constexpr,
):  # fmt: skip
    """The whole operator; see the module's docstring for the roles and the signals."""
    cta = tl.program_id(0)
    epoch = current_epoch(context)
    helpers: tl.constexpr = SENDERS + INTRAS
    if cta < SENDERS:
        _send(
            context, a, a_stride, a_column_stride, a_segment, a_offset,
            epoch, m, k, row_stride, data_start, half, chunk_rows, chunks, signals, cta, SENDERS,
            DTYPE, SIZE, GPUS, DIRECT, FLAT, COPY_ROWS, COPY_COLUMNS,
        )  # fmt: skip
    if (cta >= SENDERS) & (cta < helpers):
        _intra(
            context, a, a_stride, a_column_stride,
            epoch, m, k, row_stride, data_start, half, chunk_rows, chunks, signals, nanoseconds_per_mib,
            cta - SENDERS, INTRAS,
            DTYPE, SIZE, GPUS, FLAT, PACED, COPY_ROWS, COPY_COLUMNS,
        )  # fmt: skip

    tiles = tl.cdiv(m, TILE_M) * tl.cdiv(n, TILE_N)
    before = tiles * 0
    if not STAGED:
        left = tl.minimum(join_tiles * helpers, tiles)
        before = tiles - left
        first, end, step = own_tiles_of(cta, helpers, tiles, left)
        _compute(
            context, own, a, a_stride, b, c, gathered_out,
            epoch, m, n, k, row_stride, data_start, half, chunk_rows, chunks, signals,
            b_row_stride, b_column_stride, c_row_stride, c_column_stride, gathered_stride,
            first, end, step,
            DTYPE, SIZE, GPUS, True, STAGED, GATHERED_OUT, A_DESCRIPTOR, B_DESCRIPTOR, B_TRANSPOSED, C_DESCRIPTOR,
            PRECISION, TILE_M, TILE_N, TILE_K, GROUP, COPY_ROWS, COPY_COLUMNS,
        )  # fmt: skip
    if STAGED or SIZE > 1 or GATHERED_OUT:
        if n == 0:
            _gather_only(
                context, a, a_stride, gathered_out, gathered_stride, epoch, m, k, row_stride, data_start, half,
                chunk_rows, signals, cta - helpers, tl.num_programs(0) - helpers,
                DTYPE, SIZE, STAGED, GATHERED_OUT, TILE_M, COPY_ROWS, COPY_COLUMNS // COPY_ROWS,
            )  # fmt: skip
    if STAGED or SIZE > 1:
        first, end, step = other_tiles_of(cta, helpers, before, tiles * (SIZE if STAGED else SIZE - 1))
        _compute(
            context, gathered, a, a_stride, b, c, gathered_out,
            epoch, m, n, k, row_stride, data_start, half, chunk_rows, chunks, signals,
            b_row_stride, b_column_stride, c_row_stride, c_column_stride, gathered_stride,
            first, end, step,
            DTYPE, SIZE, GPUS, False, STAGED, GATHERED_OUT, A_DESCRIPTOR, B_DESCRIPTOR, B_TRANSPOSED, C_DESCRIPTOR,
            PRECISION, TILE_M, TILE_N, TILE_K, GROUP, COPY_ROWS, COPY_COLUMNS,
        )  # fmt: skip
    finish(context, epoch, SIZE)


@dataclass(frozen=True, eq=False)
class Plan:
    """What a call will do, and why. `str(plan)` explains it."""

    config: Settings
    chunks: int
    row_stride: int
    descriptors: bool  # rows of a are read through tensor descriptors
    staged: bool  # the rank's own rows are read through the workspace
    right: Right
    out_described: bool
    flat: bool  # chunks are contiguous, here and in the workspace
    direct: bool  # the network reads a where it is
    precision: str
    hopper: bool  # runs the kernel in all_gather_matmul_hopper.py
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        c = self.config
        head = (
            f"all_gather_matmul: tiles {c.tile_m}x{c.tile_n}x{c.tile_k}, {c.ctas} CTAs "
            f"({c.send_ctas} send, {c.intra_ctas} intra, which compute {c.join_tiles} tiles each when they are done), "
            f"{self.chunks} chunks of {c.chunk_rows} rows per rank"
        )
        return "\n".join([head, *(f"- {reason}" for reason in self.reasons)])


def plan(
    group: Group, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, return_gathered: bool, config: Config | None
) -> Plan:
    """Decide how to run a call. Depends only on shapes, strides, alignment and the group."""
    m, k = a.shape
    n = b.shape[1]
    nodes, gpus = group.nodes, group.gpus_per_node
    element = a.element_size()
    reasons = []

    descriptors = has_descriptors(group.device)
    staged = not describable(a) if descriptors else a.stride(1) != 1
    right = Right.of(b, descriptors)
    out_described = descriptors and describable(out)
    row_stride = -(-k * element // 16) * 16 // element
    flat = a.is_contiguous() and row_stride == k
    direct = nodes > 1 and flat and not staged and group.heap.find(a) is not None
    if not descriptors:
        reasons.append("the device has no tensor descriptors (TMA): operands are read through pointers")
    else:
        for name, good in (("b", right.described), ("out", out_described)):
            if not good:
                reasons.append(f"{name} has no contiguous, 16-byte aligned rows: it is accessed through pointers")
    if staged:
        reasons.append("a has no contiguous, 16-byte aligned rows: it is copied into the workspace first")
    if nodes > 1:
        how = "lies in the symmetric heap: the network reads it where it is"
        reasons.append(
            f"a {how if direct else 'is staged in the workspace for the network (mk.empty would save that)'}"
        )

    tiles_of = planning.default_tiles(group.device, a.dtype, n, right.described and out_described)
    pick = planning.chooser(config)
    tile_m = pick("tile_m", tiles_of.tile_m)
    tile_n = pick("tile_n", tiles_of.tile_n)
    most = group.world.ctas(group.world_rank)
    tiles = math.ceil(m / tile_m) * math.ceil(n / tile_n) * group.size
    tile_seconds = 2 * tile_m * tile_n * k / planning.CTA_RATE[a.dtype]
    compute_seconds = tiles * tile_seconds / most
    pushed = (gpus - 1) * nodes * m * k * element
    send_ctas = pick("send_ctas", 1 if nodes > 1 or staged else 0)
    link = group.world.links.nvlink * 1e9 if group.world.links.nvlink else planning.NVLINK_RATE
    network = group.world.links.network * 1e9 if group.world.links.network else planning.NETWORK_RATE
    network_seconds = (nodes - 1) * m * k * element / network
    # what is there to hide the copies behind
    longest = max(compute_seconds, network_seconds)
    rate = planning.push_rate(gpus - 1)
    intra_ctas = pick("intra_ctas", planning.copiers_for(pushed, rate, longest, link, most) if gpus > 1 else 0)
    helpers = send_ctas + intra_ctas
    ctas = pick("ctas", min(most, max(tiles, 1) + helpers) if helpers else planning.fewest_ctas(tiles, most))
    push_seconds = pushed / min(rate * max(intra_ctas, 1), link)
    busy_seconds = max(push_seconds, network_seconds)
    done = math.ceil(busy_seconds / max(tile_seconds, 1e-9)) + 1 if group.device.type == "cuda" else 1
    # those who pass on what the network brings are busy to the end if it takes longer than the compute
    joining = helpers > 0 and not staged and (network_seconds <= compute_seconds or group.device.type != "cuda")
    join_tiles = pick("join_tiles", planning.join_tiles_for(tiles, ctas, helpers, done) if joining else 0)
    reasons.append(
        f"{intra_ctas} CTAs push {pushed} bytes over NVLink while {tiles} tiles are computed: "
        f"estimated {push_seconds * 1e3:.3g} ms and {compute_seconds * 1e3:.3g} ms"
    )
    if nodes > 1:
        reasons.append(f"estimated {network_seconds * 1e3:.3g} ms for the network")
    on_hopper = (
        _suits_hopper(group, m, a.dtype, config)
        and n > 128
        and right.described
        and out_described
        and not (staged or return_gathered)
    )
    if on_hopper:
        # no CTA only copies: each has a warp for it
        tile_m, tile_n, intra_ctas, join_tiles = hopper.TILE_M, hopper.TILE_N, 0, 0
        tiles = math.ceil(m / tile_m) * math.ceil(n / tile_n) * group.size
        ctas = pick("ctas", planning.fewest_ctas(tiles, most))
        reasons[-1:] = ["the kernel for Hopper: a warp of every CTA copies while the others multiply"]
    resolved = Settings(
        tile_m=tile_m, tile_n=tile_n, tile_k=pick("tile_k", tiles_of.tile_k), group_m=pick("group_m", tiles_of.group_m),
        stages=pick("stages", hopper.STAGES if on_hopper else tiles_of.stages),
        warps=pick("warps", hopper.WARPS if on_hopper else tiles_of.warps),
        ctas=ctas, send_ctas=send_ctas, intra_ctas=intra_ctas, join_tiles=min(join_tiles, tiles),
        chunk_rows=_chunk_rows(group, a, config),
        copy_bytes=pick("copy_bytes", tiles_of.copy_bytes),
    )  # fmt: skip
    planning.check_tile(resolved, a.dtype, descriptors and right.described)
    planning.check(
        resolved,
        max_ctas=most,
        least_send=1 if nodes > 1 or staged else 0,
        least_intra=1 if gpus > 1 and not on_hopper else 0,
    )
    return Plan(
        config=resolved,
        chunks=math.ceil(m / resolved.chunk_rows),
        row_stride=row_stride,
        descriptors=descriptors,
        staged=staged,
        right=right,
        out_described=out_described,
        flat=flat,
        direct=direct,
        precision=matmul_precision(a.dtype),
        hopper=on_hopper,
        reasons=tuple(reasons),
    )


def signals_of(workspace: Workspace, size: int) -> int:
    """Arrival signals that a rank has in one half of the workspace."""
    return workspace.signal_words // (2 * size)


def _arrays(workspace: Workspace, plan: Plan, size: int, m: int, element: int) -> list[Array]:
    """What a call keeps in the workspace."""
    signals = signals_of(workspace, size)
    arrived = Array("arrived", 0, (2, size, plan.chunks), 8, (size * signals, signals, 1))
    return [arrived, *workspace.buffers(0, "rows", element, size * m, plan.row_stride)]


def _chunk_rows(group: Group, a: torch.Tensor, config: Config | None) -> int:
    """Rows of a chunk: from what is the same on every rank, so that all ranks take the same."""
    given = config or Config()
    if given.chunk_rows is not None:
        return given.chunk_rows
    if _suits_hopper(group, a.shape[0], a.dtype, config):
        return 16  # every CTA pushes, so small chunks arrive in order
    tile_m = given.tile_m or planning.default_tiles(group.device, a.dtype, 0, True).tile_m
    return planning.rows_per_chunk(a.shape[0], tile_m)


def _suits_hopper(group: Group, m: int, dtype: torch.dtype, config: Config | None) -> bool:
    """Is there another kernel for such calls, as far as all ranks know alike?"""
    return hopper.suits(group, m, dtype, config, free={"ctas", "chunk_rows", "group_m"})


def _launch(
    group: Group, plan: Plan, workspace: Workspace, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor,
    gathered_out: torch.Tensor | None,
) -> Launch:  # fmt: skip
    """The launch that carries out a plan."""
    m, k = a.shape
    n = b.shape[1]
    c = plan.config
    size, element = group.size, a.element_size()
    data = workspace.segment.memory[workspace.data_start :].view(a.dtype)
    half = workspace.half_bytes // element
    own: Any = a
    gathered: Any = data
    c_operand: Any = out
    if plan.descriptors:
        block = [1, c.tile_m, c.tile_k]
        own = None if plan.staged else descriptor(a, [1, m, k], [0, a.stride(0), 1], block)
        gathered = descriptor(data, [2, size * m, k], [half, plan.row_stride, 1], block)
    if plan.out_described:
        c_operand = descriptor(out, [size, m, n], [m * out.stride(0), out.stride(0), 1], [1, c.tile_m, c.tile_n])
    found = group.heap.find(a) if plan.direct else None
    paced = group.world.links.nvlink is not None and c.intra_ctas > 0
    rate = (group.world.links.nvlink or 0) / max(c.intra_ctas, 1)  # GB/s of one copying CTA
    arguments = dict(
        context=workspace.context,
        own=own, a=a, a_stride=a.stride(0), a_column_stride=a.stride(1),
        a_segment=found[0].number if found else 0, a_offset=found[1] // element if found else 0,
        gathered=gathered,
        b=plan.right.operand(b, c.tile_n, c.tile_k), b_row_stride=b.stride(0), b_column_stride=b.stride(1),
        c=c_operand, c_row_stride=out.stride(0), c_column_stride=out.stride(1),
        gathered_out=gathered_out, gathered_stride=gathered_out.stride(0) if gathered_out is not None else 0,
        m=m, n=n, k=k, row_stride=plan.row_stride, data_start=workspace.data_start // element, half=half,
        chunk_rows=c.chunk_rows, chunks=plan.chunks, signals=signals_of(workspace, size), join_tiles=c.join_tiles,
        nanoseconds_per_mib=round(2**20 / rate) if paced else 0,
        DTYPE=DTYPES[a.dtype], SIZE=size, GPUS=group.gpus_per_node,
        SENDERS=c.send_ctas, INTRAS=c.intra_ctas, STAGED=plan.staged, DIRECT=plan.direct, FLAT=plan.flat,
        GATHERED_OUT=gathered_out is not None, PACED=paced,
        A_DESCRIPTOR=plan.descriptors, B_DESCRIPTOR=plan.right.described, B_TRANSPOSED=plan.right.transposed,
        C_DESCRIPTOR=plan.out_described, PRECISION=plan.precision,
        TILE_M=c.tile_m, TILE_N=c.tile_n, TILE_K=c.tile_k, GROUP=c.group_m,
        COPY_ROWS=4, COPY_COLUMNS=c.copy_bytes // element,
    )  # fmt: skip
    row_bytes = plan.row_stride * element
    foreign = [(0, group.rank * m * row_bytes), ((group.rank + 1) * m * row_bytes, size * m * row_bytes)]
    return Launch(
        op="all_gather_matmul",
        group=group,
        kernel=all_gather_matmul_kernel,
        grid=c.ctas,
        arguments=arguments,
        options=dict(num_warps=c.warps, num_stages=c.stages),
        # the workspace too: Triton makes another binary for integers with other divisors
        variant=(plan, gathered_out is not None, workspace.signal_words, workspace.half_bytes),
        uses=Uses(workspace, _arrays(workspace, plan, size, m, element), foreign),
        inputs=("own", "a", "b"),
        results=("c", "gathered_out"),
    )


def _check(group: Group, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, config: Config | None) -> None:
    """Refuse what can not be computed, naming the argument and the rule."""
    planning.check_given(config)
    for name, tensor in (("a", a), ("b", b), *([("out", out)] if out is not None else [])):
        check_tensor("all_gather_matmul", group, name, tensor)
    check_product(a, b)
    if out is not None:
        check_out(out, (group.size * a.shape[0], b.shape[1]), "world*m, n", a.dtype, {"a": a, "b": b})


@collective
def all_gather_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    group: Group | None = None,
    out: torch.Tensor | None = None,
    return_gathered: bool = False,
    config: Config | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Gather every rank's `a` and multiply it by this rank's `b`, overlapped, in one kernel.

    Args:
        a: [m, k], this rank's rows; the same shape and dtype on every rank. Any strides.
        b: [k, n]; n may differ between ranks. A transposed view (`w.t()`) is read as it is.
        group: the group to gather over; the current one by default.
        out: [world*m, n], where to put the result; must not overlap a or b.
        return_gathered: also return the gathered a, [world*m, k].
        config: tiles, chunks and CTAs; None takes good defaults.

    Returns:
        [world*m, n], the rows in rank order; with return_gathered a pair (result, gathered a).
        bf16, fp16 or fp32, accumulated in fp32.

    Raises:
        ArgumentError: before anything is launched.
        CommTimeout: a peer did not come within the group's timeout. On a GPU, where calls return
            before they are done, the next call on the group or `group.synchronize()` raises it.
    """
    assert group is not None
    _check(group, a, b, out, config)
    config = _choose(group, a, b, config)
    m, k = a.shape
    group.agree("all_gather_matmul", m=m, k=k, dtype=a.dtype, chunk_rows=_chunk_rows(group, a, config))
    rows = group.size * m
    if out is None:
        out = group.world.empty(group.world_rank, (rows, b.shape[1]), a.dtype)
    gathered = group.world.empty(group.world_rank, (rows, a.shape[1]), a.dtype) if return_gathered else None
    if a.numel():
        group.launch(prepare(group, a, b, out, gathered, config))
    else:
        group.confirm()
        out.zero_()
    return (out, gathered) if gathered is not None else out


def _choose(group: Group, a: torch.Tensor, b: torch.Tensor, given: Config | None) -> Config | None:
    """The configuration of a call. Chunks are the same on every rank, also if not all found a tuned one."""
    config = TUNABLE.choose(group, a.dtype, given, m=a.shape[0], n=b.shape[1], k=a.shape[1])
    if given is None and config is not None and config.chunk_rows is None:
        return replace(config, chunk_rows=_chunk_rows(group, a, None))
    return config


def prepare(
    group: Group, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, gathered: torch.Tensor | None,
    config: Config | None,
) -> Launch:  # fmt: skip
    """The launch of a call whose arguments are in order. Collective when the workspace must grow."""
    config = _choose(group, a, b, config)
    plain = group.heap.find(a) is None
    key = (layout(a), layout(b), layout(out), plain, gathered is None, config, matmul_precision(a.dtype))
    decided = group.planned(key, lambda: plan(group, a, b, out, gathered is not None, config))
    workspace = group.workspace(
        "all_gather_matmul",
        signal_words=2 * group.size * decided.chunks,
        half_bytes=group.size * a.shape[0] * decided.row_stride * a.element_size(),
    )
    if decided.hopper:
        from mkernel.ops import all_gather_matmul_hopper

        return all_gather_matmul_hopper.launch(group, decided, workspace, a, b, out)
    return _launch(group, decided, workspace, a, b, out, gathered)


def explain(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    group: Group | None = None,
    out: torch.Tensor | None = None,
    return_gathered: bool = False,
    config: Config | None = None,
) -> Plan:
    """The plan that `all_gather_matmul` with these arguments would carry out."""
    group = current(group)
    _check(group, a, b, out, config)
    if out is None:
        out = torch.empty((group.size * a.shape[0], b.shape[1]), dtype=a.dtype, device=a.device)
    chosen = _choose(group, a, b, config)
    decided = plan(group, a, b, out, return_gathered, chosen)
    return replace(decided, reasons=(*decided.reasons, TUNABLE.origin(config, chosen)))
