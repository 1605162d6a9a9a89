"""matmul_all_reduce on three and more nodes, where every tile has a home (ops/reduce/all_reduce/home.py): results,
bits, what crosses the network, rules of synchronisation broken on purpose, and peers that never come."""

from dataclasses import dataclass

import pytest
import torch
import triton
import triton.language as tl
from lang.harness import as_cta
from support.broken_variants import (
    ONE_HALF_OF_SLOTS,
    RACE,
    RELAXED_NOTIFY,
    RELAXED_WAIT,
    WRONG,
    Broken,
    assert_caught,
)
from support.operator_calls import Canary, assert_same, run
from support.reduce_reference import SMALL, Sum, call, choose
from support.scenarios import REDUCE, Sums

import mkernel as mk
from mkernel.lang.context import Comm, rank_of
from mkernel.lang.matrix import Tile
from mkernel.lang.partials import load_partial
from mkernel.lang.roles import COMPUTE
from mkernel.lang.signals import wait_again
from mkernel.ops.reduce.all_reduce import home, order, two_level
from mkernel.ops.reduce.all_reduce.home import _owner_in, is_home, send_to_home, sum_at_home, wait_from_home
from mkernel.ops.reduce.all_reduce.order import home_of, number_at_home, round_of, slot_number, tile_of
from mkernel.ops.reduce.all_reduce.protocol import finish_tile, notify_finished
from mkernel.ops.reduce.kinds import PARTIAL
from mkernel.ops.reduce.protocol import signal_at, slot_at

CLUSTERS = [(3, 1), (3, 2), (4, 1)]


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize(("m", "n", "dtype", "reduce_dtype"), [
    (90, 40, torch.float32, None),
    (50, 18, torch.bfloat16, torch.float32),  # sums travel wider than finished tiles
    (7, 5, torch.float16, None),  # a single tile, which has one home
])  # fmt: skip
def test_results(cluster, m, n, dtype, reduce_dtype):
    case = Sum(m, n, 12, dtype)

    def work(group):
        results = [
            call(group, REDUCE, case, turn, bias=True, residual=True, reduce_dtype=reduce_dtype,
                 config=mk.Config(tile_m=16, tile_n=16, tile_k=16, ctas=2))
            for turn in range(3)
        ]  # fmt: skip
        canary = Canary(m, n, dtype)
        call(group, REDUCE, case, out=canary.tensor, config=SMALL)
        canary.check()
        return results

    for turns in zip(*run(work, cluster=cluster)):
        for other in turns[1:]:
            assert_same(other, turns[0])


def test_shapes_take_turns():
    """Calls of different shapes share a workspace; a word may have another sender in the next call."""

    def work(group):
        for turn in range(9):
            m, n, ctas = ((90, 40, 2), (20, 20, 3), (33, 70, 1))[turn % 3]
            call(group, REDUCE, Sum(m, n, 8), turn, config=mk.Config(tile_m=16, tile_n=16, tile_k=16, ctas=ctas))

    run(work, cluster=(4, 1))


@pytest.mark.parametrize("nodes", [3, 4, 5])
def test_every_tile_has_a_place_at_one_home(nodes):
    ctas, blocks = 4, 7

    homes, places = {}, {}
    for cta in range(ctas):
        with as_cta(cta, ctas) as evaluate:
            for block in range(blocks):
                homes[cta, block] = evaluate(home_of, block, NODES=nodes)
                places[cta, block] = evaluate(number_at_home, block, NODES=nodes)
    for node in range(nodes):
        taken = [places[key] for key, value in homes.items() if value == node]
        assert len(set(taken)) == len(taken), "no two tiles share a slot"
        assert all(place < -(-blocks // nodes) * ctas for place in taken), "slots are as many as the layout has"
        assert abs(len(taken) - ctas * blocks / nodes) <= ctas, "nodes share the work"


def exactly(group, turn, parts):
    """A call whose partial sums are these constants, one for each rank; fp32, so that they travel unrounded."""
    a = torch.full((50, 8), 0.125 * parts[(group.rank + turn) % len(parts)])
    return mk.matmul_all_reduce(a, torch.ones(8, 40), config=mk.Config(tile_m=16, tile_n=16, tile_k=16, ctas=2))


@dataclass(frozen=True)
class OrderedSums(Sums):
    """The nodes' sums are such that another order gives another result."""

    def work(self, group):
        parts = [2.0**30, -(2.0**30), 1.0][: group.size]
        for turn in range(self.calls):
            rotated = [parts[(rank + turn) % 3] for rank in range(3)]
            expected = torch.tensor(0.0)
            for part in rotated:
                expected = expected + torch.tensor(part)
            y = exactly(group, turn, parts)
            assert bool((y == expected).all()), f"{y.unique()} instead of {expected}"
        return []


def test_nodes_are_added_in_order():
    """From node 0 on at every home, so the bits do not depend on which node a tile's home is."""
    OrderedSums((3, 1), REDUCE, calls=3).run(seed=1)


@pytest.mark.parametrize("cluster", [(3, 1), (4, 2)])
def test_what_crosses_the_network(cluster):
    """A sum goes to its home, and a finished tile to the other owners: of N tiles, N - 1 sums and N - 1 finished
    tiles leave every rank."""
    nodes, gpus = cluster
    bytes_of_sum, bytes_of_result = 16 * 16 * 4, 16 * 16 * 2
    case = Sum(16 * gpus * nodes, 16, 8, torch.bfloat16)  # a block for each node

    def work(group):
        call(group, REDUCE, case, reduce_dtype=torch.float32, config=mk.Config(tile_m=16, tile_n=16, ctas=1))
        group.barrier()
        return group.world.traffic

    traffic = run(work, cluster=cluster)[0]
    for source in range(nodes * gpus):
        for target in range(nodes * gpus):
            counterparts = source % gpus == target % gpus and source != target
            assert traffic.network[source][target] == (bytes_of_sum + bytes_of_result if counterparts else 0)


def test_explain():
    def work(group):
        return str(mk.explain("matmul_all_reduce", torch.ones(64, 8), torch.ones(8, 32), config=SMALL))

    assert "sends the finished tile back" in run(work, cluster=(3, 1))[0]
    assert "sends the finished tile back" not in run(work, cluster=(2, 1))[0]


# -- broken on purpose


@triton.jit
def forget_to_send(comm, exchange, block):
    pass


@triton.jit
def keep_sum(comm, exchange, total, block):
    if is_home(comm, block):
        send_to_home(comm, exchange, total, block)
    else:
        tl.store(
            slot_at(comm, exchange.own_sums, rank_of(comm.context), 0, slot_number(block)) + tl.arange(0, 1),
            tl.sum(tl.sum(total, 1), 0),
        )


@triton.jit
def wait_from_home_before(comm, exchange, block, tile):
    return wait_from_home(
        Comm(comm.context, comm.epoch - 2, comm.WORLD_SIZE, comm.RANKS_PER_NODE), exchange, block, tile
    )


@triton.jit
def sum_at_home_too_early(comm, exchange, block, tile, M: tl.constexpr, N: tl.constexpr):
    return sum_at_home(
        Comm(comm.context, comm.epoch - 2, comm.WORLD_SIZE, comm.RANKS_PER_NODE), exchange, block, tile, M, N
    )


@triton.jit
def send_before_finishing(comm, call, block):
    if is_home(comm, block):
        rank = rank_of(comm.context)
        own = round_of(block, rank % comm.RANKS_PER_NODE, comm.RANKS_PER_NODE)
        tile, row, column = tile_of(call.product, own)
        here = Tile(0, row, call.product.rows, column, call.product.n)
        total = sum_at_home(comm, call.exchange, block, tile, call.product.tiling.M, call.product.tiling.N)
        home.send_finished(comm, call.exchange, block)
        finish_tile(comm, call, total, here, block)


@triton.jit
def notify_before_receiving(comm, exchange, block):
    notify_finished(comm, exchange, block - 2)


@triton.jit
def sum_from_own_node(comm, exchange, block, tile, M: tl.constexpr, N: tl.constexpr):
    NODES: tl.constexpr = comm.WORLD_SIZE // comm.RANKS_PER_NODE
    rank = rank_of(comm.context)
    number = number_at_home(block, NODES)
    total = tl.zeros((M, N), tl.float32)
    total += load_partial(slot_at(comm, exchange.own_sums, rank, 0, slot_number(block)), M, N)
    for i in range(NODES - 1):
        source = _owner_in(comm, (rank // comm.RANKS_PER_NODE + 1 + i) % NODES)
        wait_again(
            comm.context,
            signal_at(comm, exchange.node_sum, rank, i, number),
            comm.epoch,
            COMPUTE,
            PARTIAL,
            source,
            tile,
        )
        total += load_partial(slot_at(comm, exchange.node_sums, rank, i, number), M, N)
    return total


@triton.jit
def same_place_for_all(block, NODES: tl.constexpr):
    return slot_number(0)


THREE = Sums((3, 1), REDUCE, rows=70, n=20, ctas=1)
NODES_OF_TWO = Sums((3, 2), REDUCE, rows=140, n=20, ctas=1)

BROKEN = {
    # rule 1
    "a finished tile is not sent back": Broken(
        THREE, {home.send_finished: forget_to_send}, mk.CommTimeout, {"signal": "finished tile", "role": "compute"}
    ),
    "a sum does not reach its home": Broken(
        THREE, {home.send_to_home: keep_sum}, mk.CommTimeout, {"signal": "partial", "role": "compute"}
    ),
    "sums of the last use of the half are added": Broken(THREE, {home.sum_at_home: sum_at_home_too_early}),
    "a finished tile is read before it has come": Broken(THREE, {home.wait_from_home: wait_from_home_before}),
    "a tile is announced before it has come": Broken(
        NODES_OF_TWO, {two_level._notify_last_finished: notify_before_receiving}, (RACE, mk.CommTimeout)
    ),
    # rule 2
    "a request before its tile is finished": Broken(THREE, {two_level._finish_later: send_before_finishing}),
    "no release before the network": Broken(THREE, RELAXED_NOTIFY),
    "no acquire of what came over the network": Broken(THREE, RELAXED_WAIT),
    # rule 3
    "one half for all epochs": Broken(Sums((3, 2), REDUCE, calls=3, rows=60, n=20), ONE_HALF_OF_SLOTS),
    "two tiles share a slot at their home": Broken(
        Sums((3, 1), REDUCE, rows=140, n=20, ctas=1), {order.number_at_home: same_place_for_all},
        (RACE, WRONG, mk.CommTimeout),
    ),
    # the order of sums
    "every home begins with its own node": Broken(
        OrderedSums((3, 1), REDUCE), {home.sum_at_home: sum_from_own_node}, WRONG
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_broken(name):
    assert_caught(BROKEN[name])


@pytest.mark.parametrize("scenario", [THREE, NODES_OF_TWO, Sums((4, 1), REDUCE, rows=140, n=20, ctas=1, resident=1)])
def test_one_cta_after_the_other(scenario):
    """Rule 4."""
    scenario.run(seed=0)


@pytest.mark.parametrize("ring", [1, 2])
def test_a_full_ring_is_waited_for(ring):
    Sums((4, 1), REDUCE, rows=90, n=20, ring=ring, calls=2).run(seed=ring)


@pytest.mark.parametrize(("cluster", "dead"), [((3, 1), 2), ((3, 2), 3), ((4, 1), 0)])
def test_a_dead_peer(cluster, dead, monkeypatch):
    """Rule 6: all others find out, and go on without it."""
    choose(REDUCE, monkeypatch)
    case = Sum(40, 20, 8)

    def work(group):
        call(group, REDUCE, case, config=SMALL)
        if group.rank == dead:
            return None
        with pytest.raises(mk.CommTimeout) as caught:
            call(group, REDUCE, case, 1, config=SMALL)
        part = group.subset([rank for rank in range(group.size) if rank != dead])
        for turn in range(2):
            call(part, REDUCE, case, turn, config=SMALL)
        return caught.value

    failures = [failure for failure in run(work, cluster=cluster) if failure is not None]
    assert len(failures) == cluster[0] * cluster[1] - 1
    for failure in failures:
        assert failure.record.signal in ("partial", "finished tile")
        assert failure.record.seen < failure.record.expected == 2
    assert any(record.peer == dead for failure in failures for record in failure.records)
