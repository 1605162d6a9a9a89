"""Mistakes that a later change of an operator might bring: each must be caught with the first seed.

`test_*_broken.py` breaks every rule of synchronisation once. Here are the slips that look like working code: a bound
that is off by one, a fence on the wrong side of a barrier, an order that is too weak between the CTAs of one rank.
"""

from __future__ import annotations

import pytest
import torch
from attention import Case
from broken import Broken, assert_caught
from experts import Layer
from mutation import OP
from scenarios import MULTICAST, REDUCE, SCATTER, Attends, Gathers, Routes, Sums

FOUR_RANKS = Layer((3, 2, 2, 3), (1, 1, 1, 1), hidden=16, out=16, dtype=torch.float32)
ONE_RANK = Layer((20,), (2,), hidden=40, out=40, dtype=torch.float32)

MISTAKES = {
    # a wait that was dropped, or that waits for less than it should
    "all-gather: the last chunk of a tile is not waited for": Broken(
        Gathers((1, 2), chunk_rows=5),
        [(f"{OP}/protocol", "tl.cdiv(tl.minimum(row + rows, gather.m), gather.chunk_rows)",
          "tl.minimum(row + rows, gather.m) // gather.chunk_rows")],
    ),
    "all-gather: the network's last read of a is not waited for": Broken(
        Gathers((2, 1), heap=True),
        [(f"{OP}/kernel", "wait_sent(comm.context, ticket, SEND)", "wait_sent(comm.context, ticket - 1, SEND)")],
    ),
    "combine: a node's sums are sent before its ranks are done": Broken(
        Routes((2, 2), "moe_combine", layer=FOUR_RANKS),
        [("op/reduction", "        if _wait_partials(comm, batch.signals, source, chunk):\n",
          "        if count > 0:\n")],
    ),
    # a signal for something else
    "all-gather: an arrival is signalled for the next use of the half as well": Broken(
        Gathers((1, 2), calls=3),
        [(f"{OP}/protocol", "source, chunk), comm.epoch)", "source, chunk), comm.epoch + 2)")],
    ),
    "reduce-scatter: a part is signalled to the rank behind the one that adds it": Broken(
        Sums((1, 3), SCATTER, rows=30),
        [("reduce/protocol", "return signal_at(comm, exchange.partial, adder,",
          "return signal_at(comm, exchange.partial, peer_behind(comm, distance + 1),")],
    ),
    "dispatch: a routing table is signalled before it is written": Broken(
        Routes((1, 2), "moe_dispatch_matmul"),
        [("op/routing", "        size = HEADER + batch.tokens * routing.K\n",
          "        size = HEADER + batch.tokens * routing.K\n"
          "        notify(signal_of(comm, rank, batch.signals.routed, rank, 0), comm.epoch)\n")],
    ),
    # memory that is used again too early
    "reduce-scatter: two halves of signals, one of parts": Broken(
        Sums((1, 2), SCATTER, calls=2),
        [("layout", "(epoch % 2) * slots.half", "(epoch % 2) * 0")],
    ),
    "attention: a slot is used again a round too early": Broken(
        Attends((2, 1), Case(16, heads=4, kv_heads=4), steps=1),
        [("op/protocol", "        if round_index >= rounds.window:\n            before = round_index - rounds.window\n"
          "            word = freed_word(rounds, peer",
          "        if round_index > rounds.window:\n            before = round_index - rounds.window\n"
          "            word = freed_word(rounds, peer")],
    ),
    "attention: the credit of another rank": Broken(
        Attends((1, 3), Case(16, heads=8, kv_heads=4), steps=1),
        [("op/protocol", "word = freed_word(rounds, peer, round_index)",
          "word = freed_word(rounds, rank_of(comm.context), round_index)")],
    ),
    # orders that are too weak
    "attention: a tile that is done is not released": Broken(
        Attends((1, 3), Case(16, heads=8, kv_heads=4), steps=1),
        [("op/protocol", 'tl.atomic_add(done, 1, sem="acq_rel"', 'tl.atomic_add(done, 1, sem="acquire"')],
    ),
    "dispatch: the last CTA to count does not acquire what others counted": Broken(
        Routes((1, 2), "moe_dispatch_matmul"),
        [("op/routing", 'COUNTERS_DONE, 1, sem="acq_rel"', 'COUNTERS_DONE, 1, sem="release"')],
    ),
    "layer: counters of finished tiles are not acquired": Broken(
        Routes((1, 1), "moe_ffn", layer=ONE_RANK),
        [("signals", 'tl.atomic_add(signals, 0, mask=mask, sem="acquire"',
          'tl.atomic_add(signals, 0, mask=mask, sem="relaxed"')],
    ),
    "layer: no barrier behind the wait for several counters": Broken(
        Routes((1, 1), "moe_ffn", layer=ONE_RANK),
        [("signals", "    tl.debug_barrier()  # what one thread has acquired all may read\n", "")],
    ),
    "reduce-scatter: a request before the barrier behind its data": Broken(
        Sums((2, 1), SCATTER),
        [("requests", "            notify_in_loop(request + TURN, ticket // capacity + 1)\n",
          '            tl.atomic_xchg(request + TURN, ticket // capacity + 1, sem="release", scope="sys")\n')],
    ),
    "all-reduce: what a producer found free is not released to the others": Broken(
        Sums((2, 1), REDUCE, rows=120, ring=2),
        [("requests", 'posting + FREE, free, sem="release"', 'posting + FREE, free, sem="relaxed"')],
    ),
    # fences that are missing, or on the wrong side
    "layer: no fence for descriptors in the second GEMM": Broken(
        Routes((1, 1), "moe_ffn", layer=ONE_RANK),
        [("op/ffn", "acquire_for_descriptors()\n            used_below(operands.inner,", "used_below(operands.inner,")],
    ),
    "layer: stores through descriptors are waited for behind the barrier": Broken(
        Routes((1, 1), "moe_ffn", layer=ONE_RANK),
        [("op/ffn", "        complete_descriptor_stores()\n        tl.debug_barrier()\n",
          "        tl.debug_barrier()\n        complete_descriptor_stores()\n")],
    ),
    "all-reduce: the fence for aliases behind the release": Broken(
        Sums((1, 2), MULTICAST, rows=60, n=20),
        [(f"{OP}/multicast",
          "    fence_aliases()\n    notify_finished(comm, exchange, block)\n",
          "    notify_finished(comm, exchange, block)\n    fence_aliases()\n")],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_it_is_caught(name, tmp_path):
    assert_caught(MISTAKES[name], tmp_path)
