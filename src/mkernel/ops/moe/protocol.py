"""The protocol between ranks: the arrays in the workspace, the signals, and when a rank may write to a buffer.

Signals and buffers have two halves, selected by the parity of the epoch. The ranks of a node read what one of them
writes to its own memory. The ranks of the counterpart's node read what a rank sends to its counterpart. Epoch e reuses
the half of epoch e-2, so these readers must have left e-2 before the rank writes. The rank therefore waits until they
have entered e-1 (`wait_node_entered`, `wait_other_nodes_entered`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from mkernel.lang.context import SEGMENT, rank_of, segment_of
from mkernel.lang.layout import word_of
from mkernel.lang.requests import Transfer, post
from mkernel.lang.roles import INTRA, SEND
from mkernel.lang.signals import ENTERED, notify, wait
from mkernel.ops.moe.kinds import COUNTED, HELD, NUMBERED
from mkernel.ops.moe.sizes import Sizes, round_up
from mkernel.runtime.group import Group, Workspace
from mkernel.runtime.layout import Layout
from mkernel.runtime.operands import constants

# Words of a published routing table: the header, then the ids, then the weights (only those that the operator needs).
TOKENS = tl.constexpr(0)
EXPERTS = tl.constexpr(1)
CAPACITY = tl.constexpr(2)
HEADER = tl.constexpr(16)


class Signals(NamedTuple):
    """The signals of a workspace, each a `Words`; None if the operator does not use it. All hold epochs."""

    entered: Any  # [rank]: that rank of my node has entered the epoch
    node_entered: Any  # [node]: all ranks of that node have entered the epoch
    counted: Any  # within the rank: rows are counted and have row numbers
    scheduled: Any  # within the rank: the schedule of blocks is complete
    numbered: Any  # within the rank: the tokens to send to other nodes are numbered
    routed: Any  # [source]: the routing table of that rank is in this rank's memory
    held: Any  # [source, chunk]: that chunk of the source's tokens is in this rank's memory
    settled: Any  # [source, chunk]: within the rank: destinations and ids of that chunk are in `Tables`
    returned: Any  # [source, chunk]: this rank's partial sums for that chunk of the source's tokens are ready
    back: Any  # [peer, chunk]: the sums of the peer's node for that chunk of my tokens have arrived


class Batch(NamedTuple):
    """Numbers that vary with the batch. Kernels must not be specialized for them: each new binary would be compiled
    while a model is being served. But inside structures, Triton 3.6 specializes integers that are 1 or a multiple of
    16, regardless of `do_not_specialize`. So the host passes each number n as 2*n + 3, which is neither (`batch_of`),
    the kernel's entry decodes it (`decode`), and all signals start at multiples of 16 words (`layout`)."""

    tokens: Any  # of this rank
    max_tokens: Any  # bound on the tokens of any rank
    experts: Any  # of this rank
    capacity: Any  # bound on the rows of this rank
    chunks: Any  # of max_tokens tokens
    nanoseconds_per_mib: Any  # of an emulated link
    signals: Any  # Signals


def layout(
    op: str, sizes: Sizes, dtype: torch.dtype, row_stride: int, *, dispatches: bool = False, combines: bool = False,
    packs: bool = False, sums: tuple[torch.dtype, int] | None = None,
) -> Layout:  # fmt: skip
    """The workspace of a call that dispatches tokens, combines results, or both. For the signals see `Signals`. sums:
    dtype and row stride of what is combined, if they are others.

    tables: published routing tables. The row of a rank is valid on that rank and on its counterparts.
    staged: this rank's tokens, for the ranks of its node to fetch. If it `packs` them, also for itself.
    send, recv: tokens for and from other nodes, with an area for each value of `away`.
    partial: for each token of each rank, the sum of its rows on this rank.
    combine_send, combine_recv: sums of a node, on their way to the ranks of the tokens.
    """
    memory = Layout(op)
    memory.words("entered", sizes.world_size)
    memory.words("node_entered", sizes.nodes)
    for name in ("counted", "scheduled", "numbered") if dispatches else ():
        memory.words(name, 1)
    before = sizes.world_size + sizes.nodes + (3 if dispatches else 0)
    memory.words("unused", round_up(before, 16) - before)
    memory.signals("routed", round_up(sizes.world_size, 16))
    by_chunk = {"held": dispatches, "settled": dispatches and combines, "returned": combines, "back": combines}
    for name, used in by_chunk.items():
        if used:
            memory.signals(name, sizes.world_size, round_up(sizes.chunks, 16))
    words = HEADER.value + sizes.max_tokens * sizes.k * (dispatches + combines)
    memory.buffer("tables", torch.int32, sizes.world_size, round_up(words, 16))
    far = (sizes.nodes - 1) * sizes.max_tokens
    if dispatches:
        memory.buffer("staged", dtype, sizes.max_tokens if packs or sizes.ranks_per_node > 1 else 0, row_stride)
        memory.buffer("send", dtype, far, row_stride)
        memory.buffer("recv", dtype, far, row_stride)
    dtype, row_stride = sums or (dtype, row_stride)
    if combines:
        memory.buffer("partial", dtype, sizes.world_size * sizes.max_tokens, row_stride)
        memory.buffer("combine_send", dtype, far, row_stride)
        memory.buffer("combine_recv", dtype, far, row_stride)
    return memory


def batch_of(group: Group, sizes: Sizes, memory: Layout, workspace: Workspace) -> Batch:
    """The `Batch` of a launch, with its numbers encoded."""
    signals = Signals(*(memory.words_in(workspace, name) if name in memory else None for name in Signals._fields))
    gigabytes_per_second = group.world.links.nvlink if is_paced(group) else None
    return Batch(
        encode(sizes.tokens), encode(sizes.max_tokens), encode(sizes.experts), encode(sizes.capacity),
        encode(sizes.chunks), round(2**20 / gigabytes_per_second) if gigabytes_per_second else 0, signals,
    )  # fmt: skip


def encode(number: int) -> int:
    """A number of the batch as kernels get it: see `Batch`."""
    return 2 * number + 3


def is_paced(group: Group) -> bool:
    """Whether the links between the ranks of a node are emulated."""
    return group.world.links.nvlink is not None and group.gpus_per_node > 1


def copies_of(group: Group, copy_bytes: int, dtype: torch.dtype) -> dict[str, Any]:
    """How a CTA copies and sums rows, with `copy_bytes` bytes in flight: fields of `Dispatch` and `Combine`."""
    rows = 4
    columns = max(copy_bytes // dtype.itemsize // rows, 1)
    return dict(zip(("ROWS", "COLUMNS", "PACED"), constants(rows, columns, is_paced(group))))


@triton.jit
def decode(encoded):
    """A number of the batch, from its encoded form: see `Batch`."""
    return ((encoded - 3) >> 1).to(tl.int32)


@triton.jit
def signal_of(comm, rank, words, i, j):
    """Pointer to signal [i, j] in the memory of a rank of my node."""
    return segment_of(comm.context, rank, tl.int64) + word_of(words, comm.epoch, i, j)


@triton.jit
def holder_of(comm, source):
    """The rank of my node that holds the data of `source`: the source itself, or its counterpart in my node."""
    rank = rank_of(comm.context)
    base = rank // comm.RANKS_PER_NODE * comm.RANKS_PER_NODE
    near = source // comm.RANKS_PER_NODE == rank // comm.RANKS_PER_NODE
    return tl.where(near, source, base + source % comm.RANKS_PER_NODE)


@triton.jit
def announce(comm, signals):
    """Signal to the ranks of my node that I have entered the epoch."""
    rank = rank_of(comm.context)
    base = rank // comm.RANKS_PER_NODE * comm.RANKS_PER_NODE
    for i in range(1, comm.RANKS_PER_NODE):
        peer = base + (rank + i) % comm.RANKS_PER_NODE
        notify(signal_of(comm, peer, signals.entered, rank, 0), comm.epoch)


@triton.jit
def announce_node(comm, signals, ROLE: tl.constexpr):
    """Signal to my counterparts that all ranks of my node have entered the epoch. All of them, because all of them read
    what the counterparts write to my memory."""
    rank = rank_of(comm.context)
    segment = tl.load(comm.context + SEGMENT)
    signal = word_of(signals.node_entered, comm.epoch, rank // comm.RANKS_PER_NODE, 0) * 8
    if wait_node_entered(comm, signals, comm.epoch, ROLE):
        for i in range(1, comm.WORLD_SIZE // comm.RANKS_PER_NODE):
            peer = (rank + i * comm.RANKS_PER_NODE) % comm.WORLD_SIZE
            post(comm.context, Transfer(peer, segment, 0, segment, 0, 0), signal, comm.epoch, ROLE)


@triton.jit
def notify_routed(comm, signals, rank):
    """Signal to my node that my routing table is in my memory. rank: mine."""
    notify(signal_of(comm, rank, signals.routed, rank, 0), comm.epoch)


@triton.jit
def notify_held(comm, signals, rank, chunk):
    """Signal to my node that a chunk of my tokens is in my memory. rank: mine."""
    notify(signal_of(comm, rank, signals.held, rank, chunk), comm.epoch)


@triton.jit
def post_held(comm, transfer, signal):
    """Post the transfer of a chunk's tokens to my counterpart, with the `held` signal to raise there."""
    post(comm.context, transfer, signal, comm.epoch, SEND)


@triton.jit
def wait_held(comm, signals, holder, source, chunk):
    """Wait until a chunk of the source's tokens is in the memory of `holder`, a rank of my node; false if the group
    gave up."""
    signal = signal_of(comm, holder, signals.held, source, chunk)
    return wait(comm.context, signal, comm.epoch, INTRA, HELD, source, chunk)


@triton.jit
def wait_staged(comm, signals, rank, chunk):
    """Wait, before it is sent, until a chunk of my tokens is packed in my memory; false if the group gave up. rank:
    mine."""
    signal = signal_of(comm, rank, signals.held, rank, chunk)
    return wait(comm.context, signal, comm.epoch, SEND, HELD, rank, chunk)


@triton.jit
def wait_counted(comm, counted):
    """Wait until the rows of this rank have row numbers; false if the group gave up. counted: the signal."""
    return wait(comm.context, counted, comm.epoch, INTRA, COUNTED, -1, 0)


@triton.jit
def wait_numbered(comm, numbered, ROLE: tl.constexpr):
    """Wait until the tokens that this rank sends to other nodes are numbered; false if the group gave up. numbered: the
    signal."""
    return wait(comm.context, numbered, comm.epoch, ROLE, NUMBERED, -1, 0)


@triton.jit
def wait_node_entered(comm, signals, epoch, ROLE: tl.constexpr):
    """Wait until all ranks of my node have entered an epoch; false if the group gave up."""
    rank = rank_of(comm.context)
    base = rank // comm.RANKS_PER_NODE * comm.RANKS_PER_NODE
    good = tl.full((), True, tl.int1)
    for i in range(1, comm.RANKS_PER_NODE):
        peer = base + (rank + i) % comm.RANKS_PER_NODE
        signal = signal_of(comm, rank, signals.entered, peer, 0)
        good &= wait(comm.context, signal, epoch, ROLE, ENTERED, peer, 0)
    return good


@triton.jit
def wait_other_nodes_entered(comm, signals, epoch, ROLE: tl.constexpr):
    """Wait until all ranks of all other nodes have entered an epoch; false if the group gave up."""
    rank = rank_of(comm.context)
    good = tl.full((), True, tl.int1)
    for i in range(1, comm.WORLD_SIZE // comm.RANKS_PER_NODE):
        peer = (rank + i * comm.RANKS_PER_NODE) % comm.WORLD_SIZE
        signal = signal_of(comm, rank, signals.node_entered, peer // comm.RANKS_PER_NODE, 0)
        good &= wait(comm.context, signal, epoch, ROLE, ENTERED, peer, 0)
    return good
