"""all_gather_matmul with every rule of synchronisation broken on purpose. Then peers that never come."""

from __future__ import annotations

import pytest
import torch
import triton
from support.broken_gathers import (
    notify_all_but_one,
    notify_before_copy,
    post_before_copy,
    post_too_much,
    post_with_old_epoch,
    turn_before_words,
    wait_for_epoch_before,
    wait_for_last_use,
    wait_for_no_transfer,
    wait_in_compute_only,
)
from support.broken_variants import (
    EPOCH_STAYS,
    NO_BARRIER,
    NO_FENCE_FOR_DESCRIPTORS,
    ONE_HALF,
    ONE_HALF_OF_SIGNALS,
    RELAXED_NOTIFY,
    RELAXED_WAIT,
    Broken,
    assert_caught,
    number_from_the_end,
    store_tall_tile,
    take_slot_at_once,
    word_far_away,
)
from support.operator_calls import Canary, Case, assert_product, call, run
from support.scenarios import Gathers

import mkernel as mk
from mkernel.lang import gemm, layout, requests, roles
from mkernel.ops.all_gather_matmul import kernel, protocol, transfer

NODE = Gathers((1, 2))
NETWORK = Gathers((2, 1))
TWO_LEVELS = Gathers((2, 2))
NO_COLUMNS = dict(calls=3, n=(0, 5))


@triton.jit
def gather_nothing(comm, call, worker, workers):
    pass


BROKEN = {
    # rule 1: signals grow, and are waited for with the epoch
    "an arrival is not signalled": Broken(
        NODE,
        {protocol.notify_chunk: notify_all_but_one},
        mk.CommTimeout,
        {"signal": "arrived", "index": 1, "role": "compute"},
    ),
    "an arrival over the network is signalled with an old epoch": Broken(
        NETWORK,
        {protocol.post_chunk: post_with_old_epoch},
        mk.CommTimeout,
        {"signal": "arrived", "role": "compute", "seen": 0, "expected": 1},
    ),
    "compute waits for the epoch before": Broken(NODE, {protocol.wait_chunk: wait_for_epoch_before}),
    "compute waits for the last use of the half": Broken(NETWORK, {protocol.wait_chunk: wait_for_last_use}),
    "intra passes rows on before they are here": Broken(TWO_LEVELS, {protocol.wait_chunk: wait_in_compute_only}),
    "the epoch does not advance": Broken(NODE, EPOCH_STAYS),
    # rule 2: data first, then signal
    "a signal before its data": Broken(NODE, {transfer.copy_chunk: notify_before_copy}),
    "a request before its words": Broken(NETWORK, {requests.write_request: turn_before_words}),
    "a request before its rows are staged": Broken(NETWORK, {transfer.copy_chunk: post_before_copy}),
    "no release": Broken(NODE, RELAXED_NOTIFY),
    "no release before the network": Broken(NETWORK, RELAXED_NOTIFY),
    "no barrier before the release": Broken(NODE, NO_BARRIER),
    "no barrier before the network": Broken(NETWORK, NO_BARRIER),
    "no acquire": Broken(NODE, RELAXED_WAIT),
    "no acquire of what came over the network": Broken(NETWORK, RELAXED_WAIT),
    "no acquire of what is passed on": Broken(TWO_LEVELS, RELAXED_WAIT),
    "no fence for descriptors": Broken(NODE, NO_FENCE_FOR_DESCRIPTORS),
    # rule 3: buffers are reused when their readers are done. Every rank needs everybody's rows, which keeps them
    # within a call of each other, also one that has nothing to compute
    "a rank with no columns does not wait for the rows of others": Broken(
        Gathers((1, 2), **NO_COLUMNS), {kernel._gather_only: gather_nothing}
    ),
    "a rank with no columns does not wait for the rows of other nodes": Broken(
        Gathers((2, 1), **NO_COLUMNS), {kernel._gather_only: gather_nothing}
    ),
    "one half for all epochs": Broken(Gathers((1, 2), calls=2), ONE_HALF),
    "a is given back before the network has read it": Broken(
        Gathers((2, 1), heap=True), {requests.wait_sent: wait_for_no_transfer}
    ),
    "a slot of the ring is reused before it was taken": Broken(
        Gathers((2, 1), ring=2, chunk_rows=1), {requests.wait_free: take_slot_at_once}
    ),
    # rule 4: no CTA waits for a later one
    "roles from the last CTA to the first": Broken(
        Gathers((1, 2), resident=1),
        {roles.this_cta: number_from_the_end},
        mk.CommTimeout,
        {"signal": "arrived", "role": "compute"},
    ),
    # rule 5: the network promises no order
    "one set of arrival signals for all epochs": Broken(
        Gathers((3, 1), calls=2, chunk_rows=12), ONE_HALF_OF_SIGNALS
    ),
    # memory
    "a tile is stored beyond out": Broken(NODE, {gemm.store_tile: store_tall_tile}, mk.SimulatorError),
    "a signal beyond the workspace": Broken(NODE, {layout.word_of: word_far_away}, mk.SimulatorError),
    "a request beyond the workspace": Broken(NETWORK, {protocol.post_chunk: post_too_much}, mk.SimulatorError),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_broken(name):
    assert_caught(BROKEN[name])


@pytest.mark.parametrize("ring", [1, 2, 4])
@pytest.mark.parametrize("cluster", [(2, 1), (3, 1), (2, 2)])
def test_a_full_ring_is_waited_for(cluster, ring):
    Gathers(cluster, ring=ring, chunk_rows=2).run(seed=ring)


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
