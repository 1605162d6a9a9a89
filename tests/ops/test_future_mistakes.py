"""Mistakes that a later change of an operator might bring: each must be caught with the first seed.

`test_*_broken.py` breaks every rule of synchronisation once. Here are the slips that look like working code: a bound
that is off by one, a fence on the wrong side of a barrier, an order that is too weak between the CTAs of one rank.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from support.attention_reference import Case
from support.broken_variants import ONE_HALF_OF_SLOTS, Broken, assert_caught
from support.moe_reference import Layer
from support.scenarios import MULTICAST, REDUCE, SCATTER, Attends, Gathers, Routes, Sums

from mkernel.lang import requests, signals
from mkernel.lang.context import rank_of, segment_of
from mkernel.lang.device import complete_descriptor_stores
from mkernel.lang.layout import word_of
from mkernel.lang.requests import FREE, TURN, wait_sent
from mkernel.lang.roles import COMPUTE
from mkernel.lang.signals import notify, raise_signal, wait, wait_again
from mkernel.ops.all_gather_matmul import protocol as all_gather
from mkernel.ops.all_gather_matmul.protocol import wait_chunk
from mkernel.ops.attention import protocol as attention
from mkernel.ops.attention.kinds import FREED
from mkernel.ops.attention.protocol import freed_word, stamp, wait_freed
from mkernel.ops.moe import ffn, reduction, routing
from mkernel.ops.moe.ffn import GATED
from mkernel.ops.moe.kinds import COMPUTED
from mkernel.ops.moe.protocol import notify_routed
from mkernel.ops.moe.routing import COUNTERS_DONE, PUBLISHERS_DONE, _write_header, _write_part
from mkernel.ops.reduce import protocol as reduce
from mkernel.ops.reduce.all_reduce import multicast
from mkernel.ops.reduce.all_reduce.multimem import fence_aliases
from mkernel.ops.reduce.all_reduce.protocol import notify_finished
from mkernel.ops.reduce.protocol import peer_behind, push_partial, signal_at

FOUR_RANKS = Layer((3, 2, 2, 3), (1, 1, 1, 1), hidden=16, out=16, dtype=torch.float32)
ONE_RANK = Layer((20,), (2,), hidden=40, out=40, dtype=torch.float32)
DISPATCH = Routes((1, 2), "moe_dispatch_matmul")
MANY_IDS = replace(DISPATCH, layer=Layer((80, 3), (2, 3), hidden=16, out=16, dtype=torch.float32))
LAYER = Routes((1, 1), "moe_ffn", layer=ONE_RANK)
ROUNDS = Attends((1, 3), Case(16, heads=8, kv_heads=4), steps=1)


@triton.jit
def wait_all_chunks_but_the_last(comm, gather, source, row, rows):
    here = True
    for chunk in range(row // gather.chunk_rows, tl.minimum(row + rows, gather.m) // gather.chunk_rows):
        here &= wait_chunk(comm, gather, source, chunk, COMPUTE)
    return here


@triton.jit
def wait_for_transfer_before(context, ticket, ROLE: tl.constexpr):
    return wait_sent(context, ticket - 1, ROLE)


@triton.jit
def do_not_wait_for_partials(comm, signals, source, chunk):
    return tl.full((), True, tl.int1)


@triton.jit
def notify_of_next_use(comm, gather, peer, source, chunk):
    segment = segment_of(comm.context, peer, tl.int64)
    notify(segment + word_of(gather.arrived, comm.epoch, source, chunk), comm.epoch + 2)


@triton.jit
def push_and_notify_another(comm, exchange, total, distance, first, j):
    push_partial(comm, exchange, total, distance, first, j)
    place = first + comm.RANKS_PER_NODE - 1 - distance
    return signal_at(comm, exchange.partial, peer_behind(comm, distance + 1), place, j).to(tl.int64)


@triton.jit
def notify_before_part(comm, routing, batch, ids, weights, begin, end):
    notify_routed(comm, batch.signals, rank_of(comm.context))
    _write_part(comm, routing, batch, ids, weights, begin, end)


@triton.jit
def notify_before_header(comm, routing, batch):
    notify_routed(comm, batch.signals, rank_of(comm.context))
    _write_header(comm, routing, batch)


@triton.jit
def wait_freed_a_round_later(comm, rounds, mine, peer, round_index, ROLE: tl.constexpr):
    if round_index > rounds.window:
        wait_freed(comm, rounds, mine, peer, round_index, ROLE)


@triton.jit
def wait_freed_by_itself(comm, rounds, mine, peer, round_index, ROLE: tl.constexpr):
    if round_index >= rounds.window:
        before = round_index - rounds.window
        word = freed_word(rounds, rank_of(comm.context), round_index)
        wait(comm.context, mine + word, stamp(comm.epoch, before), ROLE, FREED, peer, before)


@triton.jit
def is_last_task_acquired(comm, rounds, done):
    return tl.atomic_add(done, 1, sem="acquire", scope="gpu") == rounds.tasks - 1


@triton.jit
def count_released(state):
    return tl.atomic_add(state + COUNTERS_DONE, 1, sem="release", scope="gpu")


@triton.jit
def count_publisher_released(state):
    return tl.atomic_add(state + PUBLISHERS_DONE, 1, sem="release", scope="gpu")


@triton.jit
def poll_each_relaxed(signals, mask, SCOPE: tl.constexpr):
    return tl.atomic_add(signals, 0, mask=mask, sem="relaxed", scope=SCOPE)


@triton.jit
def keep_acquired():
    pass


@triton.jit
def notify_proxy_at_once(request, turn, IN_LOOP: tl.constexpr):
    raise_signal(request + TURN, turn)


@triton.jit
def share_free_relaxed(posting, free):
    tl.atomic_max(posting + FREE, free, sem="relaxed", scope="gpu")


@triton.jit
def wait_gated_without_fence(context, counters, gates, block):
    return wait_again(context, counters + GATED, gates, COMPUTE, COMPUTED, -1, block)


@triton.jit
def complete_stores_behind_barrier(counter):
    tl.debug_barrier()
    complete_descriptor_stores()
    tl.atomic_add(counter, 1, sem="release", scope="gpu")


@triton.jit
def notify_then_fence(comm, exchange, block):
    notify_finished(comm, exchange, block)
    fence_aliases()


MISTAKES = {
    # a wait that was dropped, or that waits for less than it should
    "all-gather: the last chunk of a tile is not waited for": Broken(
        Gathers((1, 2), chunk_rows=5), {all_gather.wait_rows: wait_all_chunks_but_the_last}
    ),
    "all-gather: the network's last read of a is not waited for": Broken(
        Gathers((2, 1), heap=True, calls=2), {requests.wait_sent: wait_for_transfer_before}
    ),
    "combine: a node's sums are sent before its ranks are done": Broken(
        Routes((2, 2), "moe_combine", layer=FOUR_RANKS), {reduction._wait_partials: do_not_wait_for_partials}
    ),
    # a signal for something else
    "all-gather: an arrival is signalled for the next use of the half as well": Broken(
        Gathers((1, 2), calls=3), {all_gather.notify_chunk: notify_of_next_use}
    ),
    "reduce-scatter: a part is signalled to the rank behind the one that adds it": Broken(
        Sums((1, 3), SCATTER, rows=30), {reduce.push_partial: push_and_notify_another}
    ),
    "dispatch: a routing table is signalled before it is written": Broken(
        DISPATCH, {routing._write_part: notify_before_part}
    ),
    "dispatch: a routing table is signalled before its header": Broken(
        DISPATCH, {routing._write_header: notify_before_header}
    ),
    # memory that is used again too early
    "reduce-scatter: two halves of signals, one of parts": Broken(Sums((1, 2), SCATTER, calls=2), ONE_HALF_OF_SLOTS),
    "attention: a slot is used again a round too early": Broken(
        Attends((2, 1), Case(16, heads=4, kv_heads=4), steps=1), {attention.wait_freed: wait_freed_a_round_later}
    ),
    "attention: the credit of another rank": Broken(ROUNDS, {attention.wait_freed: wait_freed_by_itself}),
    # orders that are too weak
    "attention: a tile that is done is not released": Broken(ROUNDS, {attention.is_last_task: is_last_task_acquired}),
    "dispatch: the last CTA to count does not acquire what others counted": Broken(
        DISPATCH, {routing._count_counter: count_released}
    ),
    "dispatch: the last CTA to publish does not acquire what others wrote": Broken(
        MANY_IDS, {routing._count_publisher: count_publisher_released}
    ),
    "layer: counters of finished tiles are not acquired": Broken(LAYER, {signals.poll_each: poll_each_relaxed}),
    "layer: no barrier behind the wait for several counters": Broken(LAYER, {signals.share_acquired: keep_acquired}),
    "reduce-scatter: a request before the barrier behind its data": Broken(
        Sums((2, 1), SCATTER), {requests.notify_proxy: notify_proxy_at_once}
    ),
    "all-reduce: what a producer found free is not released to the others": Broken(
        Sums((2, 1), REDUCE, rows=120, ring=2), {requests.share_free: share_free_relaxed}
    ),
    # fences that are missing, or on the wrong side
    "layer: no fence for descriptors in the second GEMM": Broken(LAYER, {ffn._wait_gated: wait_gated_without_fence}),
    "layer: stores through descriptors are waited for behind the barrier": Broken(
        LAYER, {ffn._count_tile: complete_stores_behind_barrier}
    ),
    "all-reduce: the fence for aliases behind the release": Broken(
        Sums((1, 2), MULTICAST, rows=60, n=20), {multicast._notify_everywhere: notify_then_fence}
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_it_is_caught(name):
    assert_caught(MISTAKES[name])
