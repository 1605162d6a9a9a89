"""ring_attention_backward with every rule of synchronisation broken on purpose. Then peers that never come.

What moves keys and values is that of ring_attention, whose variants are in test_ring_attention_broken.py. Here are the
rules of this kernel: delta, partials, node sums, and when their slots are used again."""

from __future__ import annotations

import pytest
import triton
import triton.language as tl
from support.attention_gradients import inputs
from support.attention_reference import Case
from support.broken_variants import NO_BARRIER, RACE, RELAXED_NOTIFY, RELAXED_WAIT, WRONG, Broken, assert_caught
from support.operator_calls import run
from support.scenarios import AttendsBackward

import mkernel as mk
from mkernel.lang.signals import raise_signal
from mkernel.ops.attention import mask
from mkernel.ops.attention import protocol as forward
from mkernel.ops.attention.backward import call, kernel, protocol
from mkernel.ops.attention.backward.kernel import Keys, _is_seen_by_rows, _keys_at
from mkernel.ops.attention.backward.protocol import notify_partial, post_node_sum
from mkernel.ops.attention.mask import rows_of
from mkernel.ops.attention.schedule import Helpers

ONE = AttendsBackward((1, 1), Case(40))
NODE = AttendsBackward((1, 2), Case(32), calls=2)
REUSE = AttendsBackward((1, 3), Case(16, heads=8, kv_heads=4), steps=1)
PARTS = AttendsBackward((1, 3), Case(64), steps=1)
CAUSAL = AttendsBackward((1, 2), Case(32, causal=True, layout="zigzag"))
UNEQUAL = AttendsBackward((1, 2), Case(0, causal=True, seq_lens=(20, 32)))
FEW = AttendsBackward((1, 2), Case(32, queries=5, value_dim=96, causal=True))
NETWORK = AttendsBackward((2, 1), Case(16), calls=2)
NETWORK_REUSE = AttendsBackward((2, 1), Case(16, heads=6, kv_heads=6), steps=1)
TWO_LEVELS = AttendsBackward((2, 2), Case(16))
TWO_LEVELS_REUSE = AttendsBackward((2, 2), Case(16, heads=6, kv_heads=6), steps=2)
# node 0 sees nothing of node 1, and the calls use the words of the workspace in different ways
SHAPES = AttendsBackward(
    (2, 2), Case(16, heads=6, kv_heads=6, causal=True), steps=2,
    others=(Case(16, heads=2, kv_heads=2, causal=True), Case(16, heads=3, kv_heads=3, causal=True)),
)  # fmt: skip
# rank 3 adds up, for rank 1, what rank 2 computes; its own rows see nothing of rank 1
RELAY = AttendsBackward(
    (2, 2),
    Case(32, heads=6, kv_heads=6, layout="zigzag", documents=(0, 16, 48, 80, 128)),
    steps=2,
)


@triton.jit
def do_not_wait_until_prepared(comm, call):
    return 0.0


@triton.jit
def notify_early(comm, call, count):
    segment = protocol.segment_of(comm.context, protocol.rank_of(comm.context), tl.int64)
    raise_signal(segment + protocol.single_word_of(call.prepared, 0, 0), comm.epoch)


@triton.jit
def notify_all_but_one(comm, call, round_index, reducer, index, tile):
    if tile != 1:
        notify_partial(comm, call, round_index, reducer, index, tile)


@triton.jit
def do_not_wait_for_partial(comm, call, round_index, source, index, tile):
    return 0.0


@triton.jit
def do_not_wait_for_node_sum(comm, call, round_index, node, index, tile):
    return 0.0


@triton.jit
def do_not_post(comm, call, round_index, owner, tile):
    return tl.cast(-1, tl.int64)


@triton.jit
def do_not_wait_until_added(comm, reductions, peer, round_index):
    pass


@triton.jit
def do_not_wait_for_partial_slot(comm, call, round_index, owner, reducer):
    pass


@triton.jit
def wait_for_own_slots_only(comm, call, round_index, owner, reducer):
    if call.rounds.CREDITS:
        protocol.wait_added(comm, call.reductions, reducer, round_index)


@triton.jit
def do_not_wait_for_the_owner(comm, call, round_index, owner):
    pass


@triton.jit
def reduce_at_once(comm, call, round_index, which):
    pass


@triton.jit
def do_not_wait_for_chunk(comm, rounds, round_index, source, first, end):
    return True


@triton.jit
def every_row_sees_everything(call, task, source, key):
    seen = _keys_at(call, task, source, key)
    return Keys(source, key, seen.first, seen.end, 0, call.mask.length + call.TILE_M)


@triton.jit
def one_row_less(call, task, source, key):
    seen = _keys_at(call, task, source, key)
    return Keys(source, key, seen.first, seen.end - call.TILE_M, seen.full, seen.full_end)


@triton.jit
def see_one_more(call, index, lower, upper):
    return _is_seen_by_rows(call, index, lower, upper + 1)


@triton.jit
def begin_again(kept, TILE_M: tl.constexpr, DIM: tl.constexpr):
    return tl.zeros((TILE_M, DIM), tl.float32)


@triton.jit
def upper_left_position(mask, rank, index):
    return rank * rows_of(mask) + index


@triton.jit
def as_many_keys_as_the_longest_rank(mask):
    return mask.length


@triton.jit
def columns_of_keys(call):
    return call.dim


@triton.jit
def post_twice_the_tile(comm, call, round_index, owner, tile):
    return post_node_sum(comm, call, round_index, owner, tile * 0)


BROKEN = {
    # rule 1: signals grow, and are waited for with their stamp
    "a partial is not signalled": Broken(
        NODE, {protocol.notify_partial: notify_all_but_one}, mk.CommTimeout, {"signal": "partial gradients", "index": 1}
    ),
    "a node's sum is not sent": Broken(
        NETWORK, {protocol.post_node_sum: do_not_post}, mk.CommTimeout, {"signal": "node sum"}
    ),
    "nobody waits for delta": Broken(ONE, {protocol.wait_prepared: do_not_wait_until_prepared}),
    "delta is signalled by the first CTA": Broken(ONE, {protocol.notify_prepared: notify_early}),
    "nobody waits for partials": Broken(NODE, {protocol.wait_partial: do_not_wait_for_partial}),
    "nobody waits for the sums of other nodes": Broken(NETWORK, {protocol.wait_node_sum: do_not_wait_for_node_sum}),
    "nobody waits for keys": Broken(NODE, {forward.wait_panel: do_not_wait_for_chunk}),
    # rule 2: data first, then signal
    "no release": Broken(NODE, RELAXED_NOTIFY),
    "no barrier before the release": Broken(NODE, NO_BARRIER),
    "no acquire": Broken(NODE, RELAXED_WAIT),
    # rule 3: buffers are written when their readers are done
    "a partial is pushed before its slot is free": Broken(
        REUSE, {protocol.wait_partial_writable: do_not_wait_for_partial_slot}
    ),
    "nobody waits for reductions": Broken(REUSE, {protocol.wait_added: do_not_wait_until_added}),
    "a sum is overwritten while the network reads it": Broken(
        NETWORK_REUSE, {protocol.wait_partial_writable: wait_for_own_slots_only}
    ),
    "a sum is sent before its place is free": Broken(RELAY, {protocol.wait_sum_writable: do_not_wait_for_the_owner}),
    "a rank leaves before it has all signals of others": Broken(
        SHAPES, {protocol.wait_reducible: reduce_at_once}, (RACE, mk.CommTimeout)
    ),
    # rule 4: nobody waits for a task of a CTA that still sends
    "a copying CTA has tasks of early rounds": Broken(
        REUSE,
        {},
        mk.CommTimeout,
        host={"mkernel.ops.attention.backward.plan.Helpers": lambda count, ready, joined: Helpers(count, 0.0, 0)},
    ),
    # what is sent, and what is computed
    "a sum is sent to another block's place": Broken(
        AttendsBackward((2, 1), Case(32)), {protocol.post_node_sum: post_twice_the_tile}, (WRONG, mk.MKernelError)
    ),
    "the mask is off by one": Broken(CAUSAL, {kernel._is_seen_by_rows: see_one_more}, WRONG),
    "rows that see no key count": Broken(CAUSAL, {kernel._keys_at: every_row_sees_everything}, WRONG),
    "the last rows are left out": Broken(CAUSAL, {kernel._keys_at: one_row_less}, WRONG),
    "queries are aligned with the first keys": Broken(FEW, {mask.position_of: upper_left_position}, WRONG),
    "values have the columns of keys": Broken(FEW, {call.value_dim_of: columns_of_keys}, (WRONG, mk.MKernelError)),
    "keys of a shorter rank are read beyond its last one": Broken(
        UNEQUAL, {mask.keys_of: as_many_keys_as_the_longest_rank}, (WRONG, mk.MKernelError)
    ),
    "sums are not kept between parts": Broken(PARTS, {kernel._resume: begin_again}, WRONG),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken(name):
    assert_caught(BROKEN[name])


LATE = {
    "plain": Case(16),
    "few queries": Case(16, queries=3, dim=96, value_dim=64, causal=True),
    "one without positions": Case(0, seq_lens=(20, 0)),  # it does not come
    "another length": Case(0, seq_lens=(3, 33)),
}


@pytest.mark.parametrize("cluster", [(1, 2), (2, 1)])
@pytest.mark.parametrize("case", LATE.values(), ids=LATE)
def test_a_peer_that_does_not_come_is_named(cluster, case):
    def work(group):
        given = [inputs(group, case, turn)[0] for turn in range(2)]
        mk.ring_attention_backward(*given[0], **case.arguments())
        if group.rank == 1:
            return
        with pytest.raises(mk.CommTimeout) as caught:
            mk.ring_attention_backward(*given[1], **case.arguments())
        record = caught.value.record
        assert (record.op, record.peer) == (AttendsBackward.op, 1)
        assert record.seen < record.expected

    run(work, cluster=cluster, timeout=1e-4)


@pytest.mark.parametrize("ctas", [3, 8])
@pytest.mark.parametrize("lengths", [None, (16, 0, 20, 17)])
@pytest.mark.thorough
def test_every_rank_names_the_one_that_did_not_come(lengths, ctas):
    """And not those that wait for it too, nor itself: with few slots a rank waits for its own rounds and reductions."""
    case = Case(16, heads=6, kv_heads=6, seq_lens=lengths)
    told = {}

    def work(group):
        given = [inputs(group, case, turn)[0] for turn in range(2)]
        mk.ring_attention_backward(*given[0], **case.arguments())
        if group.rank == 2:
            return
        with pytest.raises(mk.CommTimeout) as caught:
            mk.ring_attention_backward(*given[1], **case.arguments())
        told[group.rank] = caught.value.record

    run(work, cluster=(1, 4), timeout=1e-3, ctas=ctas, seed=ctas)
    assert {rank: (record.signal, record.peer) for rank, record in told.items()} == {
        rank: ("entered", 2) for rank in (0, 1, 3)
    }


def test_what_could_not_be_computed_is_nan():
    case = Case(32)

    def work(group):
        given, _ = inputs(group, case)
        with group.world.stream(group.world_rank, "side"):
            mk.ring_attention_backward(*given)
        group.synchronize()
        if group.rank == 1:
            return
        with group.world.stream(group.world_rank, "side"):
            found = mk.ring_attention_backward(*given)
        with pytest.raises(mk.CommTimeout):
            group.synchronize()
        assert all(gradient.isnan().all() for gradient in found)

    run(work, cluster=(1, 2), timeout=1e-4)
