"""matmul_reduce_scatter and matmul_all_reduce with every rule of synchronisation broken on purpose. Then peers that
never come."""

from __future__ import annotations

import pytest
import torch
from broken import RACE, RELAXED_NOTIFY, RELAXED_WAIT, WRONG, Broken, assert_caught
from helpers import Canary, run
from mutation import OP, mutated
from scenarios import MULTICAST, REDUCE, SCATTER, SHOT, Sums
from sums import ONE_NODE, SMALL, WAYS, Sum, call, check, choose, mine, name_of

import mkernel as mk

# three tiles of every rank's rows on two CTAs: one is left over
NODE = Sums((1, 2), SCATTER, rows=70)
NETWORK = Sums((2, 1), SCATTER, rows=70)
TWO_LEVELS = Sums((2, 2), SCATTER, calls=2, rows=40)
# several blocks of every CTA: finished tiles are gathered in the loop, and behind it
AR_NODE = Sums((1, 2), REDUCE, rows=70, n=20)
AR_NETWORK = Sums((2, 1), REDUCE, rows=40, ctas=1)
AR_TWO_LEVELS = Sums((2, 2), REDUCE, rows=50, n=40, ctas=1, calls=2)
ONE_SHOT = Sums((1, 3), SHOT, rows=24)

KERNEL, PROTOCOL, ORDER = f"{OP}/kernel", f"{OP}/protocol", f"{OP}/order"
TWO_LEVEL, SHOT_KERNEL = f"{OP}/two_level", f"{OP}/one_shot"
WITHIN_NODE = "reduce/protocol"  # of both operators

RELEASES = "notify_in_loop(signal.to(tl.pointer_type(tl.int64)), comm.epoch)"
POSTS = "post(comm.context, transfer, signal, comm.epoch, COMPUTE, True)"
WAITS = "comm.epoch, COMPUTE, PARTIAL"
SHAPE = "total, total.shape[0], total.shape[1])\n"
STORES = f"    store_partial(slot_at(comm, exchange.partials, adder, place, j), {SHAPE}"
STORES_SUM = f"    store_partial(segment_of(comm.context, rank, DTYPE) + source, {SHAPE}"
NO_BARRIER = [("signals", "    barrier()\n    tl.atomic_xchg(signal", "    tl.atomic_xchg(signal")]
ONE_HALF = [("layout", "(epoch % 2)", "(epoch % 2 * 0)")]
STAYS = [("signals", "state + EPOCH, epoch,", "state + EPOCH, epoch - 1,")]

BROKEN = {
    # rule 1: signals grow, and are waited for with the epoch
    "a part is not signalled": Broken(
        NODE, [(KERNEL, RELEASES, "pass")], mk.CommTimeout, {"signal": "partial", "role": "compute"}
    ),
    "a node's sum is signalled with an old epoch": Broken(
        NETWORK, [(PROTOCOL, POSTS, POSTS.replace("epoch", "epoch - 1"))], mk.CommTimeout,
        {"signal": "partial", "seen": 0, "expected": 1},
    ),
    "parts of the last use of the half are added": Broken(
        NODE, [(WITHIN_NODE, WAITS, WAITS.replace("epoch", "epoch - 2"))]
    ),
    "sums of the last use of the half are added": Broken(
        NETWORK, [(PROTOCOL, WAITS, WAITS.replace("epoch", "epoch - 2"))]
    ),
    "the epoch does not advance": Broken(NODE, STAYS),
    "all-reduce: a part is not signalled": Broken(
        AR_NODE, [(TWO_LEVEL, RELEASES, "pass")], mk.CommTimeout, {"signal": "partial"}
    ),
    "all-reduce: a finished tile is not signalled": Broken(
        AR_NODE,
        [(PROTOCOL, "notify_in_loop(signal_at(comm, exchange.finished, peer_behind(comm, i), place, "
                    "slot_number(block)), comm.epoch)", "pass")],
        mk.CommTimeout,
        {"signal": "finished tile"},
    ),
    "all-reduce: a finished tile is read too early": Broken(
        AR_NODE, [(PROTOCOL, "comm.epoch, COMPUTE, FINISHED_TILE", "comm.epoch - 2, COMPUTE, FINISHED_TILE")]
    ),
    "all-reduce: a finished tile is announced too early": Broken(
        AR_NODE,
        [(TWO_LEVEL, "notify_finished(comm, call.exchange, block - _lag(comm))",
          "notify_finished(comm, call.exchange, block - _lag(comm) + 1)")],
        (RACE, mk.CommTimeout),  # and that of the first block never
    ),
    "all-reduce: sums of nodes are added too early": Broken(
        AR_NETWORK, [(PROTOCOL, WAITS, WAITS.replace("epoch", "epoch - 2"))]
    ),
    "all-reduce: the epoch does not advance": Broken(AR_NODE, STAYS),
    "one shot: a part is not signalled": Broken(
        ONE_SHOT,
        [(SHOT_KERNEL, "notify_in_loop(signal_at(comm, exchange.partial, peer, rank, tile), comm.epoch)", "pass")],
        mk.CommTimeout,
        {"signal": "partial"},
    ),
    "one shot: parts are added too early": Broken(
        ONE_SHOT, [(SHOT_KERNEL, WAITS, WAITS.replace("epoch", "epoch - 2"))]
    ),
    # rule 2: data first, then signal
    "a signal before its part": Broken(
        NODE,
        [(WITHIN_NODE, "import PARTIAL, wait_again", "import PARTIAL, notify_in_loop, wait_again"),
         (WITHIN_NODE, STORES,
          f"    notify_in_loop(signal_at(comm, exchange.partial, adder, place, j), comm.epoch)\n{STORES}")],
    ),
    "a request before its sum is stored": Broken(
        NETWORK, [(PROTOCOL, STORES_SUM, ""), (PROTOCOL, f"    {POSTS}\n", f"    {POSTS}\n{STORES_SUM}")]
    ),
    "no release": Broken(NODE, RELAXED_NOTIFY),
    "no release before the network": Broken(NETWORK, RELAXED_NOTIFY),
    "no barrier before the release": Broken(NODE, NO_BARRIER),
    "no barrier before the network": Broken(NETWORK, NO_BARRIER),
    "no acquire": Broken(NODE, RELAXED_WAIT),
    "no acquire of what came over the network": Broken(NETWORK, RELAXED_WAIT),
    "all-reduce: no release": Broken(AR_NODE, RELAXED_NOTIFY),
    "all-reduce: no barrier before the release": Broken(AR_NODE, NO_BARRIER),
    "all-reduce: no acquire": Broken(AR_NODE, RELAXED_WAIT),
    "all-reduce: no release before the network": Broken(AR_NETWORK, RELAXED_NOTIFY),
    "one shot: no release": Broken(ONE_SHOT, RELAXED_NOTIFY),
    "one shot: no acquire": Broken(ONE_SHOT, RELAXED_WAIT),
    # rule 3: buffers are reused when their readers are done
    "one half for all epochs": Broken(Sums((1, 2), SCATTER, calls=2), ONE_HALF),
    "one half for all epochs, over the network": Broken(Sums((2, 1), SCATTER, calls=2), ONE_HALF),
    "all-reduce: one half for all epochs": Broken(Sums((2, 1), REDUCE, calls=2), ONE_HALF),
    "one shot: one half for all epochs": Broken(Sums((1, 2), SHOT, calls=2), ONE_HALF),
    "multicast: one half for all epochs": Broken(
        Sums((1, 3), MULTICAST, calls=4, rows=60, n=20), [("layout", "(epoch % 2) * slots.half", "(epoch % 2) * 0")]
    ),
    "a slot of the ring is reused before it was taken": Broken(
        Sums((2, 1), SCATTER, ring=2, rows=128),
        [("requests", "    if ticket >= free:\n", "    if ticket < 0:\n"),
         ("requests", "(ticket < free) & (not leave)", "not leave")],
    ),
    # rule 4: no CTA waits for a later one, and what others need comes first
    "own rows first": Broken(
        NODE,
        [(KERNEL, "        place, sequence.tiles,", "        sequence.length - 1 - place, sequence.tiles,")],
        mk.CommTimeout,
        {"signal": "partial"},
    ),
    "tiles that are left over are dealt from the other end": Broken(
        Sums((1, 2), SCATTER, rows=70, resident=1),
        [(ORDER, "    cta = tl.program_id(0)\n", "    cta = tl.num_programs(0) - 1 - tl.program_id(0)\n")],
        mk.CommTimeout,
        {"signal": "partial"},
    ),
    "all-reduce: own tiles first": Broken(
        AR_NODE, [(ORDER, "within = (own + 1 + place - start) % size", "within = (own + place - start) % size")],
        mk.CommTimeout,
    ),
    "all-reduce: tiles are gathered before the own one is finished": Broken(
        Sums((1, 2), REDUCE, rows=70, n=20, resident=1),
        [(TWO_LEVEL, "return 2 if comm.WORLD_SIZE > comm.RANKS_PER_NODE else 1", "return 0")],
    ),
    # sums in a fixed order: the same bits on every rank
    "all-reduce: every node begins with itself": Broken(
        Sums((3, 1), REDUCE, ctas=1, dtype=torch.float32),
        [(PROTOCOL, "slot_at(comm, exchange.node_sums, rank, node, slot_number(block))",
          "slot_at(comm, exchange.node_sums, rank, (node + rank // comm.RANKS_PER_NODE) % NODES, slot_number(block))")],
        WRONG,
    ),
    "one shot: every rank begins with itself": Broken(
        Sums((1, 3), SHOT, rows=24, dtype=torch.float32),
        [(SHOT_KERNEL, "slot_at(comm, exchange.partials, rank, source, tile)",
          "slot_at(comm, exchange.partials, rank, (source + rank) % comm.WORLD_SIZE, tile)")],
        WRONG,
    ),
    # memory
    "a tile is stored beyond out": Broken(
        NODE, [("gemm", "mask=(i < tile.rows) & (j < tile.columns)", "mask=j < tile.columns")], mk.SimulatorError
    ),
    "a part beyond the workspace": Broken(
        NODE, [("layout", "return slots.start +", "return slots.start + (1 << 40) +")], mk.SimulatorError
    ),
    "a request beyond the workspace": Broken(
        NETWORK, [(PROTOCOL, "slot_bytes(exchange.outgoing)", "slot_bytes(exchange.outgoing) * 9999")],
        mk.SimulatorError,
    ),
    "all-reduce: a finished tile beyond the workspace": Broken(
        AR_NODE,
        [(PROTOCOL, "slot = slot_at(comm, call.exchange.finished_tiles, rank_of(comm.context), 0, slot_number(block))",
          "slot = slot_at(comm, call.exchange.finished_tiles, rank_of(comm.context), 1 << 30, slot_number(block))")],
        mk.SimulatorError,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_broken(name, tmp_path):
    assert_caught(BROKEN[name], tmp_path)


@pytest.mark.parametrize("scenario", [NODE, TWO_LEVELS, AR_NODE, AR_TWO_LEVELS, ONE_SHOT])
def test_an_unbroken_copy_passes(scenario, tmp_path):
    """Copying alone breaks nothing."""
    scenario.run(mutated(tmp_path, scenario.op), seed=0)


@pytest.mark.parametrize("ring", [1, 2])
@pytest.mark.parametrize("way", [SCATTER, REDUCE])
def test_a_full_ring_is_waited_for(way, ring):
    for cluster in ((3, 1), (2, 2)):
        Sums(cluster, way, rows=36, n=20, ring=ring, calls=2).run_unbroken(seed=ring)


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
