"""matmul_reduce_scatter and matmul_all_reduce with every rule of synchronisation broken on purpose. Then peers that
never come."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from support.broken_variants import (
    EPOCH_STAYS,
    NO_BARRIER_IN_LOOP,
    ONE_HALF,
    ONE_HALF_OF_SLOTS,
    RACE,
    RELAXED_NOTIFY,
    RELAXED_WAIT,
    Broken,
    assert_caught,
    number_from_the_end,
    slot_far_away,
    store_tall_tile,
    take_slot_at_once,
)
from support.operator_calls import Canary, run
from support.reduce_reference import ONE_NODE, SMALL, WAYS, Sum, call, check, choose, mine, name_of
from support.scenarios import MULTICAST, REDUCE, SCATTER, Sums

import mkernel as mk
from mkernel.lang import gemm, layout, requests, roles
from mkernel.lang.context import SEGMENT, Comm, rank_of, segment_of
from mkernel.lang.layout import slot_of, word_of
from mkernel.lang.partials import store_partial
from mkernel.lang.requests import Transfer, post
from mkernel.lang.roles import COMPUTE
from mkernel.lang.signals import notify_in_loop
from mkernel.ops.reduce import protocol
from mkernel.ops.reduce.all_reduce import order as all_reduce_order
from mkernel.ops.reduce.all_reduce import protocol as all_reduce
from mkernel.ops.reduce.all_reduce import two_level
from mkernel.ops.reduce.all_reduce.order import slot_number
from mkernel.ops.reduce.all_reduce.protocol import notify_finished, sum_nodes, wait_finished
from mkernel.ops.reduce.all_reduce.two_level import _lag
from mkernel.ops.reduce.protocol import (
    peer_behind,
    post_node_sum,
    push_partial,
    signal_at,
    slot_at,
    slot_bytes,
    wait_partials,
)
from mkernel.ops.reduce.reduce_scatter import order as reduce_scatter_order
from mkernel.ops.reduce.reduce_scatter import protocol as reduce_scatter
from mkernel.ops.reduce.reduce_scatter.order import deal_tiles, tile_at
from mkernel.ops.reduce.reduce_scatter.protocol import wait_node_sums

# three tiles of every rank's rows on two CTAs: one is left over
NODE = Sums((1, 2), SCATTER, rows=70)
NETWORK = Sums((2, 1), SCATTER, rows=70)
TWO_LEVELS = Sums((2, 2), SCATTER, calls=2, rows=40)
# several blocks of every CTA: finished tiles are gathered in the loop, and behind it
AR_NODE = Sums((1, 2), REDUCE, rows=70, n=20)
AR_NETWORK = Sums((2, 1), REDUCE, rows=40, ctas=1)
AR_TWO_LEVELS = Sums((2, 2), REDUCE, rows=50, n=40, ctas=1, calls=2)


@triton.jit
def forget_partial(comm, signal, IN_LOOP: tl.constexpr):
    pass


@triton.jit
def post_with_old_epoch(comm, transfer, signal):
    post(comm.context, transfer, signal, comm.epoch - 1, COMPUTE, True)


@triton.jit
def post_too_much(comm, transfer, signal):
    there = Transfer(
        transfer.peer, transfer.source_segment, transfer.source, transfer.segment, transfer.target, transfer.size * 9999
    )
    post(comm.context, there, signal, comm.epoch, COMPUTE, True)


# the epoch before the last used the same half: its signals and slots are those of this one


@triton.jit
def wait_for_old_partials(comm, exchange, first, j, tile):
    return wait_partials(
        Comm(comm.context, comm.epoch - 2, comm.WORLD_SIZE, comm.RANKS_PER_NODE), exchange, first, j, tile
    )


@triton.jit
def wait_for_old_node_sums(comm, exchange, tile):
    return wait_node_sums(Comm(comm.context, comm.epoch - 2, comm.WORLD_SIZE, comm.RANKS_PER_NODE), exchange, tile)


@triton.jit
def wait_for_old_tile(comm, exchange, i, block, tile):
    return wait_finished(
        Comm(comm.context, comm.epoch - 2, comm.WORLD_SIZE, comm.RANKS_PER_NODE), exchange, i, block, tile
    )


@triton.jit
def sum_nodes_too_early(comm, exchange, block, tile, M: tl.constexpr, N: tl.constexpr):
    return sum_nodes(
        Comm(comm.context, comm.epoch - 2, comm.WORLD_SIZE, comm.RANKS_PER_NODE), exchange, block, tile, M, N
    )


@triton.jit
def forget_finished(comm, exchange, block):
    pass


@triton.jit
def notify_next_finished(comm, exchange, block):
    notify_finished(comm, exchange, block - _lag(comm) + 1)


@triton.jit
def notify_before_push(comm, exchange, total, distance, first, j):
    place = first + comm.RANKS_PER_NODE - 1 - distance
    notify_in_loop(signal_at(comm, exchange.partial, peer_behind(comm, distance), place, j), comm.epoch)
    return push_partial(comm, exchange, total, distance, first, j)


@triton.jit
def post_before_store(comm, exchange, total, node_offset, tile):
    NODES: tl.constexpr = comm.WORLD_SIZE // comm.RANKS_PER_NODE
    DTYPE: tl.constexpr = exchange.outgoing.DTYPE
    ELEMENT: tl.constexpr = DTYPE.primitive_bitwidth // 8
    rank = rank_of(comm.context)
    source = slot_of(exchange.outgoing, comm.epoch, node_offset - 1, tile)
    place = NODES - 1 - node_offset
    target = slot_of(exchange.node_sums, comm.epoch, place, tile)
    segment = tl.load(comm.context + SEGMENT)
    owner = (rank + node_offset * comm.RANKS_PER_NODE) % comm.WORLD_SIZE
    signal = word_of(exchange.node_sum, comm.epoch, place, tile) * 8
    transfer = Transfer(owner, segment, source * ELEMENT, segment, target * ELEMENT, slot_bytes(exchange.outgoing))
    post_node_sum(comm, transfer, signal)
    store_partial(segment_of(comm.context, rank, DTYPE) + source, total, total.shape[0], total.shape[1])


@triton.jit
def tile_at_from_the_end(position, tiles, rounds, early, WORLD_SIZE: tl.constexpr, RANKS_PER_NODE: tl.constexpr):
    _, _, late = deal_tiles(tiles, WORLD_SIZE)
    last = rounds * WORLD_SIZE + early + late - 1
    return tile_at(last - position, tiles, rounds, early, WORLD_SIZE, RANKS_PER_NODE)


@triton.jit
def round_of_own_first(position, rounds, local, RANKS_PER_NODE: tl.constexpr):
    cta = tl.program_id(0)
    start = position // RANKS_PER_NODE * RANKS_PER_NODE
    size = tl.maximum(tl.minimum(rounds - start, RANKS_PER_NODE), 1)
    own = (local + RANKS_PER_NODE - cta % RANKS_PER_NODE) % RANKS_PER_NODE
    within = (own + position - start) % size
    return start + within, (cta + within) % RANKS_PER_NODE


@triton.jit
def no_lag(comm):
    return 0


@triton.jit
def finished_far_away(comm, exchange, owner, block):
    return slot_at(comm, exchange.finished_tiles, owner, 1 << 30, slot_number(block))


BROKEN = {
    # rule 1: signals grow, and are waited for with the epoch
    "a part is not signalled": Broken(
        NODE, {protocol.notify_partial: forget_partial}, mk.CommTimeout, {"signal": "partial", "role": "compute"}
    ),
    "a node's sum is signalled with an old epoch": Broken(
        NETWORK, {protocol.post_node_sum: post_with_old_epoch}, mk.CommTimeout,
        {"signal": "partial", "seen": 0, "expected": 1},
    ),
    "parts of the last use of the half are added": Broken(NODE, {protocol.wait_partials: wait_for_old_partials}),
    "sums of the last use of the half are added": Broken(
        NETWORK, {reduce_scatter.wait_node_sums: wait_for_old_node_sums}
    ),
    "the epoch does not advance": Broken(NODE, EPOCH_STAYS),
    "all-reduce: a part is not signalled": Broken(
        AR_NODE, {protocol.notify_partial: forget_partial}, mk.CommTimeout, {"signal": "partial"}
    ),
    "all-reduce: a finished tile is not signalled": Broken(
        AR_NODE, {all_reduce.notify_finished: forget_finished}, mk.CommTimeout, {"signal": "finished tile"}
    ),
    "all-reduce: a finished tile is read too early": Broken(AR_NODE, {all_reduce.wait_finished: wait_for_old_tile}),
    "all-reduce: a finished tile is announced too early": Broken(
        AR_NODE, {two_level._notify_last_finished: notify_next_finished},
        (RACE, mk.CommTimeout),  # and that of the first block never
    ),
    "all-reduce: sums of nodes are added too early": Broken(AR_NETWORK, {all_reduce.sum_nodes: sum_nodes_too_early}),
    "all-reduce: the epoch does not advance": Broken(AR_NODE, EPOCH_STAYS),
    # rule 2: data first, then signal
    "a signal before its part": Broken(NODE, {protocol.push_partial: notify_before_push}),
    "a request before its sum is stored": Broken(NETWORK, {reduce_scatter.send_node_sum: post_before_store}),
    "no release": Broken(NODE, RELAXED_NOTIFY),
    "no release before the network": Broken(NETWORK, RELAXED_NOTIFY),
    "no barrier before the release": Broken(NODE, NO_BARRIER_IN_LOOP),
    "no barrier before the network": Broken(NETWORK, NO_BARRIER_IN_LOOP),
    "no acquire": Broken(NODE, RELAXED_WAIT),
    "no acquire of what came over the network": Broken(NETWORK, RELAXED_WAIT),
    "all-reduce: no release": Broken(AR_NODE, RELAXED_NOTIFY),
    "all-reduce: no barrier before the release": Broken(AR_NODE, NO_BARRIER_IN_LOOP),
    "all-reduce: no acquire": Broken(AR_NODE, RELAXED_WAIT),
    "all-reduce: no release before the network": Broken(AR_NETWORK, RELAXED_NOTIFY),
    # rule 3: buffers are reused when their readers are done
    "one half for all epochs": Broken(Sums((1, 2), SCATTER, calls=2), ONE_HALF),
    "one half for all epochs, over the network": Broken(Sums((2, 1), SCATTER, calls=2), ONE_HALF),
    "all-reduce: one half for all epochs": Broken(Sums((2, 1), REDUCE, calls=2), ONE_HALF),
    "multicast: one half for all epochs": Broken(Sums((1, 3), MULTICAST, calls=4, rows=60, n=40), ONE_HALF_OF_SLOTS),
    "a slot of the ring is reused before it was taken": Broken(
        Sums((2, 1), SCATTER, ring=2, rows=128), {requests.wait_free: take_slot_at_once}
    ),
    # rule 4: no CTA waits for a later one, and what others need comes first
    "own rows first": Broken(
        NODE, {reduce_scatter_order.tile_at: tile_at_from_the_end}, mk.CommTimeout, {"signal": "partial"}
    ),
    "tiles that are left over are dealt from the other end": Broken(
        Sums((1, 2), SCATTER, rows=70, resident=1), {roles.this_cta: number_from_the_end}, mk.CommTimeout,
        {"signal": "partial"},
    ),
    "all-reduce: own tiles first": Broken(AR_NODE, {all_reduce_order.round_at: round_of_own_first}, mk.CommTimeout),
    "all-reduce: tiles are gathered before the own one is finished": Broken(
        Sums((1, 2), REDUCE, rows=70, n=20, resident=1), {two_level._lag: no_lag}
    ),
    # memory
    "a tile is stored beyond out": Broken(NODE, {gemm.store_tile: store_tall_tile}, mk.SimulatorError),
    "a part beyond the workspace": Broken(NODE, {layout.slot_of: slot_far_away}, mk.SimulatorError),
    "a request beyond the workspace": Broken(NETWORK, {protocol.post_node_sum: post_too_much}, mk.SimulatorError),
    "all-reduce: a finished tile beyond the workspace": Broken(
        AR_NODE, {all_reduce.finished_slot: finished_far_away}, mk.SimulatorError
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_broken(name):
    assert_caught(BROKEN[name])


@pytest.mark.parametrize("scenario", [TWO_LEVELS, AR_TWO_LEVELS])
def test_two_levels_pass(scenario):
    scenario.run(seed=0)


@pytest.mark.parametrize("ring", [1, 2])
@pytest.mark.parametrize("way", [SCATTER, REDUCE])
def test_a_full_ring_is_waited_for(way, ring):
    for cluster in ((3, 1), (2, 2)):
        Sums(cluster, way, rows=36, n=20, ring=ring, calls=2).run(seed=ring)


# -- peers that never come


@pytest.mark.parametrize(("cluster", "dead"), [((1, 2), 1), ((1, 3), 1), ((2, 1), 0), ((2, 2), 0), ((2, 2), 3)])
@pytest.mark.parametrize("way", WAYS)
def test_a_dead_peer(way, cluster, dead, monkeypatch):
    """Rule 6: all others find out, with a record, and go on without it."""
    if way in ONE_NODE and cluster[0] > 1:
        pytest.skip(f"{way} is for one node")
    choose(way, monkeypatch)
    case = Sum(12, 20, 8)

    def work(group):
        call(group, way, case, config=SMALL)
        if group.rank == dead:
            return None
        with pytest.raises(mk.CommTimeout) as caught:
            call(group, way, case, 1, config=SMALL)
        part = group.subset([rank for rank in range(group.size) if rank != dead])
        for turn in range(2):
            call(part, way, case, turn, config=SMALL)
        return caught.value

    failures = [failure for failure in run(work, cluster=cluster) if failure is not None]
    assert len(failures) == cluster[0] * cluster[1] - 1
    for failure in failures:
        assert failure.record.op == name_of(way)
        assert failure.record.peer != failure.record.rank
        assert failure.record.signal in ("partial", "finished tile")
        assert failure.record.seen < failure.record.expected == 2
    assert any(failure.is_cause for failure in failures)
    assert any(record.peer == dead for failure in failures for record in failure.records)


@pytest.mark.parametrize("way", WAYS)
def test_what_could_not_be_computed_is_nan(way, monkeypatch):
    choose(way, monkeypatch)
    case = Sum(64, 32, 8)

    def work(group):
        call(group, way, case, config=SMALL)
        if group.rank == 1:
            return None
        canary = Canary(*mine(group, way, case.residual()).shape, case.dtype)
        with pytest.raises(mk.CommTimeout):
            call(group, way, case, out=canary.tensor, config=SMALL)
        canary.check()
        return canary.tensor

    assert torch.isnan(run(work, cluster=(1, 2))[0]).all()


def test_other_groups_are_not_touched_by_a_dead_peer():
    case = Sum(8, 5, 8)

    def work(group):
        part = group.split(group.rank // 2)
        call(group, REDUCE, case)
        call(part, SCATTER, case)
        if group.rank != 3:
            with pytest.raises(mk.CommTimeout):
                call(group, REDUCE, case, 1)
        if group.rank < 2:
            check(
                part, SCATTER, case, mk.matmul_reduce_scatter(case.a(part.rank, 1), case.b(part.rank, 1), group=part), 1
            )

    run(work, cluster=(1, 4))
