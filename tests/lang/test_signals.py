"""Signals: data first, then signal; every wait ends, and what was waited for is written down."""

import pytest
import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

import mkernel as mk
from mkernel import operators
from mkernel.lang import context as words
from mkernel.lang import roles, signals
from mkernel.lang.context import current_epoch, rank_of, segment_of
from mkernel.lang.roles import COMPUTE, INTRA
from mkernel.lang.signals import ARRIVED, finish, notify, notify_each, wait, wait_peers
from mkernel.ops.attention import kinds as attention_kinds
from mkernel.ops.moe import kinds as moe_kinds
from mkernel.ops.reduce import kinds as reduce_kinds
from mkernel.runtime import records

from .harness import SOON, launch, simulate, workspace_of

BLOCK = tl.constexpr(16)


@triton.jit
def pass_on(context, data_start, out):
    """Rank r writes a block to rank r+1 and signals it; everybody waits for its own and copies it out."""
    rank = rank_of(context)
    size = tl.load(context + words.SIZE_WORD).to(tl.int32)
    epoch = current_epoch(context)
    peer = (rank + 1) % size
    place = tl.arange(0, BLOCK)
    tl.store(segment_of(context, peer, tl.int64) + data_start + place, place + 100 * rank + 1000 * epoch)
    notify(segment_of(context, peer, tl.int64) + rank, epoch)
    before = (rank + size - 1) % size
    mine = segment_of(context, rank, tl.int64)
    there = wait(context, mine + before, epoch, COMPUTE, ARRIVED, before, 0)
    tl.store(out + place, tl.load(mine + data_start + place))
    tl.store(out + BLOCK, there.to(tl.int64))
    finish(context, epoch, 2)


@pytest.mark.parametrize("seed", range(4))
def test_data_is_there_when_the_signal_is(seed):
    def rank(group):
        workspace = workspace_of(group)
        out = torch.zeros(BLOCK.value + 1, dtype=torch.int64)
        launch(group, workspace, pass_on, data_start=workspace.data_start // 8, out=out)
        return out.tolist()

    for number, out in enumerate(simulate(rank, gpus=3, seed=seed)):
        before = (number - 1) % 3
        assert out == [place + 100 * before + 1000 for place in range(BLOCK.value)] + [1]


@triton.jit
def tell_everybody(context, data_start, out, RANKS: tl.constexpr):
    """Every rank writes a word to every other one, signals all of them at once, and waits likewise."""
    rank = rank_of(context)
    epoch = current_epoch(context)
    i = tl.arange(0, RANKS)
    mates = tl.load(context + words.TABLE + i).to(tl.pointer_type(tl.int64))
    for peer in range(RANKS):
        tl.store(segment_of(context, peer, tl.int64) + data_start + rank, epoch * 10 + rank)
    notify_each(mates + rank, epoch, i != rank)
    mine = segment_of(context, rank, tl.int64)
    there = wait_peers(context, mine + i, i != rank, epoch, COMPUTE, ARRIVED, i, 7)
    tl.store(out + i, tl.load(mine + data_start + i, mask=i != rank, other=0))
    tl.store(out + RANKS, there.to(tl.int64))
    finish(context, epoch, 2)


def tell(group):
    workspace = workspace_of(group)
    out = torch.zeros(group.size + 1, dtype=torch.int64)
    arguments = dict(data_start=workspace.data_start // 8, out=out, RANKS=group.size)
    launch(group, workspace, tell_everybody, **arguments)
    return out.tolist()


@pytest.mark.parametrize("seed", range(4))
def test_data_of_all_peers_is_there_when_their_signals_are(seed):
    for rank, out in enumerate(simulate(tell, gpus=4, seed=seed)):
        assert out == [10 + peer if peer != rank else 0 for peer in range(4)] + [1]


def test_who_of_several_peers_did_not_come_is_written_down():
    def rank(group):
        workspace_of(group)
        if group.rank == 1:
            return None  # it never comes
        with pytest.raises(mk.CommTimeout) as failure:
            tell(group)
        return failure.value.records

    for number, found in enumerate(simulate(rank, gpus=4, timeout=SOON)):
        if number != 1:
            assert {(record.peer, record.index, record.seen, record.expected) for record in found} == {(1, 7, 0, 1)}


def test_signals_hold_the_epoch_and_only_grow():
    def rank(group):
        workspace = workspace_of(group)
        out = torch.zeros(BLOCK.value + 1, dtype=torch.int64)
        seen = []
        for _ in range(5):
            launch(group, workspace, pass_on, data_start=workspace.data_start // 8, out=out)
            group.barrier()  # the data has one place only
            signal = workspace.segment.memory.view(torch.int64)[(group.rank - 1) % group.size]
            seen.append((int(signal), int(out[0]) // 1000, int(workspace.state[words.EPOCH.value])))
            group.barrier()
        return seen

    for seen in simulate(rank, gpus=2, seed=3):
        assert seen == [(epoch, epoch, epoch) for epoch in range(1, 6)]


@triton.jit
def wait_for(context, index, expected, out, ROLE: tl.constexpr, KIND: tl.constexpr, peer, number):
    mine = segment_of(context, rank_of(context), tl.int64)
    there = wait(context, mine + index, expected, ROLE, KIND, peer, number)
    tl.store(out, there.to(tl.int64))


@pytest.mark.parametrize(("signal", "expected"), [(5, 5), (6, 5), (5, -1), (1 << 40, (1 << 40) - 1)])
def test_a_signal_that_is_large_enough_is_not_waited_for(signal, expected):
    def rank(group):
        workspace = workspace_of(group)
        workspace.segment.memory.view(torch.int64)[3] = signal
        out = torch.zeros(1, dtype=torch.int64)
        # also when the group has given up already
        group._control.memory.view(torch.int64)[0] = 1
        launch(group, workspace, wait_for, index=3, expected=expected, out=out, ROLE=2, KIND=1, peer=0, number=0)
        return int(out), group.world.scheduler.clock

    (found, clock), (again, _) = simulate(rank, gpus=2)
    assert (found, again) == (1, 1)
    assert clock == simulate(lambda group: group.world.scheduler.clock)[0], "time went by"


@pytest.mark.parametrize(
    ("role", "kind", "expected"),
    [
        (roles.SEND, signals.ENTERED, 4),
        (roles.INTRA, signals.ARRIVED, 1 << 40),
        (roles.COMPUTE, signals.RING_SPACE, 4),
        (roles.COMPUTE, signals.SENT, 4),
    ],
)
def test_a_timeout_is_written_down(role, kind, expected):
    def rank(group):
        workspace = workspace_of(group)
        workspace.segment.memory.view(torch.int64)[7] = 3
        out = torch.full((1,), -1, dtype=torch.int64)
        arguments = dict(index=7, expected=expected, out=out, ROLE=role, KIND=kind, peer=11, number=13)
        with pytest.raises(mk.CommTimeout) as caught:
            launch(group, workspace, wait_for, grid=1, **arguments)
        return int(out), caught.value, group._control.memory.view(torch.int64)[0].item()

    ((found, error, flag),) = simulate(rank, timeout=SOON)
    assert found == 0
    assert flag == 1
    record = error.record
    assert error.records == (record,)
    assert record.timed_out
    assert record.op == "all_gather_matmul"
    assert record.rank == 0
    assert record.role == records.ROLES[role.value]
    assert record.cta == 0
    assert record.signal == records.signal_name(record.op, kind.value)
    assert (record.peer, record.index, record.seen, record.expected) == (11, 13, 3, expected)
    assert SOON < record.seconds < 100 * SOON
    assert str(record) in str(error)


@triton.jit
def wait_as(context, expected, ROLE: tl.constexpr):
    cta = tl.program_id(0)
    wait(context, segment_of(context, rank_of(context), tl.int64) + cta, expected, ROLE, ARRIVED, 0, 0)


@triton.jit
def wait_in_every_cta(context, expected):
    cta = tl.program_id(0)
    mine = segment_of(context, rank_of(context), tl.int64)
    wait(context, mine + cta, expected, COMPUTE, ARRIVED, 100 + cta, 200 + cta)


@pytest.mark.parametrize("seed", range(4))
def test_every_cta_has_a_record_of_its_own(seed):
    grid = 6

    def rank(group):
        workspace = workspace_of(group)
        signal = workspace.segment.memory.view(torch.int64)
        signal[:grid] = torch.arange(grid)
        with pytest.raises(mk.CommTimeout) as caught:
            launch(group, workspace, wait_in_every_cta, grid=grid, expected=9)
        return group._records.view(-1, records.WORDS).clone(), caught.value

    ((table, error),) = simulate(rank, seed=seed, timeout=SOON)
    table, others = table[::2], table[1::2]  # those of warps that copy
    assert (others == 0).all()
    assert (table[:grid, 0] != 0).all()
    assert (table[grid:] == 0).all()
    assert table[:grid, 4].tolist() == list(range(grid))
    assert table[:grid, 6].tolist() == [100 + cta for cta in range(grid)]
    assert table[:grid, 7].tolist() == [200 + cta for cta in range(grid)]
    assert table[:grid, 8].tolist() == list(range(grid))
    assert (table[:grid, 9] == 9).all()
    assert len(error.records) == grid
    assert error.record.timed_out
    assert f"{grid - 1} more waits" in str(error)


@pytest.mark.parametrize("role", [COMPUTE, INTRA])
def test_any_record_sets_the_word_that_the_host_polls(role):
    def rank(group):
        workspace = workspace_of(group)
        workspace.segment.memory.view(torch.int64)[:2] = 1  # the third CTA waits alone
        before = int(group._records[records.RECORDED])
        with pytest.raises(mk.CommTimeout):
            launch(group, workspace, wait_as, grid=3, expected=1, ROLE=role)
        return before, int(group._records[records.RECORDED]), group._records.view(-1, records.WORDS)[:, 0].nonzero()

    ((before, after, written),) = simulate(rank, timeout=SOON)
    assert (before, after) == (0, 1)
    assert written.tolist() == [[4 + (role is INTRA)]]


@pytest.mark.parametrize("seed", range(4))
def test_who_times_out_takes_the_others_along(seed):
    """Rank 1 alone has a short timeout: the others leave because it tells them to."""
    grid = 3

    def rank(group):
        workspace = workspace_of(group)
        if group.rank == 1:
            workspace.context[words.TIMEOUT.value] = int(SOON * 1e9)
        try:
            launch(group, workspace, wait_in_every_cta, grid=grid, expected=1)
        except mk.CommTimeout as error:
            return error.records
        raise AssertionError("the wait ended with no error")

    found = simulate(rank, gpus=3, seed=seed, timeout=1000.0)
    for number, left in enumerate(found):
        assert [record.rank for record in left] == [number] * grid
        assert sorted(record.cta for record in left) == list(range(grid))
        assert all(record.seconds < 500 for record in left)
        if number != 1:
            assert not any(record.timed_out for record in left)
    assert found[1][0].timed_out


def test_ranks_of_another_node_find_out_by_themselves():
    def rank(group):
        workspace = workspace_of(group)
        try:
            launch(group, workspace, wait_in_every_cta, grid=1, expected=1)
        except mk.CommTimeout as error:
            return error.record

    assert all(record.timed_out for record in simulate(rank, nodes=2, gpus=1, timeout=SOON))


@triton.jit
def wait_twice(context):
    mine = segment_of(context, rank_of(context), tl.int64)
    wait(context, mine, 1, COMPUTE, ARRIVED, 0, 1)
    wait(context, mine + 1, 1, COMPUTE, ARRIVED, 0, 2)


def test_the_wait_that_timed_out_is_not_forgotten():
    """A kernel runs on after a timeout, and its next waits fail at once; those are not the reason."""

    def rank(group):
        workspace = workspace_of(group)
        with pytest.raises(mk.CommTimeout) as caught:
            launch(group, workspace, wait_twice)
        return caught.value.record

    (record,) = simulate(rank, timeout=SOON)
    assert record.index == 1
    assert record.timed_out
    assert record.seconds > SOON


@triton.jit
def give_up_twice(context, FIRST: tl.constexpr, SECOND: tl.constexpr):
    """As two warps of a CTA would that waited at the same time: one for what a peer was to send, which waits itself for
    a rank that never came; one for that rank. The first to give up has told the other one to leave."""
    nanoseconds = tl.cast(1000000000, tl.int64)
    signals._record(context, signals.TIMED_OUT, signals.Awaited(FIRST, ARRIVED, 1, 40), 0, 1, nanoseconds)
    signals._record(context, signals.TOLD_TO_LEAVE, signals.Awaited(SECOND, signals.ENTERED, 2, 0), 0, 1, nanoseconds)


@pytest.mark.parametrize(("first", "second", "told"), [(COMPUTE, INTRA, (2, 1)), (COMPUTE, COMPUTE, (1,))])
def test_warps_that_copy_have_records_of_their_own(first, second, told):
    def rank(group):
        workspace = workspace_of(group)
        with pytest.raises(mk.CommTimeout) as caught:
            launch(group, workspace, give_up_twice, grid=3, FIRST=first, SECOND=second)
        assert caught.value.is_cause
        return caught.value.records

    (found,) = simulate(rank)
    assert [record.peer for record in found] == [peer for peer in told for _ in range(3)]
    assert sorted(record.cta for record in found) == sorted([0, 1, 2] * len(told))


def test_a_wait_is_timed_from_its_own_beginning():
    """However long ago the kernels of this workspace looked at the clock."""

    def rank(group):
        workspace = workspace_of(group)
        out = torch.zeros(BLOCK.value + 1, dtype=torch.int64)
        for _ in range(3):
            launch(group, workspace, pass_on, data_start=workspace.data_start // 8, out=out)
            group.barrier()
            group.world.scheduler.clock += 3600 * 10**9
            group.barrier()
        return int(out[-1])

    for seed in range(4):
        assert simulate(rank, gpus=2, seed=seed, timeout=1.0) == [1, 1]


def test_a_launch_after_a_timeout_ends_at_once():
    def rank(group):
        workspace = workspace_of(group)
        took = []
        for _ in range(2):
            before = group.world.scheduler.clock
            with pytest.raises(mk.CommTimeout):
                launch(group, workspace, wait_in_every_cta, grid=2, expected=1)
            took.append(group.world.scheduler.clock - before)
        return took

    ((first, second),) = simulate(rank, timeout=1e-2)
    assert second < first / 10


def test_kinds_and_reasons_differ():
    common = ("ENTERED", "ARRIVED", "RING_SPACE", "SENT", "PARTIAL_SUM", "NOTHING")
    assert {getattr(signals, name).value: name.lower().replace("_", " ") for name in common} == records.SIGNALS
    named = {}
    for operator in operators.registered().values():
        kinds = [signal.number for signal in operator.signals]
        assert len(set(kinds)) == len(kinds)
        assert min(kinds, default=16) >= 16
        named |= {signal.kind: signal.name for signal in operator.signals}
    for kinds in (attention_kinds, moe_kinds, reduce_kinds):
        for name in (name for name in vars(kinds) if name.isupper()):
            assert named[f"{kinds.__name__}:{name}"] == name.lower().replace("_", " ")
    reasons = [getattr(signals, name).value for name in ("TIMED_OUT", "TOLD_TO_LEAVE", "OVER_CAPACITY", "INVALID_ID")]
    assert len({0, *reasons}) == len(reasons) + 1


@triton.jit
def relay(context, out):
    """Rank 0 hands on to rank 1 what never came to it, and says that it has."""
    rank = rank_of(context)
    epoch = current_epoch(context)
    mine = segment_of(context, rank, tl.int64)
    if rank == 0:
        wait(context, mine, epoch, COMPUTE, ARRIVED, 1, 0)
        notify(segment_of(context, 1, tl.int64) + 1, epoch)
    else:
        there = wait(context, mine + 1, epoch, COMPUTE, ARRIVED, 0, 0)
        tl.store(out, there.to(tl.int64))
    finish(context, epoch, 2)


@pytest.mark.parametrize("told", [False, True], ids=["timed out", "told to leave"])
def test_whoever_was_given_what_never_came_hears_of_it(told):
    """Its own wait was answered, and yet it leaves a record. `told`: rank 0 gives up because its flag is up,
    before rank 1's is."""

    def rank(group):
        workspace = workspace_of(group)
        pair = group.subset([0, 1])  # which does not give up with the group
        out = torch.zeros(1, dtype=torch.int64)
        if group.rank == 0:
            workspace.context[words.TIMEOUT.value] = int(SOON * 1e9)
            if told:
                group._control.memory.view(torch.int64)[0] = 1
            with pytest.raises(mk.CommTimeout, match="chunk 0 of rank 1"):
                launch(group, workspace, relay, out=out)
        pair.barrier()
        if group.rank == 1:
            with pytest.raises(mk.CommTimeout, match="rank 1 ended its launch after the group had given up") as caught:
                launch(group, workspace, relay, out=out)
            assert len(caught.value.records) == 1
        return int(out)

    assert simulate(rank, gpus=2) == [0, 1]


@gluon.jit
def wait_in_vain(context, WHICH: tl.constexpr):
    signal = segment_of(context, rank_of(context), tl.int64) + WHICH
    wait(context, signal, 10 * WHICH, COMPUTE, ARRIVED, WHICH, 100 * WHICH)


@gluon.jit
def wait_in_two_warps(context):
    epoch = current_epoch(context)
    gl.warp_specialize([(wait_in_vain, (context, 1)), (wait_in_vain, (context, 2))], [1], [40])
    finish(context, epoch, 2)


@pytest.mark.parametrize("seed", range(4))
def test_warps_that_give_up_at_the_same_time_leave_one_record(seed):
    """Of one of the waits, not of both."""

    def rank(group):
        workspace = workspace_of(group)
        with pytest.raises(mk.CommTimeout) as failure:
            launch(group, workspace, wait_in_two_warps)
        return failure.value.records

    for (record,) in simulate(rank, gpus=4, timeout=SOON, seed=seed):
        assert (record.expected, record.index) == (10 * record.peer, 100 * record.peer)
