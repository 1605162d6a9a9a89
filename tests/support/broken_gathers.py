"""Steps of the roles that gather rows, broken: what both kernels that gather them must not do."""

from __future__ import annotations

import triton
import triton.language as tl

from mkernel.lang.context import SEGMENT, rank_of, segment_of
from mkernel.lang.layout import word_of
from mkernel.lang.requests import Transfer, notify_proxy, post, write_words
from mkernel.lang.roles import INTRA, SEND
from mkernel.lang.signals import ARRIVED, wait
from mkernel.ops.all_gather_matmul.protocol import notify_chunk, wait_chunk
from mkernel.ops.all_gather_matmul.transfer import copy_chunk


@triton.jit
def notify_all_but_one(comm, gather, peer, source, chunk):
    if chunk != 1:
        notify_chunk(comm, gather, peer, source, chunk)


@triton.jit
def post_with_old_epoch(comm, transfer, signal):
    return post(comm.context, transfer, signal, comm.epoch - 1, SEND)


@triton.jit
def post_too_much(comm, transfer, signal):
    there = Transfer(
        transfer.peer, transfer.source_segment, transfer.source, transfer.segment, transfer.target, transfer.size * 9999
    )
    return post(comm.context, there, signal, comm.epoch, SEND)


@triton.jit
def wait_for_epoch_before(comm, gather, source, chunk, ROLE: tl.constexpr):
    segment = segment_of(comm.context, rank_of(comm.context), tl.int64)
    signal = segment + word_of(gather.arrived, comm.epoch, source, chunk)
    return wait(comm.context, signal, comm.epoch - 1, ROLE, ARRIVED, source, chunk)


@triton.jit
def wait_for_last_use(comm, gather, source, chunk, ROLE: tl.constexpr):
    segment = segment_of(comm.context, rank_of(comm.context), tl.int64)
    signal = segment + word_of(gather.arrived, comm.epoch, source, chunk)
    return wait(comm.context, signal, comm.epoch - 2, ROLE, ARRIVED, source, chunk)


@triton.jit
def wait_in_compute_only(comm, gather, source, chunk, ROLE: tl.constexpr):
    here = True
    if ROLE != INTRA:
        here = wait_chunk(comm, gather, source, chunk, ROLE)
    return here


@triton.jit
def notify_before_copy(comm, call, chunk, origin, peers):
    rank = rank_of(comm.context)
    base = rank // comm.RANKS_PER_NODE * comm.RANKS_PER_NODE
    for i in range(1, comm.RANKS_PER_NODE):
        peer = base + (rank + i) % comm.RANKS_PER_NODE
        notify_chunk(comm, call.gather, peer, chunk.source, chunk.index)
    copy_chunk(comm, call, chunk, origin, peers)


@triton.jit
def post_before_copy(comm, call, chunk, origin, peers):
    rank = rank_of(comm.context)
    segment = tl.load(comm.context + SEGMENT)
    element: tl.constexpr = call.a.data.dtype.element_ty.primitive_bitwidth // 8
    source = chunk.offset * element
    signal = word_of(call.gather.arrived, comm.epoch, rank, chunk.index) * 8
    for i in range(1, comm.WORLD_SIZE // comm.RANKS_PER_NODE):
        peer = (rank + i * comm.RANKS_PER_NODE) % comm.WORLD_SIZE
        whole = Transfer(peer, segment, source, segment, source, chunk.rows * call.gather.k * element)
        post(comm.context, whole, signal, comm.epoch, SEND)
    copy_chunk(comm, call, chunk, origin, peers)


@triton.jit
def turn_before_words(request, transfer, signal, value, turn, IN_LOOP: tl.constexpr):
    notify_proxy(request, turn, IN_LOOP)
    write_words(request, transfer, signal, value)


@triton.jit
def wait_for_no_transfer(context, ticket, ROLE: tl.constexpr):
    return True
