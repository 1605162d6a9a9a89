"""The mixture-of-experts operators, broken on purpose. Then peers that never come."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from support.broken_variants import (
    NO_FENCE_FOR_DESCRIPTORS,
    ONE_HALF,
    ONE_HALF_OF_SIGNALS,
    RELAXED_NOTIFY,
    RELAXED_WAIT,
    WRONG,
    Broken,
    assert_caught,
)
from support.edited_functions import edited
from support.moe_reference import Layer, combine, dispatch, ffn
from support.operator_calls import run
from support.scenarios import LITTLE, Routes

import mkernel as mk
from mkernel.lang.context import Comm
from mkernel.lang.device import complete_descriptor_stores
from mkernel.lang.matrix import Tile
from mkernel.lang.requests import post
from mkernel.lang.roles import SEND
from mkernel.ops.moe import ffn as moe_ffn
from mkernel.ops.moe import grouped, pieces, placing, protocol, reduction, routing, schedule
from mkernel.ops.moe.ffn import _wait_gated
from mkernel.ops.moe.grouped import store_rows, store_rows_through_pointers, wait_placed
from mkernel.ops.moe.pieces import _wait_tiles
from mkernel.ops.moe.placing import _first_row, _wait_own_settled
from mkernel.ops.moe.protocol import notify_held, wait_held, wait_numbered
from mkernel.ops.moe.reduction import _factor, _post_back, _wait_back, _wait_partials
from mkernel.ops.moe.routing import (
    COUNTERS_DONE,
    OK,
    PIECES_TAKEN,
    PUBLISHERS_DONE,
    STATUS,
    experts_before,
    ids_of,
    named_in,
    publish,
    wait_routing,
)
from mkernel.sim.dtypes import KernelError

NODE = Routes((1, 2), "moe_dispatch_matmul")
NETWORK = Routes((2, 1), "moe_dispatch_matmul")
# experts with more than one block of rows
MANY = Routes((1, 2), "moe_dispatch_matmul", layer=Layer((80, 3), (2, 3), hidden=16, out=16, dtype=torch.float32))
ONE_MANY = Routes((1, 1), "moe_dispatch_matmul", layer=Layer((80,), (3,), hidden=16, out=16, dtype=torch.float32))
SPARSE = replace(LITTLE, tokens=(9, 5), experts=(2, 3))  # tokens that stay in their node
BACK = Routes((1, 2), "moe_combine")
BACK_FAR = Routes((2, 1), "moe_combine")
LAYER = Routes((1, 2), "moe_ffn")
LAYER_FAR = Routes((2, 1), "moe_ffn")
# ranks with no expert compute nothing, so no tile's counter tells them what they must wait for themselves
LAYER_FEW = replace(LAYER, layer=replace(LITTLE, experts=(2, 0)))
LAYER_AWAY = replace(LAYER_FAR, layer=replace(LITTLE, experts=(0, 2)))
ALONE = Routes((1, 1), "moe_ffn", layer=Layer((20,), (2,), hidden=40, out=40, dtype=torch.float32))


@triton.jit
def notify_held_but_one(comm, signals, rank, chunk):
    if chunk != 1:
        notify_held(comm, signals, rank, chunk)


@triton.jit
def post_with_old_epoch(comm, transfer, signal):
    post(comm.context, transfer, signal, comm.epoch - 1, SEND)


@triton.jit
def do_not_notify_routed(comm, signals, rank):
    pass


@triton.jit
def do_not_announce(comm, signals):
    pass


@triton.jit
def do_not_announce_node(comm, signals, ROLE: tl.constexpr):
    pass


@triton.jit
def wait_held_before(comm, signals, holder, source, chunk):
    return wait_held(
        Comm(comm.context, comm.epoch - 2, comm.WORLD_SIZE, comm.RANKS_PER_NODE), signals, holder, source, chunk
    )


@triton.jit
def is_full(rows, M: tl.constexpr, SHORT_M: tl.constexpr):
    return rows > M - 1


@triton.jit
def store_all_rows(c, tile, values):
    store_rows(c, Tile(tile.part, tile.row, tile.row + values.shape[0], tile.column, tile.columns), values)


@triton.jit
def store_all_rows_through_pointers(c, tile, values):
    whole = Tile(tile.part, tile.row, tile.row + values.shape[0], tile.column, tile.columns)
    store_rows_through_pointers(c, whole, values)


@triton.jit
def wait_for_no_rows(context, counter, rows, block):
    return wait_placed(context, counter, rows * 0, block)


@triton.jit
def wait_for_rows_but_one(context, counter, rows, block):
    return wait_placed(context, counter, rows - 1, block)


@triton.jit
def do_not_wait_for_routing(comm, signals, ROLE: tl.constexpr):
    return tl.full((), True, tl.int1)


@triton.jit
def do_not_wait_for_weights(comm, signals, ROLE: tl.constexpr):
    if signals.counted is None:  # a combine, whose tables are the weights
        return tl.full((), True, tl.int1)
    else:
        return wait_routing(comm, signals, ROLE)


@triton.jit
def do_not_wait_until_counted(comm, counted):
    return True


@triton.jit
def do_not_wait_until_scheduled(comm, tables, signals):
    return tl.load(tables.summary + STATUS) == OK


@triton.jit
def count_placed_relaxed(counters, mask):
    tl.debug_barrier()
    tl.atomic_add(counters, 1, mask=mask, sem="relaxed", scope="gpu")


@triton.jit
def count_placed_at_once(counters, mask):
    tl.atomic_add(counters, 1, mask=mask, sem="release", scope="gpu")


@triton.jit
def count_settled_relaxed(counter):
    tl.debug_barrier()
    tl.atomic_add(counter, 1, sem="relaxed", scope="gpu")


@triton.jit
def count_settled_at_once(counter):
    tl.atomic_add(counter, 1, sem="release", scope="gpu")


@triton.jit
def wait_for_no_settled(context, counter, ctas, rank):
    return _wait_own_settled(context, counter, 0, rank)


@triton.jit
def wait_for_settled_but_one(context, counter, ctas, rank):
    return _wait_own_settled(context, counter, ctas - 1, rank)


@triton.jit
def count_relaxed(state):
    return tl.atomic_add(state + COUNTERS_DONE, 1, sem="relaxed", scope="gpu")


@triton.jit
def publish_share_of_another(comm, routing, batch, ids, weights, worker, workers):
    publish(comm, routing, batch, ids, weights, (worker + 1) % workers, workers)


@triton.jit
def count_publisher_relaxed(state):
    return tl.atomic_add(state + PUBLISHERS_DONE, 1, sem="relaxed", scope="gpu")


@triton.jit
def take_no_pieces(summary):
    tl.store(summary + PIECES_TAKEN, 0)


@triton.jit
def first_row_of_expert(tables, segments, sections, chunk, mask):
    return _first_row(tables, segments, sections // 2 * 2, chunk, mask)  # of two ranks


@triton.jit
def first_row_of_section(tables, segments, sections, chunk, mask):
    return _first_row(tables, segments, sections, 0 * chunk, mask)


@triton.jit
def number_all_tokens(comm, routing, table, tokens, node, numbers):
    low = experts_before(comm, routing, node * comm.RANKS_PER_NODE)
    high = experts_before(comm, routing, (node + 1) * comm.RANKS_PER_NODE)
    for start in range(0, tokens, 16):
        crosses = named_in(ids_of(routing, table, start, tokens, 16), low, high)
        t = start + tl.arange(0, 16)
        tl.store(numbers + t, tl.where(crosses == 1, t, -1), mask=t < tokens)


@triton.jit
def wait_partials_before(comm, signals, source, chunk):
    return _wait_partials(
        Comm(comm.context, comm.epoch - 2, comm.WORLD_SIZE, comm.RANKS_PER_NODE), signals, source, chunk
    )


@triton.jit
def wait_back_before(comm, signals, rank, peer, chunk):
    return _wait_back(
        Comm(comm.context, comm.epoch - 2, comm.WORLD_SIZE, comm.RANKS_PER_NODE), signals, rank, peer, chunk
    )


@triton.jit
def post_back_but_one(comm, transfer, signal, chunk):
    if chunk != 0:
        _post_back(comm, transfer, signal, chunk)


@triton.jit
def factor_of_first_slot(weights, token, slot, mask, K: tl.constexpr):
    return _factor(weights, token, 0, mask, K)


@triton.jit
def wait_for_no_gates(context, counters, gates, block):
    return _wait_gated(context, counters, gates * 0, block)


@triton.jit
def wait_for_gates_but_one(context, counters, gates, block):
    return _wait_gated(context, counters, gates - 1, block)


@triton.jit
def count_tile_relaxed(counter):
    complete_descriptor_stores()
    tl.debug_barrier()
    tl.atomic_add(counter, 1, sem="relaxed", scope="gpu")


@triton.jit
def count_tile_under_way(counter):
    tl.debug_barrier()
    tl.atomic_add(counter, 1, sem="release", scope="gpu")


@triton.jit
def wait_for_no_tiles(context, done, mask, tiles):
    return _wait_tiles(context, done, mask, tiles * 0)


@triton.jit
def do_not_wait_until_settled(comm, batch, source, chunk):
    return tl.full((), True, tl.int1)


@triton.jit
def wait_until_numbered_to_send_only(comm, numbered, ROLE: tl.constexpr):
    here = True
    if ROLE == SEND:
        here = wait_numbered(comm, numbered, ROLE)
    return here


BROKEN = {
    # rule 1: signals grow, and are waited for with the epoch
    "a chunk of tokens is not signalled": Broken(
        NODE,
        {protocol.notify_held: notify_held_but_one},
        mk.CommTimeout,
        {"signal": "held", "index": 1, "role": "intra", "seen": 0, "expected": 1},
    ),
    "a chunk of tokens is signalled with an old epoch": Broken(
        NETWORK,
        {protocol.post_held: post_with_old_epoch},
        mk.CommTimeout,
        {"signal": "held", "role": "intra", "seen": 0, "expected": 1},
    ),
    "a routing table is not signalled": Broken(
        NODE,
        {protocol.notify_routed: do_not_notify_routed},
        mk.CommTimeout,
        {"signal": "routed", "seen": 0, "expected": 1},
    ),
    "an entry is not announced in the node": Broken(
        replace(NODE, calls=2),
        {protocol.announce: do_not_announce},
        mk.CommTimeout,
        {"signal": "entered", "seen": 0, "expected": 1},
    ),
    "an entry is not announced to other nodes": Broken(
        replace(NETWORK, calls=2),
        {protocol.announce_node: do_not_announce_node},
        mk.CommTimeout,
        {"signal": "entered", "seen": 0, "expected": 1},
    ),
    "tokens are fetched before they are there": Broken(NODE, {protocol.wait_held: wait_held_before}),
    "tokens are fetched before the network brought them": Broken(NETWORK, {protocol.wait_held: wait_held_before}),
    "a tile is too short for its block": Broken(MANY, {grouped._is_tall: is_full}, WRONG),
    "a short tile is stored to its full height": Broken(
        MANY, {grouped.store_rows_through_pointers: store_all_rows_through_pointers}
    ),
    "tiles do not wait for their rows": Broken(NODE, {grouped.wait_placed: wait_for_no_rows}),
    "tiles wait for all rows but one": Broken(NODE, {grouped.wait_placed: wait_for_rows_but_one}),
    "rows are counted before all tables are here": Broken(NODE, {routing.wait_routing: do_not_wait_for_routing}),
    "tokens are placed before they are counted": Broken(NODE, {protocol.wait_counted: do_not_wait_until_counted}),
    "tiles are taken before they are ordered": Broken(NODE, {schedule.wait_scheduled: do_not_wait_until_scheduled}),
    # rule 2: data first, then signal
    "placed rows are not released": Broken(NODE, {placing._count_placed: count_placed_relaxed}),
    "no barrier before placed rows are counted": Broken(NODE, {placing._count_placed: count_placed_at_once}),
    "places of own rows are not released": Broken(ONE_MANY, {placing._count_settled: count_settled_relaxed}),
    "no barrier before places of own rows are counted": Broken(
        ONE_MANY, {placing._count_settled: count_settled_at_once}
    ),
    "own rows are placed before their places are known": Broken(
        ONE_MANY, {placing._wait_own_settled: wait_for_no_settled}
    ),
    "own rows are placed before all their places are known": Broken(
        ONE_MANY, {placing._wait_own_settled: wait_for_settled_but_one}
    ),
    "counts are not released": Broken(NODE, {routing._count_counter: count_relaxed}),
    "a rank that is alone counts what another CTA publishes": Broken(
        ONE_MANY, {routing.publish: publish_share_of_another}
    ),
    "parts of a routing table are not released": Broken(MANY, {routing._count_publisher: count_publisher_relaxed}),
    "no release": Broken(NODE, RELAXED_NOTIFY),
    "no acquire": Broken(NODE, RELAXED_WAIT),
    "no fence for descriptors": Broken(NODE, NO_FENCE_FOR_DESCRIPTORS),
    "tiles are handed out where the call before ended": Broken(
        Routes((1, 2), "moe_dispatch_matmul", calls=2), {routing._take_none: take_no_pieces}, WRONG
    ),
    # rule 3: buffers are reused when their readers are done
    "one half for all epochs": Broken(Routes((1, 2), "moe_dispatch_matmul", calls=2), ONE_HALF),
    # rule 5: the network promises no order
    "one set of arrival signals for all epochs": Broken(
        # the second rank has no tokens, so the first does not need to hear of it before it goes on
        Routes((2, 1), "moe_dispatch_matmul", calls=2, layer=Layer((3, 0), (1, 1), hidden=16, out=16)),
        ONE_HALF_OF_SIGNALS,
    ),
    # places
    "rows of a source begin where those of another do": Broken(NODE, {placing._first_row: first_row_of_expert}),
    "rows of a segment begin where those of the first do": Broken(
        MANY, {placing._first_row: first_row_of_section}
    ),
    "a token that was not sent is counted": Broken(
        replace(NETWORK, calls=2, layer=SPARSE), {routing.number_crossings: number_all_tokens}
    ),
    "a tile is stored beyond its expert": Broken(MANY, {grouped.store_rows: store_all_rows}),
    # combine
    "rows of the node are collected before they are summed": Broken(
        BACK, {reduction._wait_partials: wait_partials_before}
    ),
    "sums of other nodes are collected before they are here": Broken(
        BACK_FAR, {reduction._wait_back: wait_back_before}
    ),
    "a sum is not sent back": Broken(
        BACK_FAR,
        {reduction._post_back: post_back_but_one},
        mk.CommTimeout,
        {"signal": "back", "seen": 0, "expected": 1},
    ),
    "weights are read before they are here": Broken(BACK, {routing.wait_routing: do_not_wait_for_weights}),
    "a weight of another slot": Broken(BACK, {reduction._factor: factor_of_first_slot}, WRONG),
    # inside the layer
    "the second GEMM does not wait for the first": Broken(ALONE, {moe_ffn._wait_gated: wait_for_no_gates}),
    "the second GEMM waits for all tiles but one": Broken(ALONE, {moe_ffn._wait_gated: wait_for_gates_but_one}),
    "tiles are not released": Broken(ALONE, {moe_ffn._count_tile: count_tile_relaxed}),
    "stores through descriptors are not waited for": Broken(ALONE, {moe_ffn._count_tile: count_tile_under_way}),
    "rows are summed before they are computed": Broken(ALONE, {pieces._wait_tiles: wait_for_no_tiles}),
    "rows are summed before their places are known": Broken(
        LAYER_FEW, {pieces._wait_settled: do_not_wait_until_settled}
    ),
    "tiles of the layer do not wait for their rows": Broken(LAYER, {grouped.wait_placed: wait_for_no_rows}),
    "tokens are collected before those to send are numbered": Broken(
        LAYER_AWAY, {protocol.wait_numbered: wait_until_numbered_to_send_only}
    ),
    "sums of the layer are collected before they are here": Broken(
        LAYER_FAR, {reduction._wait_back: wait_back_before}
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_broken(name):
    assert_caught(BROKEN[name])


def test_rows_over_capacity_must_not_be_placed():
    def work(group):
        with pytest.raises(mk.CapacityError):
            dispatch(group, NODE.layer, capacity=5)

    run(work, cluster=(1, 2))
    ignored = {routing._find_status: edited(routing._find_status, ("return status", "return status * 0"))}
    with pytest.raises((mk.SimulatorError, AssertionError)) as caught:
        run(work, cluster=(1, 2), replace=ignored)
    assert not isinstance(caught.value, KernelError)


# -- peers that never come


@pytest.mark.parametrize(("cluster", "dead"), [((1, 2), 1), ((2, 1), 0), ((2, 2), 3)])
@pytest.mark.parametrize("call", [combine, ffn])
def test_a_dead_peer(cluster, dead, call):
    """All others find out, with a record, and go on without it."""
    size = cluster[0] * cluster[1]
    layer = Layer((4,) * size, (1,) * size, k=2, hidden=16, out=16, dtype=torch.float32)
    smaller = Layer((4,) * (size - 1), (1,) * (size - 1), k=1, hidden=16, out=16, dtype=torch.float32)

    def work(group):
        call(group, layer, max_tokens=8)
        if group.rank == dead:
            return None
        with pytest.raises(mk.CommTimeout) as caught:
            call(group, layer, 1, max_tokens=8)
        # some hear of it at once, some only when their own time is over: nobody shall wait for them in vain
        group.timeout *= 10
        part = group.subset([rank for rank in range(group.size) if rank != dead])
        call(part, smaller)
        return caught.value

    failures = [failure for failure in run(work, cluster=cluster, timeout=1e-4) if failure is not None]
    assert len(failures) == size - 1
    assert any(failure.is_cause for failure in failures)
    assert any(record.peer == dead for failure in failures for record in failure.records)


def test_what_could_not_be_computed_is_nan():
    layer = Layer((4, 4), (1, 1), k=2, hidden=16, out=16, dtype=torch.float32)

    def work(group):
        out = torch.zeros(4, 16)
        ffn(group, layer, max_tokens=8, out=out)
        if group.rank == 0:
            with pytest.raises(mk.CommTimeout):
                ffn(group, layer, 1, max_tokens=8, out=out)
            assert out.isnan().all()
        return True

    assert all(run(work, cluster=(1, 2), timeout=1e-4))


def test_a_combine_that_was_queued_behind_a_lost_dispatch():
    """Its tables may be missing: it must not look at them."""
    layer = Layer((4, 4), (1, 1), k=2, hidden=16, out=16, dtype=torch.float32)

    def work(group):
        out = torch.zeros(4, 16)
        with group.world.stream(group.rank, "queue"):
            for _ in range(2):
                y, handle = dispatch(group, layer, check=False, max_tokens=8)
                mk.moe_combine(y, handle, layer.weights(group.rank), out=out)
                if group.rank == 1:
                    group.synchronize()
                    group.launch = lambda launch: group.confirm()  # lost when all were about to launch
            if group.rank == 0:
                with pytest.raises(mk.CommTimeout):
                    group.synchronize()
                assert y.isnan().all()
                assert out.isnan().all()
        return True

    assert all(run(work, cluster=(1, 2), timeout=1e-4))
