"""ring_attention with every rule of synchronisation broken on purpose. Then peers that never come."""

from __future__ import annotations

import pytest
from attention import Case, call
from broken import NO_BARRIER, RELAXED_NOTIFY, RELAXED_WAIT, WRONG, Broken, assert_caught
from helpers import run
from mutation import OP
from scenarios import Attends

import mkernel as mk

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

PROTOCOL, KERNEL, MASK = f"{OP}/protocol", f"{OP}/kernel", f"{OP}/mask"
PUSHED = "                    notify_chunk(comm, call.rounds, chunk, peer)\n"
SPREAD_WAITS = (
    "wait(comm.context, signal, stamp(comm.epoch, chunk.round_index), INTRA, ARRIVED, chunk.source, chunk.index)"
)
POLLED = "        here &= tl.min(tl.where(needed, seen, expected), 0) >= expected\n"
CREDIT_WAITS = "wait(comm.context, mine + word, stamp(comm.epoch, before), ROLE, FREED, peer, before)"

BROKEN = {
    # rule 1: signals grow, and are waited for with their stamp
    "an arrival is not signalled": Broken(
        NODE,
        [(f"{OP}/transfer", PUSHED, PUSHED.replace("notify", "if chunk.index != 1:\n                        notify"))],
        mk.CommTimeout,
        {"signal": "arrived", "index": 1, "role": "compute"},
    ),
    "an entry is not announced in the node": Broken(
        NODE,
        [("entries", "        notify(segment_of(context, peer, tl.int64) + rank, epoch)\n", "        pass\n")],
        mk.CommTimeout,
        {"signal": "entered", "role": "intra", "seen": 0, "expected": 1},
    ),
    "an entry is not announced to other nodes": Broken(
        NETWORK,
        [("entries", "post(context, Transfer(peer, segment, 0, segment, 0, 0), rank * 8, epoch, SEND)", "pass")],
        mk.CommTimeout,
        {"signal": "entered", "role": "send", "seen": 0, "expected": 1},
    ),
    "a round is not freed": Broken(
        REUSE,
        [
            (
                PROTOCOL,
                "            notify(segment_of(comm.context, peer, tl.int64) + word, stamp(comm.epoch, round_index))",
                "            pass",
            )
        ],
        mk.CommTimeout,
        {"signal": "freed"},
    ),
    "a round is not freed for other nodes": Broken(
        NETWORK_REUSE,
        [
            (
                PROTOCOL,
                "post(comm.context, nothing, word * 8, stamp(comm.epoch, round_index), ROLE)",
                "pass",
            )
        ],
        mk.CommTimeout,
        {"signal": "freed", "role": "send"},
    ),
    "compute takes what arrived in the epoch before": Broken(
        NODE, [(PROTOCOL, POLLED, POLLED.replace(">= expected", ">= expected - 4294967296"))]
    ),
    "compute takes what arrived in the round before": Broken(
        REUSE, [(PROTOCOL, POLLED, POLLED.replace(">= expected", ">= expected - rounds.window"))]
    ),
    "intra passes on before anything is here": Broken(
        TWO_LEVELS, [(PROTOCOL, SPREAD_WAITS, SPREAD_WAITS.replace("stamp(comm.epoch, chunk.round_index)", "0"))]
    ),
    # rule 2: data first, then signal
    "no release": Broken(NODE, RELAXED_NOTIFY),
    "no barrier before the release": Broken(NODE, NO_BARRIER),
    "no acquire": Broken(
        NODE,
        [
            (PROTOCOL, 'mask=needed, sem="acquire"', 'mask=needed, sem="relaxed"'),
            *RELAXED_WAIT,
        ],
    ),
    "no fence before reads through descriptors": Broken(
        NODE, [(KERNEL, "            acquire_for_descriptors()\n", "            pass\n")]
    ),
    # rule 3: buffers are written when their readers are done
    "a chunk is pushed before the round is freed": Broken(
        REUSE, [(PROTOCOL, CREDIT_WAITS, CREDIT_WAITS.replace("stamp(comm.epoch, before)", "0"))]
    ),
    "a chunk is sent before the round is freed": Broken(
        NETWORK_REUSE, [(PROTOCOL, CREDIT_WAITS, CREDIT_WAITS.replace("stamp(comm.epoch, before)", "0"))]
    ),
    "a round is freed with its first tile": Broken(REUSE, [(PROTOCOL, "== rounds.tasks - 1:", "== 0:")]),
    "a round is freed before its chunks were passed on": Broken(
        SPREAD_REUSE, [(f"{OP}/launch", "* (2 if plan.hopper else 1) + passed_on,", "* (2 if plan.hopper else 1),")]
    ),
    "nobody waits for the entry": Broken(
        Attends((1, 2), Case(16), calls=2),
        [(PROTOCOL, "wait(comm.context, mine + peer, comm.epoch, ROLE, ENTERED, peer, 0)", "pass")],
    ),
    "a rank runs ahead of its own rounds": Broken(
        AHEAD,
        [
            (
                PROTOCOL,
                "        wait(comm.context, word, stamp(comm.epoch, before), ROLE, FREED, rank, before)",
                "        pass",
            )
        ],
    ),
    "nobody waits for chunks that no row sees": Broken(
        GAP, [(KERNEL, "if awaits_whole_panels(call, tile):", "if tile.within < 0:")]
    ),
    # rule 4: nobody waits for a tile of a CTA that still sends
    "a copying CTA computes tiles of early rounds": Broken(
        REUSE,
        [(f"{OP}/plan", "Helpers(helpers, ready, max(rounds - window, 0))", "Helpers(helpers, 0.0, 0)")],
        mk.CommTimeout,
        {"signal": "freed"},
    ),
    # what is sent, and what is computed
    "zeros are not sent behind the last key": Broken(
        RAGGED,
        [(KERNEL, "mask=place < source.count * dim, other=0.0", "mask=place < source.count * dim, other=float('nan')")],
        WRONG,
    ),
    "a visible chunk is not sent": Broken(
        CAUSAL, [(MASK, "& (behind > key)", "& (behind > key + keys)")], mk.CommTimeout, {"signal": "arrived"}
    ),
    "the mask is off by one": Broken(CAUSAL, [(KERNEL, "index < upper[:, None]", "index <= upper[:, None]")], WRONG),
    "what every row sees is one block too long": Broken(
        CAUSAL, [(MASK, "everyone_end // TILE_N", "tl.cdiv(everyone_end, TILE_N)")], WRONG
    ),
    "the accumulator is not rescaled": Broken(
        NODE, [(KERNEL, "accumulator = accumulator * alpha[:, None]", "accumulator = accumulator * 1.0")], WRONG
    ),
    "state is not kept between parts": Broken(
        PARTS, [(KERNEL, "            if part > 0:\n", "            if part > 99:\n")], WRONG
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken(name, tmp_path):
    assert_caught(BROKEN[name], tmp_path)


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
