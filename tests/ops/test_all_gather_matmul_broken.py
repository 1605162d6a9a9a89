"""all_gather_matmul with every rule of synchronisation broken on purpose. Then peers that never come."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

import pytest
import torch
from broken import ANY, NO_BARRIER, RELAXED_NOTIFY, RELAXED_WAIT, Broken, SimulatedCalls, assert_caught
from helpers import Canary, Case, assert_product, call, run
from mutation import OP, mutated

import mkernel as mk


@dataclass(frozen=True)
class Scenario(SimulatedCalls):
    """heap: a lies in the symmetric heap and is overwritten after each call."""

    op: ClassVar = "all_gather_matmul"
    _: KW_ONLY
    calls: int = 3
    heap: bool = False
    chunk_rows: int = 4

    def work(self, group, op):
        case = Case(12, 5, 8)
        config = mk.Config(tile_m=16, tile_n=16, tile_k=16, chunk_rows=self.chunk_rows)
        a = mk.empty(case.m, case.k, dtype=case.dtype) if self.heap else None
        for turn in range(self.calls):
            if a is None:
                call(group, case, turn, op=op, config=config)
            else:
                b = case.weights(group.rank, turn)
                y = op(a.copy_(case.rows(group.rank, turn)), b, config=config)
                a.fill_(float("nan"))
                assert_product(y, case.gathered(group.size, turn), b)


NODE = Scenario((1, 2))
NETWORK = Scenario((2, 1))
TWO_LEVELS = Scenario((2, 2), calls=2)

NOTIFY_PEER = "            notify(arrived(theirs, parity, source_rank, chunk, signals, SIZE), epoch)\n"
COMPUTE_WAITS = "signals, SIZE), epoch, COMPUTE"
INTRA_WAITS = "signals, SIZE), epoch,\n                INTRA"
COMMON_SIGNALS = [
    (OP, "(parity * SIZE + source)", "(parity * 0 + source)"),
    (OP, "(parity * SIZE + rank)", "(parity * 0 + rank)"),
]

BROKEN = {
    # rule 1: signals grow, and are waited for with the epoch
    "an arrival is not signalled": Broken(
        NODE,
        [(OP, NOTIFY_PEER, f"            if chunk != 1:\n    {NOTIFY_PEER}")],
        mk.CommTimeout,
        {"signal": "arrived", "index": 1, "role": "compute"},
    ),
    "an arrival over the network is signalled with an old epoch": Broken(
        NETWORK,
        [(OP, "signal, epoch, SEND)", "signal, epoch - 1, SEND)")],
        mk.CommTimeout,
        {"signal": "arrived", "role": "compute", "seen": 0, "expected": 1},
    ),
    "an entry is not announced in the node": Broken(
        NODE,
        [("entries", "notify(segment_of(context, peer, tl.int64) + rank, epoch)", "pass")],
        mk.CommTimeout,
        {"signal": "entered", "role": "intra", "seen": 0, "expected": 1},
    ),
    "an entry is not announced to other nodes": Broken(
        NETWORK,
        [("entries", "post(context, peer, segment, 0, segment, 0, 0, rank * 8, epoch, SEND)", "pass")],
        mk.CommTimeout,
        {"signal": "entered", "role": "send", "seen": 0, "expected": 1},
    ),
    "compute waits for the epoch before": Broken(
        NODE, [(OP, COMPUTE_WAITS, COMPUTE_WAITS.replace("epoch", "epoch - 1"))]
    ),
    "compute waits for the last use of the half": Broken(
        NETWORK, [(OP, COMPUTE_WAITS, COMPUTE_WAITS.replace("epoch", "epoch - 2"))]
    ),
    "intra passes rows on before they are here": Broken(
        TWO_LEVELS, [(OP, INTRA_WAITS, INTRA_WAITS.replace("epoch", "epoch - 2"))]
    ),
    "the epoch does not advance": Broken(NODE, [("signals", "state + EPOCH, epoch,", "state + EPOCH, epoch - 1,")]),
    # rule 2: data first, then signal
    "a signal before its data": Broken(
        NODE,
        [
            (
                OP,
                "        source = a + row.to(tl.int64) * a_stride\n",
                "        for i in range(1, GPUS):\n"
                "            early = segment_of(context, base + (local + i) % GPUS, tl.int64)\n"
                "            notify(arrived(early, parity, source_rank, chunk, signals, SIZE), epoch)\n"
                "        source = a + row.to(tl.int64) * a_stride\n",
            )
        ],
    ),
    "a request before its words": Broken(
        NETWORK,
        [
            (
                "requests",
                "        tl.store(request + PEER_AND_SEGMENTS, addressee)\n",
                "        notify(request + TURN, ticket // capacity + 1)\n"
                "        tl.store(request + PEER_AND_SEGMENTS, addressee)\n",
            )
        ],
        ANY,
    ),
    "a request before its rows are staged": Broken(
        NETWORK,
        [
            (
                OP,
                "            source = offset * element\n",
                "            source = offset * element\n"
                "            early = (SIZE + (parity * SIZE + rank).to(tl.int64) * chunks + chunk) * 8\n"
                "            size = rows * k * element\n"
                "            for i in range(1, SIZE // GPUS):\n"
                "                peer = (rank + i * GPUS) % SIZE\n"
                "                post(context, peer, segment, source, segment, source, size, early, epoch, SEND)\n",
            )
        ],
    ),
    "no release": Broken(NODE, RELAXED_NOTIFY),
    "no release before the network": Broken(NETWORK, RELAXED_NOTIFY, ANY),
    "no barrier before the release": Broken(NODE, NO_BARRIER),
    "no barrier before the network": Broken(NETWORK, NO_BARRIER, ANY),
    "no acquire": Broken(NODE, RELAXED_WAIT),
    "no acquire of what came over the network": Broken(NETWORK, RELAXED_WAIT),
    "no acquire of what is passed on": Broken(TWO_LEVELS, RELAXED_WAIT),
    "no fence for descriptors": Broken(NODE, [(OP, "    acquire_for_descriptors()\n", "    pass\n")]),
    # rule 3: buffers are reused when their readers are done. All ranks with n > 0 need everybody's rows, which
    # keeps them in step already; a rank with n = 0 is held back by the entries alone
    "one half for all epochs": Broken(
        Scenario((1, 2), calls=6, slow=1),
        [(OP, "parity = (epoch % 2).to(tl.int32)", "parity = (epoch % 2 * 0).to(tl.int32)")],
    ),
    "a is given back before the network has read it": Broken(
        Scenario((2, 1), heap=True), [(OP, "wait_sent(context, ticket, SEND)", "pass")]
    ),
    "a slot of the ring is reused before it was taken": Broken(
        Scenario((2, 1), ring=2, chunk_rows=1),
        [("requests", "    if ticket >= free:\n", "    if ticket < 0:\n"),
         ("requests", "(ticket < free) & (not leave)", "not leave")],
        ANY,
    ),
    # rule 4: no CTA waits for a later one
    "roles from the last CTA to the first": Broken(
        Scenario((1, 2), resident=1),
        [(OP, "    cta = tl.program_id(0)\n", "    cta = tl.num_programs(0) - 1 - tl.program_id(0)\n")],
        mk.CommTimeout,
        {"signal": "arrived", "role": "compute"},
    ),
    # rule 5: the network promises no order
    "one set of arrival signals for all epochs": Broken(
        Scenario((3, 1), calls=8, slow=0, chunk_rows=12), COMMON_SIGNALS
    ),
    # memory
    "a tile is stored beyond out": Broken(
        NODE, [("gemm", "mask=(i < rows) & (j < columns)\n", "mask=j < columns\n")], mk.SimulatorError
    ),
    "a signal beyond the workspace": Broken(
        NODE, [(OP, "return segment + SIZE + (parity", "return segment + (1 << 40) + (parity")], mk.SimulatorError
    ),
    "a request beyond the workspace": Broken(
        NETWORK, [(OP, "size = ((rows - 1)", "size = ((rows + 9999)")], mk.SimulatorError
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_broken(name, tmp_path):
    assert_caught(BROKEN[name], tmp_path)


def test_an_unbroken_copy_passes(tmp_path):
    """Copying alone breaks nothing."""
    module = mutated(tmp_path, Scenario.op)
    assert module.all_gather_matmul is not mk.all_gather_matmul
    for scenario in (NODE, NETWORK, TWO_LEVELS):
        scenario.run(module, seed=0)


def test_a_replacement_must_fit(tmp_path):
    with pytest.raises(AssertionError, match="does not contain"):
        mutated(tmp_path, Scenario.op, ("signals", "no such text", ""))


@pytest.mark.parametrize("ring", [1, 2, 4])
@pytest.mark.parametrize("cluster", [(2, 1), (3, 1), (2, 2)])
def test_a_full_ring_is_waited_for(cluster, ring):
    Scenario(cluster, ring=ring, chunk_rows=2).run_unbroken(seed=ring)


# -- peers that never come


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("cluster", "dead"), [((1, 2), 0), ((1, 2), 1), ((1, 3), 1), ((2, 1), 0), ((2, 1), 1), ((2, 2), 0), ((2, 2), 3)]
)
def test_a_dead_peer(cluster, dead, seed):
    """Rule 6: all others find out, with a record, and go on without it."""
    case = Case(9, 5, 8)

    def work(group):
        call(group, case)
        if group.rank == dead:
            return None
        with pytest.raises(mk.CommTimeout) as caught:
            call(group, case, 1)
        survivors = [rank for rank in range(group.size) if rank != dead]
        part = group.subset(survivors)
        for turn in range(2):
            call(part, case, turn)
        return caught.value

    failures = [failure for failure in run(work, cluster=cluster, seed=seed) if failure is not None]
    assert len(failures) == cluster[0] * cluster[1] - 1
    for failure in failures:
        assert failure.record.op == Scenario.op
        assert failure.record.peer != failure.record.rank
        assert failure.record.signal in ("arrived", "entered")
        assert failure.record.seen < failure.record.expected == (1 if failure.record.signal == "entered" else 2)
    assert any(failure.is_cause for failure in failures)
    assert any(record.peer == dead for failure in failures for record in failure.records)


def test_a_peer_that_is_dead_from_the_start():
    """The first call of a shape is made together, so the wait ends on the host."""

    def work(group):
        if group.rank == 1:
            return None
        with pytest.raises(mk.CommTimeout) as caught:
            call(group, Case(9, 5, 8))
        call(group.subset([0, 2]), Case(9, 5, 8))
        return caught.value.record

    first, _, third = run(work, cluster=(1, 3))
    for record in (first, third):
        assert (record.op, record.signal, record.peer, record.timed_out) == (Scenario.op, "call", 1, True)


def test_what_could_not_be_computed_is_nan():
    case = Case(9, 5, 8)

    def work(group):
        call(group, case)
        if group.rank == 1:
            return None
        canary = Canary(2 * case.m, 5, case.dtype)
        with pytest.raises(mk.CommTimeout):
            call(group, case, out=canary.tensor)
        canary.check()
        return canary.tensor

    y = run(work, cluster=(1, 2))[0]
    assert_product(y[: case.m], case.rows(0), case.weights(0))
    assert torch.isnan(y[case.m :]).all()


def test_other_groups_are_not_touched_by_a_dead_peer():
    case = Case(9, 5, 8)

    def work(group):
        part = group.split(group.rank // 2)
        call(group, case)
        call(part, case)
        if group.rank != 3:
            with pytest.raises(mk.CommTimeout):
                call(group, case, 1)
        if group.rank < 2:
            call(part, case, 1)

    run(work, cluster=(1, 4))
