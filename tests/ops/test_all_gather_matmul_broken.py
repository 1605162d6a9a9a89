"""all_gather_matmul with every rule of synchronisation broken on purpose. Then peers that never come."""

from __future__ import annotations

import pytest
import torch
from broken import NO_BARRIER, RELAXED_NOTIFY, RELAXED_WAIT, Broken, assert_caught
from helpers import Canary, Case, assert_product, call, run
from mutation import OP, mutated
from scenarios import Gathers

import mkernel as mk

NODE = Gathers((1, 2))
NETWORK = Gathers((2, 1))
TWO_LEVELS = Gathers((2, 2))

KERNEL, PROTOCOL = f"{OP}/kernel", f"{OP}/protocol"
NOTIFY_PEER = "            notify_chunk(comm, gather, base +"
WAITS = "wait(comm.context, signal, comm.epoch, ROLE"
INTRA_WAITS = "wait_chunk(comm, gather, source_rank, chunk, INTRA)"
GATHER_WAITS = "                wait_rows(comm, call.gather, source, row, call.tiling.M)\n"

BROKEN = {
    # rule 1: signals grow, and are waited for with the epoch
    "an arrival is not signalled": Broken(
        NODE,
        [(KERNEL, NOTIFY_PEER, f"            if chunk != 1:\n    {NOTIFY_PEER}")],
        mk.CommTimeout,
        {"signal": "arrived", "index": 1, "role": "compute"},
    ),
    "an arrival over the network is signalled with an old epoch": Broken(
        NETWORK,
        [(KERNEL, "signal, comm.epoch, SEND", "signal, comm.epoch - 1, SEND")],
        mk.CommTimeout,
        {"signal": "arrived", "role": "compute", "seen": 0, "expected": 1},
    ),
    "compute waits for the epoch before": Broken(
        NODE, [(PROTOCOL, WAITS, WAITS.replace("epoch", "epoch - 1"))]
    ),
    "compute waits for the last use of the half": Broken(
        NETWORK, [(PROTOCOL, WAITS, WAITS.replace("epoch", "epoch - 2"))]
    ),
    "intra passes rows on before they are here": Broken(
        TWO_LEVELS, [(KERNEL, INTRA_WAITS, "pass")]
    ),
    "the epoch does not advance": Broken(NODE, [("signals", "state + EPOCH, epoch,", "state + EPOCH, epoch - 1,")]),
    # rule 2: data first, then signal
    "a signal before its data": Broken(
        NODE,
        [
            (
                KERNEL,
                "        source = call.a.data + row.to(tl.int64) * call.a.row_stride\n",
                "        for i in range(1, comm.RANKS_PER_NODE):\n"
                "            notify_chunk(comm, gather, base + (local + i) % comm.RANKS_PER_NODE, source_rank, chunk)\n"
                "        source = call.a.data + row.to(tl.int64) * call.a.row_stride\n",
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
    ),
    "a request before its rows are staged": Broken(
        NETWORK,
        [
            (
                KERNEL,
                "            source = offset * element\n",
                "            source = offset * element\n"
                "            early = word_of(gather.arrived, comm.epoch, rank, chunk) * 8\n"
                "            size = rows * gather.k * element\n"
                "            for i in range(1, comm.WORLD_SIZE // comm.RANKS_PER_NODE):\n"
                "                peer = (rank + i * comm.RANKS_PER_NODE) % comm.WORLD_SIZE\n"
                "                whole = Transfer(peer, segment, source, segment, source, size)\n"
                "                post(comm.context, whole, early, comm.epoch, SEND)\n",
            )
        ],
    ),
    "no release": Broken(NODE, RELAXED_NOTIFY),
    "no release before the network": Broken(NETWORK, RELAXED_NOTIFY),
    "no barrier before the release": Broken(NODE, NO_BARRIER),
    "no barrier before the network": Broken(NETWORK, NO_BARRIER),
    "no acquire": Broken(NODE, RELAXED_WAIT),
    "no acquire of what came over the network": Broken(NETWORK, RELAXED_WAIT),
    "no acquire of what is passed on": Broken(TWO_LEVELS, RELAXED_WAIT),
    "no fence for descriptors": Broken(NODE, [(KERNEL, "    acquire_for_descriptors()\n", "    pass\n")]),
    # rule 3: buffers are reused when their readers are done. Every rank needs everybody's rows, which keeps them
    # within a call of each other, also one that has nothing to compute
    "a rank with no columns does not wait for the rows of others": Broken(
        Gathers((1, 2), calls=3, n=(0, 5)),
        [(KERNEL, GATHER_WAITS, "")],
    ),
    "a rank with no columns does not wait for the rows of other nodes": Broken(
        Gathers((2, 1), calls=3, n=(0, 5)),
        [(KERNEL, GATHER_WAITS, "")],
    ),
    "one half for all epochs": Broken(
        Gathers((1, 2), calls=2),
        [("layout", "(epoch % 2)", "(epoch % 2 * 0)"),
         (KERNEL, "(comm.epoch % 2).to(tl.int32)", "(comm.epoch % 2 * 0).to(tl.int32)")],
    ),
    "a is given back before the network has read it": Broken(
        Gathers((2, 1), heap=True), [(KERNEL, "wait_sent(comm.context, ticket, SEND)", "pass")]
    ),
    "a slot of the ring is reused before it was taken": Broken(
        Gathers((2, 1), ring=2, chunk_rows=1),
        [("requests", "    if ticket >= free:\n", "    if ticket < 0:\n"),
         ("requests", "(ticket < free) & (not leave)", "not leave")],
    ),
    # rule 4: no CTA waits for a later one
    "roles from the last CTA to the first": Broken(
        Gathers((1, 2), resident=1),
        [(KERNEL, "    cta = tl.program_id(0)\n", "    cta = tl.num_programs(0) - 1 - tl.program_id(0)\n")],
        mk.CommTimeout,
        {"signal": "arrived", "role": "compute"},
    ),
    # rule 5: the network promises no order
    "one set of arrival signals for all epochs": Broken(
        Gathers((3, 1), calls=2, chunk_rows=12), [("layout", "(epoch % 2) * words.half", "0")]
    ),
    # memory
    "a tile is stored beyond out": Broken(
        NODE, [("gemm", "mask=(i < tile.rows) & (j < tile.columns)", "mask=j < tile.columns")], mk.SimulatorError
    ),
    "a signal beyond the workspace": Broken(
        NODE, [("layout", "return words.start +", "return words.start + (1 << 40) +")], mk.SimulatorError
    ),
    "a request beyond the workspace": Broken(
        NETWORK, [(KERNEL, "size = ((rows - 1)", "size = ((rows + 9999)")], mk.SimulatorError
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_broken(name, tmp_path):
    assert_caught(BROKEN[name], tmp_path)


def test_an_unbroken_copy_passes(tmp_path):
    """Copying alone breaks nothing."""
    module = mutated(tmp_path, Gathers.op)
    assert module.all_gather_matmul is not mk.all_gather_matmul
    for scenario in (NODE, NETWORK, TWO_LEVELS):
        scenario.run(module, seed=0)


def test_a_replacement_must_fit(tmp_path):
    with pytest.raises(AssertionError, match="does not contain"):
        mutated(tmp_path, Gathers.op, ("signals", "no such text", ""))


@pytest.mark.parametrize("ring", [1, 2, 4])
@pytest.mark.parametrize("cluster", [(2, 1), (3, 1), (2, 2)])
def test_a_full_ring_is_waited_for(cluster, ring):
    Gathers(cluster, ring=ring, chunk_rows=2).run_unbroken(seed=ring)


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
        record = failure.record
        assert record.op == Gathers.op
        assert record.peer != record.rank
        if record.signal == "nothing":  # it was handed what others never got, and found that they had given up
            assert not failure.is_cause
        else:
            assert record.signal == "arrived"
            assert record.seen < record.expected == 2
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
        assert (record.op, record.signal, record.peer, record.timed_out) == (Gathers.op, "call", 1, True)


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
