"""ring_attention with every rule of synchronisation broken on purpose. Then peers that never come."""

from __future__ import annotations

import pytest
import triton
import triton.language as tl
from support.attention_reference import Case, call
from support.broken_variants import (
    NO_BARRIER,
    NO_FENCE_FOR_DESCRIPTORS,
    RACE,
    RELAXED_NOTIFY,
    RELAXED_WAIT,
    WRONG,
    Broken,
    assert_caught,
)
from support.operator_calls import run
from support.scenarios import Attends

import mkernel as mk
from mkernel.lang import entries
from mkernel.lang.context import rank_of
from mkernel.ops.attention import call as attention_call
from mkernel.ops.attention import kernel, mask, merge, protocol, rows, softmax
from mkernel.ops.attention.kernel import _mask_scores
from mkernel.ops.attention.mask import Blocks, key_blocks, keys_below, rows_of, seen_by_rank
from mkernel.ops.attention.protocol import notify_chunk, poll_arrived
from mkernel.ops.attention.schedule import Helpers
from mkernel.ops.attention.softmax import State, online_softmax_step

NODE = Attends((1, 2), Case(32), calls=2)
REUSE = Attends((1, 3), Case(16, heads=8, kv_heads=4), steps=1)
PARTS = Attends((1, 3), Case(64), steps=1)
CAUSAL = Attends((1, 2), Case(32, causal=True, layout="zigzag"))
NETWORK = Attends((2, 1), Case(16))
NETWORK_REUSE = Attends((2, 1), Case(16, heads=4, kv_heads=4), steps=1)
TWO_LEVELS = Attends((2, 2), Case(16))
SPREAD_REUSE = Attends((2, 2), Case(16, heads=4, kv_heads=4), steps=2)
AHEAD = Attends((1, 3), Case(32, heads=4, kv_heads=4, causal=True, layout="zigzag"), steps=1)
DOCUMENTS = Case(32, layout="zigzag", documents=(0, 16, 24, 48, 64))  # rank 0 sees nothing of what it gets
GAP = Attends((2, 1), DOCUMENTS, arrives=2 * 32 * 64 * 4)
RAGGED = Attends((1, 2), Case(20))
FEW = Attends((1, 2), Case(32, queries=5, causal=True))
UNEQUAL = Attends((1, 2), Case(0, causal=True, seq_lens=(20, 32)))
EMPTY = Attends((1, 3), Case(0, heads=4, kv_heads=4, seq_lens=(16, 0, 16)), steps=1)
SHARED = Attends((1, 1), Case(64, queries=3, causal=True), calls=2, team=2)


@triton.jit
def notify_all_but_one(comm, rounds, chunk, peer):
    if chunk.index != 1:
        notify_chunk(comm, rounds, chunk, peer)


@triton.jit
def do_not_notify_entered(context, epoch, rank, RANKS_PER_NODE: tl.constexpr):
    pass


@triton.jit
def do_not_post_entered(context, epoch, rank, WORLD_SIZE: tl.constexpr, RANKS_PER_NODE: tl.constexpr):
    pass


@triton.jit
def do_not_notify_freed(comm, rank, word, round_index):
    pass


@triton.jit
def do_not_post_freed(comm, rank, word, round_index, ROLE: tl.constexpr):
    pass


@triton.jit
def poll_epoch_before(rounds, signals, needed, expected):
    return poll_arrived(rounds, signals, needed, expected - 4294967296)


@triton.jit
def poll_round_before(rounds, signals, needed, expected):
    return poll_arrived(rounds, signals, needed, expected - rounds.window)


@triton.jit
def poll_arrived_relaxed(rounds, signals, needed, expected):
    seen = tl.atomic_add(signals, needed.to(tl.int64) * 0, mask=needed, sem="relaxed", scope="sys")
    return tl.min(tl.where(needed, seen, expected), 0) >= expected


@triton.jit
def do_not_wait_for_chunk(comm, rounds, chunk):
    pass


@triton.jit
def do_not_wait_until_freed(comm, rounds, mine, peer, round_index, ROLE: tl.constexpr):
    pass


@triton.jit
def is_first_task(comm, rounds, done):
    return tl.atomic_add(done, 1, sem="acq_rel", scope="gpu") == 0


@triton.jit
def is_last_tile(comm, rounds, done):
    passed_on = (comm.WORLD_SIZE // comm.RANKS_PER_NODE - 1) * rounds.chunks
    return tl.atomic_add(done, 1, sem="acq_rel", scope="gpu") == rounds.tasks - passed_on - 1


@triton.jit
def is_last_task_unless_empty(comm, rounds, done):
    last = tl.atomic_add(done, 1, sem="acq_rel", scope="gpu") == rounds.tasks - 1
    return last & (rank_of(comm.context) != 1)


@triton.jit
def do_not_wait_until_entered(comm, mine, peer, ROLE: tl.constexpr):
    pass


@triton.jit
def do_not_wait_for_own_round(comm, rounds, round_index, ROLE: tl.constexpr):
    pass


@triton.jit
def awaits_what_it_sees(call, tile):
    return tile.within < 0


@triton.jit
def read_flat_with_nan(source, place):
    return tl.load(source.pointer + place, mask=place < source.count * source.columns, other=float("nan"))


@triton.jit
def is_all_seen(mask, rank, source, key, keys):
    start, end = seen_by_rank(mask, rank)
    first = keys_below(mask, start, source)
    behind = keys_below(mask, end, source)
    return (first < behind) & (first < tl.minimum(key + keys, mask.length)) & (behind > key + keys)


@triton.jit
def mask_one_less(call, scores, key, lower, upper):
    return _mask_scores(call, scores, key, lower, upper + 1)


@triton.jit
def one_full_block_more(mask, visible, source, begin, until, TILE_N: tl.constexpr):
    blocks = key_blocks(mask, visible, source, begin, until, TILE_N)
    everyone_end = tl.minimum(keys_below(mask, visible.lowest_end, source), until)
    full_end = tl.minimum(tl.maximum(tl.cdiv(everyone_end, TILE_N), blocks.full), blocks.end)
    return Blocks(blocks.first, blocks.full, full_end, blocks.end)


@triton.jit
def step_without_rescaling(scores, total, row_max, scale):
    weights, total, row_max, alpha = online_softmax_step(scores, total, row_max, scale)
    return weights, total, row_max, alpha * 0.0 + 1.0


@triton.jit
def count_relaxed(call, tile):
    tl.debug_barrier()
    word = call.spans.counts + tile.number
    last = tl.atomic_add(word, 1, sem="relaxed", scope="gpu") == call.spans.COUNT - 1
    if last:
        tl.atomic_xchg(word, 0, sem="relaxed", scope="gpu")
    return last


@triton.jit
def count_without_barrier(call, tile):
    word = call.spans.counts + tile.number
    last = tl.atomic_add(word, 1, sem="acq_rel", scope="gpu") == call.spans.COUNT - 1
    if last:
        tl.atomic_xchg(word, 0, sem="relaxed", scope="gpu")
    return last


@triton.jit
def is_first_span(call, tile):
    tl.debug_barrier()
    word = call.spans.counts + tile.number
    count = tl.atomic_add(word, 1, sem="acq_rel", scope="gpu")
    if count == call.spans.COUNT - 1:
        tl.atomic_xchg(word, 0, sem="relaxed", scope="gpu")
    return count == 0


@triton.jit
def is_last_span_once(call, tile):
    tl.debug_barrier()
    count = tl.atomic_add(call.spans.counts + tile.number, 1, sem="acq_rel", scope="gpu")
    return count == call.spans.COUNT - 1


@triton.jit
def upper_left_position(mask, rank, index):
    return rank * rows_of(mask) + index


@triton.jit
def as_many_keys_as_the_longest_rank(mask):
    return mask.length


@triton.jit
def equal_pieces_below(mask, position, rank):
    return tl.minimum(tl.maximum(position - rank * mask.length, 0), mask.length)


@triton.jit
def begin_again(pointers):
    row_max = tl.load(pointers.row_max) * 0.0 + float("-inf")
    return State(tl.load(pointers.accumulator) * 0.0, tl.load(pointers.total) * 0.0, row_max)


BROKEN = {
    # rule 1: signals grow, and are waited for with their stamp
    "an arrival is not signalled": Broken(
        NODE,
        {protocol.notify_chunk: notify_all_but_one},
        mk.CommTimeout,
        {"signal": "arrived", "index": 1, "role": "compute"},
    ),
    "an entry is not announced in the node": Broken(
        NODE,
        {entries.notify_entered: do_not_notify_entered},
        mk.CommTimeout,
        {"signal": "entered", "role": "intra", "seen": 0, "expected": 1},
    ),
    "an entry is not announced to other nodes": Broken(
        NETWORK,
        {entries.post_entered: do_not_post_entered},
        mk.CommTimeout,
        {"signal": "entered", "role": "send", "seen": 0, "expected": 1},
    ),
    "a round is not freed": Broken(
        REUSE, {protocol.notify_freed: do_not_notify_freed}, mk.CommTimeout, {"signal": "freed"}
    ),
    "a round is not freed for other nodes": Broken(
        NETWORK_REUSE, {protocol.post_freed: do_not_post_freed}, mk.CommTimeout, {"signal": "freed", "role": "send"}
    ),
    "compute takes what arrived in the epoch before": Broken(NODE, {protocol.poll_arrived: poll_epoch_before}),
    "compute takes what arrived in the round before": Broken(REUSE, {protocol.poll_arrived: poll_round_before}),
    "intra passes on before anything is here": Broken(TWO_LEVELS, {protocol.wait_chunk: do_not_wait_for_chunk}),
    # rule 2: data first, then signal
    "no release": Broken(NODE, RELAXED_NOTIFY),
    "no barrier before the release": Broken(NODE, NO_BARRIER),
    "no acquire": Broken(NODE, {protocol.poll_arrived: poll_arrived_relaxed, **RELAXED_WAIT}),
    "no fence before reads through descriptors": Broken(NODE, NO_FENCE_FOR_DESCRIPTORS),
    # rule 3: buffers are written when their readers are done
    "a chunk is pushed before the round is freed": Broken(REUSE, {protocol.wait_freed: do_not_wait_until_freed}),
    "a chunk is sent before the round is freed": Broken(NETWORK_REUSE, {protocol.wait_freed: do_not_wait_until_freed}),
    "a round is freed with its first tile": Broken(REUSE, {protocol.is_last_task: is_first_task}),
    "a round is freed before its chunks were passed on": Broken(SPREAD_REUSE, {protocol.is_last_task: is_last_tile}),
    "nobody waits for the entry": Broken(
        Attends((1, 2), Case(16), calls=2), {protocol.wait_entered: do_not_wait_until_entered}
    ),
    "a rank runs ahead of its own rounds": Broken(
        AHEAD, {protocol.wait_own_round: do_not_wait_for_own_round}, mk.CommTimeout, {"signal": "arrived"}
    ),
    "nobody waits for chunks that no row sees": Broken(
        GAP, {attention_call.awaits_whole_panels: awaits_what_it_sees}, (RACE, WRONG)
    ),
    # rule 4: nobody waits for a tile of a CTA that still sends
    "a copying CTA computes tiles of early rounds": Broken(
        REUSE,
        {},
        mk.CommTimeout,
        {"signal": "freed"},
        host={"mkernel.ops.attention.plan.Helpers": lambda count, ready, joined: Helpers(count, 0.0, 0)},
    ),
    # what is sent, and what is computed
    "zeros are not sent behind the last key": Broken(RAGGED, {rows.read_flat: read_flat_with_nan}, WRONG),
    "a visible chunk is not sent": Broken(CAUSAL, {mask.is_seen: is_all_seen}, mk.CommTimeout, {"signal": "arrived"}),
    "the mask is off by one": Broken(CAUSAL, {kernel._mask_scores: mask_one_less}, WRONG),
    "what every row sees is one block too long": Broken(CAUSAL, {mask.key_blocks: one_full_block_more}, WRONG),
    "the accumulator is not rescaled": Broken(NODE, {softmax.online_softmax_step: step_without_rescaling}, WRONG),
    "state is not kept between parts": Broken(PARTS, {merge.load_state: begin_again}, WRONG),
    "queries are aligned with the first keys": Broken(FEW, {mask.position_of: upper_left_position}, WRONG),
    "keys of a shorter rank are read beyond its last one": Broken(
        UNEQUAL, {mask.keys_of: as_many_keys_as_the_longest_rank}, (WRONG, mk.MKernelError)
    ),
    "ranks hold as many keys as the longest one": Broken(
        UNEQUAL, {mask.keys_below: equal_pieces_below}, (WRONG, mk.CommTimeout)
    ),
    "a rank without queries does not free rounds": Broken(
        EMPTY, {protocol.is_last_task: is_last_task_unless_empty}, mk.CommTimeout, {"signal": "freed", "peer": 1}
    ),
    # CTAs that share a tile
    "no acquire before states are merged": Broken(SHARED, {merge.is_last_span: count_relaxed}),
    "no barrier before a span is counted": Broken(SHARED, {merge.is_last_span: count_without_barrier}),
    "the first CTA merges": Broken(SHARED, {merge.is_last_span: is_first_span}, (RACE, WRONG)),
    "the count is not set to zero": Broken(SHARED, {merge.is_last_span: is_last_span_once}, (RACE, WRONG)),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken(name):
    assert_caught(BROKEN[name])


@pytest.mark.parametrize("cluster", [(1, 2), (2, 1)])
def test_a_peer_that_does_not_come_is_named(cluster):
    def work(group):
        call(group, Case(16))
        if group.rank == 1:
            return
        with pytest.raises(mk.CommTimeout) as caught:
            call(group, Case(16), 1)
        record = caught.value.record
        assert (record.op, record.peer) == (Attends.op, 1)
        assert record.seen < record.expected

    run(work, cluster=cluster, timeout=1e-4)


@pytest.mark.parametrize("ctas", [3, 8])
@pytest.mark.parametrize("seed", range(3))
def test_every_rank_names_the_one_that_did_not_come(seed, ctas):
    """And not those that wait for it too and have sent nothing, nor itself: with few slots a CTA may wait for its own
    rank to be done with an early round."""
    case = Case(16, heads=6, kv_heads=6)
    told = {}

    def work(group):
        call(group, case)
        if group.rank == 2:
            return
        with pytest.raises(mk.CommTimeout) as caught:
            call(group, case, 1)
        told[group.rank] = caught.value.record

    run(work, cluster=(1, 4), timeout=1e-3, ctas=ctas, seed=seed)
    assert {rank: (record.signal, record.peer) for rank, record in told.items()} == {
        rank: ("entered", 2) for rank in (0, 1, 3)
    }


def test_what_could_not_be_computed_is_nan():
    case = Case(32)

    def work(group):
        call(group, case)
        if group.rank == 1:
            return
        with group.world.stream(group.world_rank, "side"):
            out = mk.ring_attention(*[case.part(name, group.rank) for name in ("query", "key", "value")])
        with pytest.raises(mk.CommTimeout):
            group.synchronize()
        assert out.isnan().all()

    def late(group):
        with group.world.stream(group.world_rank, "side"):
            mk.ring_attention(*[case.part(name, group.rank) for name in ("query", "key", "value")])
        group.synchronize()
        work(group)

    run(late, cluster=(1, 2), timeout=1e-4)
