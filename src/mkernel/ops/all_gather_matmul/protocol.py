"""The protocol of all_gather_matmul: the contents of the workspace, and its signals. All kernels follow it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from mkernel.lang.context import rank_of, segment_of
from mkernel.lang.layout import word_of
from mkernel.lang.requests import post
from mkernel.lang.roles import COMPUTE, SEND
from mkernel.lang.signals import ARRIVED, notify, wait
from mkernel.runtime.layout import Layout


def layout(
    size: int, m: int, chunks: int, row_stride: int, dtype: torch.dtype, op: str = "all_gather_matmul"
) -> Layout:  # fmt: skip
    """The workspace of a call: m rows of each rank, in chunks; they are `row_stride` elements apart.

    arrived[source, chunk]: this chunk of the source's rows is in this workspace. It holds the epoch.
    rows: the rows of all ranks, in rank order. Rows of fp8 have their scales behind them, within the same row.
    """
    memory = Layout(op)
    memory.signals("arrived", size, chunks)
    memory.buffer("rows", dtype, size * m, row_stride)
    return memory


class Gather(NamedTuple):
    """What is gathered: m rows of k elements from each rank, in chunks. arrived, rows: see `layout`.
    nanoseconds_per_mib: one copying CTA's share of an emulated link, if PACED.

    Strides of `arrived` and `rows` may be 1. Triton 3.6 turns an integer 1 into a constant, and loses it unless the
    enclosing structure ends with a constant of its own (here PACED)."""

    m: Any
    k: Any
    chunk_rows: Any
    chunks: Any
    arrived: Any
    rows: Any
    nanoseconds_per_mib: Any
    PACED: Any


class GatheredScales(NamedTuple):
    """The scales of rows that are gathered (lang/scaling.py). They travel with the rows, in the same chunk and under
    the same signal: in the workspace, and for the network, each row is followed by its scales."""

    own: Any  # Block: those of this rank's rows, in the caller's tensor; strides of 0 if rows have the same; None if
    # the call QUANTIZES, which makes them in the workspace
    out: Any  # Block: the caller's tensor for those of all rows; not used unless GATHERED_OUT
    wide: Any  # Block: this rank's rows before they are quantized; None unless the call QUANTIZES
    AT: Any  # where they begin in a row of the workspace, in bytes
    COUNT: Any  # how many a row has
    ROWS: Any  # rows and columns of them that are copied at once
    COLUMNS: Any


class Chunk(NamedTuple):
    """Chunk `index` of the source's rows: `rows` rows, at `offset` of every rank's workspace, in elements."""

    source: Any
    index: Any
    rows: Any
    offset: Any


@triton.jit
def notify_chunk(comm, gather, peer, source, chunk):
    """Tell a rank of this node that a chunk of the source's rows is in its workspace."""
    segment = segment_of(comm.context, peer, tl.int64)
    notify(segment + word_of(gather.arrived, comm.epoch, source, chunk), comm.epoch)


@triton.jit
def post_chunk(comm, transfer, signal):
    """Post the transfer of a chunk, and of its signal at the peer, to the network. Returns the ticket."""
    return post(comm.context, transfer, signal, comm.epoch, SEND)


@triton.jit
def wait_chunk(comm, gather, source, chunk, ROLE: tl.constexpr):
    """Wait until a chunk of the source's rows is in this rank's workspace; false if the group gave up."""
    segment = segment_of(comm.context, rank_of(comm.context), tl.int64)
    signal = segment + word_of(gather.arrived, comm.epoch, source, chunk)
    return wait(comm.context, signal, comm.epoch, ROLE, ARRIVED, source, chunk)


@triton.jit
def wait_rows(comm, gather, source, row, rows):
    """Wait for the chunks that hold rows row..row+rows-1 of the source; false if the group gave up."""
    complete = True
    for chunk in range(row // gather.chunk_rows, tl.cdiv(tl.minimum(row + rows, gather.m), gather.chunk_rows)):
        complete &= wait_chunk(comm, gather, source, chunk, COMPUTE)
    return complete
