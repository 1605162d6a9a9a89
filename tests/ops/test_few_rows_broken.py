"""The kernels for few rows with every rule of synchronisation broken on purpose. Then peers that never come."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from support import operator_calls, reduce_reference
from support.broken_gathers import notify_all_but_one
from support.broken_variants import (
    EPOCH_STAYS,
    NO_BARRIER,
    NO_FENCE_FOR_DESCRIPTORS,
    ONE_HALF,
    ONE_HALF_OF_SLOTS,
    RELAXED_NOTIFY,
    Broken,
    assert_caught,
    slot_far_away,
    store_tall_tile,
    word_far_away,
)
from support.operator_calls import Canary, Case, run
from support.reduce_reference import Sum
from support.scenarios import SCATTER, FewRows, Gathers

import mkernel as mk
from mkernel.lang import gemm, layout, signals, team
from mkernel.lang.context import EPOCH, Comm, rank_of, state_of
from mkernel.lang.roles import COMPUTE
from mkernel.lang.signals import PARTIAL_SUM, wait_all
from mkernel.lang.team import _add_rows, _multiply_part, notify_team
from mkernel.ops.all_gather_matmul import few_rows as gathering
from mkernel.ops.all_gather_matmul import protocol, transfer
from mkernel.ops.all_gather_matmul.few_rows import wait_gathered
from mkernel.ops.all_gather_matmul.protocol import notify_chunk
from mkernel.ops.all_gather_matmul.transfer import copy_chunk
from mkernel.ops.reduce import few_rows as summing
from mkernel.ops.reduce.few_rows import notify_owners, push_unit

GATHER = Gathers.op
ALONE = FewRows((1, 1), GATHER)
SUM_ALONE = FewRows((1, 1), "matmul_all_reduce")
ROWS = FewRows((1, 2), GATHER, team=1)
UNITS = FewRows((1, 2), SCATTER)
THREE = FewRows((1, 3), SCATTER, team=1)


# -- teams


@triton.jit
def multiply_after_signal(comm, a, b, tile, k, tiling, team, worker):
    notify_team(comm, team, worker)
    partial = _multiply_part(a, b, tile, k, tiling, worker % team.SIZE, team.SIZE)
    i = tl.arange(0, tiling.M)[:, None]
    j = tl.arange(0, tiling.N)[None, :]
    inside = (tile.row + i < tile.rows) & (tile.column + j < tile.columns)
    tl.store(team.sums + worker * (tiling.M * tiling.N) + i * tiling.N + j, partial, mask=inside)
    wait_all(
        comm.context, team.ready + worker // team.SIZE * team.SIZE + tl.arange(0, team.SIZE),
        tl.arange(0, team.SIZE) < team.SIZE, comm.epoch, COMPUTE, PARTIAL_SUM, -1, worker,
    )  # fmt: skip
    return _add_rows(team, tile, worker, tiling)


@triton.jit
def forget_team(comm, team, worker):
    pass


@triton.jit
def notify_team_relaxed(comm, team, worker):
    tl.debug_barrier()
    tl.atomic_xchg(team.ready + worker, comm.epoch, sem="relaxed", scope="gpu")


@triton.jit
def notify_team_without_barrier(comm, team, worker):
    tl.atomic_xchg(team.ready + worker, comm.epoch, sem="release", scope="gpu")


@triton.jit
def notify_next_team(comm, team, worker):
    notify_team(comm, team, (worker + team.SIZE) % tl.num_programs(0))


@triton.jit
def wait_for_no_team(comm, team, worker):
    return True


@triton.jit
def wait_for_team_of_epoch_before(comm, team, worker):
    member = tl.arange(0, team.SIZE)
    words = team.ready + worker // team.SIZE * team.SIZE + member
    return wait_all(comm.context, words, member < team.SIZE, comm.epoch - 1, COMPUTE, PARTIAL_SUM, -1, worker)


@triton.jit
def wait_for_first_member(comm, team, worker):
    member = tl.arange(0, team.SIZE)
    words = team.ready + worker // team.SIZE * team.SIZE + member
    return wait_all(comm.context, words, member < 1, comm.epoch, COMPUTE, PARTIAL_SUM, -1, worker)


@triton.jit
def poll_each_relaxed(signals, mask, SCOPE: tl.constexpr):
    return tl.atomic_add(signals, 0, mask=mask, sem="relaxed", scope=SCOPE)


@triton.jit
def share_nothing():
    pass


@triton.jit
def first_row_of_next(team, worker, M: tl.constexpr):
    return (worker + 1) % team.SIZE * (M // team.SIZE)


# -- epochs


@triton.jit
def finish_own_word_only(context, epoch, WORLD_SIZE: tl.constexpr):
    tl.debug_barrier()
    tl.store(state_of(context) + EPOCH + tl.program_id(0), epoch)


@triton.jit
def finish_first_word_only(context, epoch, WORLD_SIZE: tl.constexpr):
    tl.debug_barrier()
    tl.store(state_of(context) + EPOCH, epoch)


# -- gathered rows


@triton.jit
def notify_own_rows_before_copy(comm, call, chunk, origin, peers):
    notify_chunk(comm, call.gather, rank_of(comm.context), chunk.source, chunk.index)
    copy_chunk(comm, call, chunk, origin, peers)


@triton.jit
def notify_peers_before_copy(comm, call, chunk, origin, peers):
    peer = (rank_of(comm.context) + 1) % comm.WORLD_SIZE
    notify_chunk(comm, call.gather, peer, chunk.source, chunk.index)
    copy_chunk(comm, call, chunk, origin, peers)


@triton.jit
def wait_for_no_rows(comm, gather, row, ROWS: tl.constexpr):
    return True


@triton.jit
def wait_for_first_row(comm, gather, row, ROWS: tl.constexpr):
    return wait_gathered(comm, gather, row, 1)


@triton.jit
def wait_for_rows_of_last_use(comm, gather, row, ROWS: tl.constexpr):
    return wait_gathered(
        Comm(comm.context, comm.epoch - 2, comm.WORLD_SIZE, comm.RANKS_PER_NODE), gather, row, ROWS
    )  # fmt: skip


# -- units of sums


@triton.jit
def forget_owners(comm, call, row, unit, ROWS: tl.constexpr):
    pass


@triton.jit
def notify_owner_of_first_row(comm, call, row, unit, ROWS: tl.constexpr):
    notify_owners(comm, call, row, unit, 1)


@triton.jit
def notify_before_push(comm, call, total, row, column, unit):
    notify_owners(comm, call, row, unit, total.shape[0])
    push_unit(comm, call, total, row, column, unit)


@triton.jit
def push_to_next_slot(comm, call, total, row, column, unit):
    push_unit(comm, call, total, row, column, unit ^ 1)


@triton.jit
def push_nothing(comm, call, total, row, column, unit):
    pass


@triton.jit
def wait_for_no_units(comm, call, unit):
    return True


@triton.jit
def wait_for_units_of_last_use(comm, call, unit):
    return summing.wait_units(
        Comm(comm.context, comm.epoch - 2, comm.WORLD_SIZE, comm.RANKS_PER_NODE), call, unit
    )  # fmt: skip


@triton.jit
def store_all_rows(result, total, i, j, inside):
    target = result.c.data + i.to(tl.int64) * result.c.strides.row + j.to(tl.int64) * result.c.strides.column
    tl.store(target, total.to(result.c.data.dtype.element_ty), mask=j < 5)


BROKEN = {
    # teams
    "a team is notified before the partial sum is stored": Broken(
        ALONE, {team.multiply_in_team: multiply_after_signal}
    ),
    "a member does not notify its team": Broken(
        ALONE, {team.notify_team: forget_team}, mk.CommTimeout, {"signal": "partial sum", "role": "compute"}
    ),
    "a team is notified without a release": Broken(ALONE, {team.notify_team: notify_team_relaxed}),
    "no wait for the team": Broken(ALONE, {team.wait_team: wait_for_no_team}),
    "a team is waited for with the epoch before": Broken(ALONE, {team.wait_team: wait_for_team_of_epoch_before}),
    "only the first member is waited for": Broken(
        FewRows((1, 1), GATHER, team=4), {team.wait_team: wait_for_first_member}
    ),
    "no acquire of partial sums": Broken(ALONE, {signals.poll_each: poll_each_relaxed}),
    # epochs
    "the epoch does not advance for CTAs that a launch does not have": Broken(
        FewRows((1, 1), GATHER, columns=(5, 20), calls=2), {signals.finish: finish_own_word_only}
    ),
    "the epoch does not advance for such CTAs in several launches": Broken(
        FewRows((1, 1), GATHER, columns=(20, 5, 5, 20), calls=4), {signals.finish: finish_own_word_only}
    ),
    # gathered rows
    "an own row is pushed after its signal": Broken(ROWS, {transfer.copy_chunk: notify_own_rows_before_copy}),
    "a chunk is not signalled": Broken(
        FewRows((1, 2), GATHER, rows=20), {protocol.notify_chunk: notify_all_but_one}, mk.CommTimeout,
        {"signal": "arrived", "role": "compute"},
    ),
    "no wait for gathered rows": Broken(ROWS, {gathering.wait_gathered: wait_for_no_rows}),
    "no fence for descriptors": Broken(ROWS, NO_FENCE_FOR_DESCRIPTORS),
    # units of sums
    "owners are not signalled": Broken(
        UNITS, {summing.notify_owners: forget_owners}, mk.CommTimeout, {"signal": "partial", "role": "compute"}
    ),
    "only the owner of the first row is signalled": Broken(
        THREE, {summing.notify_owners: notify_owner_of_first_row}, mk.CommTimeout, {"signal": "partial"}
    ),
    "owners are signalled before the push": Broken(UNITS, {summing.push_unit: notify_before_push}),
    "a unit is pushed to the slot of another one": Broken(
        FewRows((1, 2), SCATTER, rows=8), {summing.push_unit: push_to_next_slot}
    ),
    "partials are added before they arrive": Broken(UNITS, {summing.wait_units: wait_for_no_units}),
    # memory
    "a tile is stored beyond out": Broken(ALONE, {gemm.store_tile: store_tall_tile}, mk.SimulatorError),
    "rows of other ranks are stored": Broken(UNITS, {summing._store_unit: store_all_rows}, mk.SimulatorError),
}  # fmt: skip
MORE_BROKEN = {
    # teams
    "a member notifies another team": Broken(ALONE, {team.notify_team: notify_next_team}),
    "a team is notified without a barrier": Broken(ALONE, {team.notify_team: notify_team_without_barrier}),
    "no wait for the team, in a sum": Broken(SUM_ALONE, {team.wait_team: wait_for_no_team}),
    "no barrier after the wait for the team": Broken(ALONE, {signals.share_acquired: share_nothing}),
    "members store each other's rows": Broken(
        FewRows((1, 1), GATHER, rows=16), {team.first_row_in_team: first_row_of_next}, AssertionError
    ),
    # epochs
    "the epoch does not advance": Broken(ALONE, EPOCH_STAYS),
    "the epoch advances for the first CTA only": Broken(ALONE, {signals.finish: finish_first_word_only}),
    "the epoch of a sum does not advance for CTAs that a launch does not have": Broken(
        FewRows((1, 2), SCATTER, columns=(20, 5), calls=3), {signals.finish: finish_own_word_only}
    ),
    # gathered rows
    "a row is pushed after its signal": Broken(ROWS, {transfer.copy_chunk: notify_peers_before_copy}),
    "only the first row of a tile is waited for": Broken(ROWS, {gathering.wait_gathered: wait_for_first_row}),
    "rows of the last use of the half are waited for": Broken(
        ROWS, {gathering.wait_gathered: wait_for_rows_of_last_use}
    ),
    "no release of rows": Broken(ROWS, RELAXED_NOTIFY),
    "no barrier before the release of rows": Broken(ROWS, NO_BARRIER),
    "no acquire of rows": Broken(ROWS, {signals.poll_each: poll_each_relaxed}),
    "one half for all epochs of rows": Broken(FewRows((1, 2), GATHER, calls=3), ONE_HALF),
    # units of sums
    "a unit is not pushed": Broken(UNITS, {summing.push_unit: push_nothing}),
    "partials of the last use of the half are waited for": Broken(
        UNITS, {summing.wait_units: wait_for_units_of_last_use}
    ),
    "no acquire of partials": Broken(THREE, {signals.poll_each: poll_each_relaxed}),
    "one half for all epochs of partials": Broken(FewRows((1, 2), SCATTER, calls=3), ONE_HALF_OF_SLOTS),
    # memory
    "a signal beyond the workspace": Broken(ROWS, {layout.word_of: word_far_away}, mk.SimulatorError),
    "a unit beyond the workspace": Broken(UNITS, {layout.slot_of: slot_far_away}, mk.SimulatorError),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_broken(name):
    assert_caught(BROKEN[name])


@pytest.mark.parametrize("name", MORE_BROKEN)
@pytest.mark.thorough
def test_more_broken(name):
    assert_caught(MORE_BROKEN[name])


# -- peers that never come


def call(group, op, turn=0, **arguments):
    """A call with 3 rows of each of three ranks, in two tiles by teams of two CTAs."""
    arguments = dict(config=mk.Config(tile_m=16, tile_n=16, tile_k=16, team_ctas=2)) | arguments
    if op == GATHER:
        return operator_calls.call(group, Case(3, 20, 40), turn, **arguments)
    return reduce_reference.call(group, op, Sum(6 * group.size, 20, 40), turn, **arguments)


@pytest.mark.parametrize(
    ("ranks", "dead"), [(3, 1), *(pytest.param(*each, marks=pytest.mark.thorough) for each in ((2, 0), (2, 1), (3, 0)))]
)
@pytest.mark.parametrize("op", [GATHER, SCATTER])
def test_a_dead_peer(op, ranks, dead):
    """All others find out, with a record, and go on without it."""

    def work(group):
        call(group, op)
        if group.rank == dead:
            return None
        with pytest.raises(mk.CommTimeout) as caught:
            call(group, op, 1)
        part = group.subset([rank for rank in range(group.size) if rank != dead])
        for turn in range(2):
            call(part, op, turn)
        return caught.value

    failures = [failure for failure in run(work, cluster=(1, ranks), slow={ranks - 1: 1e-3}) if failure is not None]
    assert len(failures) == ranks - 1
    for failure in failures:
        assert failure.record.op == op
        if failure.record.signal != "nothing":
            assert failure.record.signal == ("arrived" if op == GATHER else "partial")
            assert failure.record.peer == dead
            assert failure.record.seen < failure.record.expected == 2
    assert any(failure.is_cause for failure in failures)
    assert any(f"rank {dead}" in str(failure) for failure in failures)


@pytest.mark.parametrize("op", [GATHER, SCATTER])
@pytest.mark.thorough
def test_what_could_not_be_computed_is_nan(op):
    """The rows of a tile come from all ranks, and so do the terms of a sum."""

    def work(group):
        call(group, op)
        if group.rank == 1:
            return None
        canary = Canary(6, 20, torch.float32)
        with pytest.raises(mk.CommTimeout):
            call(group, op, 1, out=canary.tensor)
        canary.check()
        return canary.tensor

    assert torch.isnan(run(work, cluster=(1, 2))[0]).all()


@pytest.mark.parametrize("op", [GATHER, SCATTER])
@pytest.mark.parametrize(("dead", "slow"), [(0, 2), (1, 0)])
@pytest.mark.thorough
def test_nobody_is_deceived(op, dead, slow):
    """A rank that is late takes what those that have given up handed on: it must raise, or be right."""

    def work(group):
        call(group, op)
        if group.rank == dead:
            return "dead"
        try:
            call(group, op, 1)  # which checks its result
        except mk.CommTimeout:
            return "raised"
        return "right"

    outcomes = run(work, cluster=(1, 3), slow={slow: 1e-4})
    assert "raised" in outcomes
