"""The scheduler: any order, but the same one for the same seed; and nobody waits for ever."""

import pytest
import torch
import triton
import triton.language as tl

import mkernel as mk
from mkernel.lang.context import EPOCH, current_epoch, rank_of, segment_of
from mkernel.lang.roles import COMPUTE
from mkernel.lang.signals import ARRIVED, finish, notify, wait
from mkernel.sim.scheduler import Scheduler

from .harness import OP, launch, run, simulate

SOON = 2e-4  # simulated seconds, for waits that are meant to time out


@triton.jit
def line_up(counter, out):
    """Every CTA takes three numbers."""
    for turn in range(3):
        number = tl.atomic_add(counter, 1)
        tl.store(out + number, tl.program_id(0) + 10 * turn)


def order_of(seed: int, **options) -> tuple[list[int], int]:
    def rank(group):
        counter, out = torch.zeros(1, dtype=torch.int64), torch.zeros(12, dtype=torch.int64)
        launch(group, line_up, 4, counter=counter, out=out)
        return out.tolist(), group.world.scheduler.steps

    return simulate(rank, seed=seed, **options)[0]


def test_the_same_seed_gives_the_same_order():
    for seed in range(5):
        assert order_of(seed) == order_of(seed)


def test_other_seeds_give_other_orders():
    orders = {tuple(order_of(seed)[0]) for seed in range(20)}
    assert len(orders) > 10
    for order in orders:
        assert sorted(order) == sorted(cta + 10 * turn for cta in range(4) for turn in range(3))


@pytest.mark.parametrize(("nodes", "gpus"), [(1, 3), (2, 2)])
def test_an_operator_repeats_itself_exactly(nodes, gpus):
    def rank(group):
        generator = torch.Generator().manual_seed(group.rank)
        a, b = torch.randn(33, 32, generator=generator), torch.randn(32, 40, generator=generator)
        y = mk.all_gather_matmul(a, b)
        return y, group.world.scheduler.steps, group.world.traffic.before_last_arrival

    first, second = (simulate(rank, nodes=nodes, gpus=gpus, seed=7) for _ in range(2))
    other = simulate(rank, nodes=nodes, gpus=gpus, seed=8)
    assert [result[1:] for result in first] == [result[1:] for result in second]
    assert [result[1] for result in first] != [result[1] for result in other]
    for (y, *_), (again, *_) in zip(first, other):
        assert torch.equal(y, again), "the order of tasks changed the bits"


def test_resident_ctas_run_one_after_the_other():
    for seed in range(5):
        order, _ = order_of(seed, resident=1)
        assert order == [cta + 10 * turn for cta in range(4) for turn in range(3)]


def test_all_ctas_may_be_resident_or_some():
    started = set()
    for seed in range(20):
        order, _ = order_of(seed, resident=2)
        # CTA 2 can start only when one of the first two is done
        assert min(order.index(20), order.index(21)) < order.index(2)
        started.add(order[0])
    assert started == {0, 1}


# -- waiting


@triton.jit
def poll_for_ever(flag, HOW: tl.constexpr):
    if tl.program_id(0) == 1:
        if HOW == "add":
            while tl.atomic_add(flag, 0) != 9:
                pass
        elif HOW == "compare":
            while tl.atomic_cas(flag, 9, 10) != 9:
                pass
        else:
            while tl.atomic_max(flag, 3) != 9:
                pass


@pytest.mark.parametrize("how", ["add", "compare", "maximum"])
def test_polling_for_ever_is_found_and_named(how):
    flag = torch.tensor([7])

    def rank(group):
        alone = group.split(group.rank)
        if group.rank == 2:
            launch(alone, poll_for_ever, 3, flag=flag, HOW=how)
        group.barrier()

    with pytest.raises(mk.Deadlock) as caught:
        simulate(rank, gpus=3, timeout=1e8)
    message = str(caught.value)
    assert f"rank 2, {OP}, CTA 1 polls flag[0] on rank 2 = 7" in message
    assert "rank 2, Python waits for" in message
    assert "rank 0, Python waits for the other ranks" in message
    assert "CTA 0" not in message
    assert "CTA 2" not in message


@triton.jit
def wait_for_each_other(mine, theirs):
    while tl.atomic_add(mine, 0, sem="acquire") == 0:
        pass
    tl.atomic_xchg(theirs, 1, sem="release")


def test_a_cycle_is_a_deadlock():
    flags = torch.zeros(2, dtype=torch.int64)
    boxes = [flags[:1], flags[1:]]

    def rank(group):
        launch(group, wait_for_each_other, mine=boxes[group.rank], theirs=boxes[1 - group.rank])

    with pytest.raises(mk.Deadlock, match=r"rank 0.*CTA 0 polls") as caught:
        simulate(rank, gpus=2)
    assert "rank 1" in str(caught.value)


@triton.jit
def look_often(flag, out, times):
    """Reads a signal that is there already, again and again, as waits for chunks of one tile do."""
    seen = tl.atomic_add(flag, 0, sem="acquire")
    for _ in range(times):
        seen += tl.atomic_add(flag, 0, sem="acquire")
    tl.store(out, seen)


def test_looking_often_is_not_waiting():
    """A kernel that reads one value many times, and goes on each time, is no deadlock and takes no time."""

    def rank(group):
        flag, out = torch.ones(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
        before = group.world.scheduler.clock
        launch(group, look_often, flag=flag, out=out, times=200)
        return int(out), group.world.scheduler.clock - before

    ((seen, took),) = simulate(rank)
    assert seen == 201
    assert took < 10**9


@triton.jit
def wait_on_both(context):
    """Rank 0 and rank 1 wait for signals that nobody sets; each CTA has its own expectation."""
    cta = tl.program_id(0)
    rank = rank_of(context)
    wait(context, segment_of(context, rank, tl.int64) + cta, 5 + cta, COMPUTE, ARRIVED, 1 - rank, 40 + cta)


def timeouts(**arguments):
    def rank(group):
        workspace = group.workspace(OP, 8, 1024)
        workspace.segment.memory.view(torch.int64)[:2] = torch.tensor([3, 4])
        try:
            launch(group, wait_on_both, 2, context=workspace.context)
        except mk.CommTimeout as error:
            return error

    return simulate(rank, gpus=2, **arguments)


def test_a_deadlock_with_timeouts_names_every_wait():
    for number, error in enumerate(timeouts(timeout=SOON)):
        assert error is not None
        records = sorted(error.records, key=lambda record: record.cta)
        assert len(records) == 2
        for cta, record in enumerate(records):
            assert record.op == OP
            assert (record.rank, record.role, record.cta) == (number, "compute", cta)
            assert (record.signal, record.peer, record.index) == ("arrived", 1 - number, 40 + cta)
            assert (record.seen, record.expected) == (3 + cta, 5 + cta)
        for word in (OP, f"rank {number}", "role compute", "CTA", "'arrived'", "expected"):
            assert word in str(error)


def test_a_long_timeout_costs_no_long_simulation(monkeypatch):
    """The clock jumps when nothing else can happen."""
    ticks = []
    tick = Scheduler._nothing_can_run

    def counted(self):
        ticks.append(self.clock)
        assert len(ticks) < 5000, f"the clock has come only {ticks[-1] - ticks[0]} ns far"
        tick(self)

    monkeypatch.setattr(Scheduler, "_nothing_can_run", counted)
    for error in timeouts(timeout=30.0):
        assert error is not None
        assert error.record.seconds < 3000


def test_an_uncaught_timeout_is_the_one_that_ran_out():
    def rank(group):
        workspace = group.workspace(OP, 8, 1024)
        launch(group, wait_on_both, 2, context=workspace.context)

    for seed in range(5):
        with pytest.raises(mk.CommTimeout) as caught:
            simulate(rank, gpus=2, timeout=SOON, seed=seed)
        assert caught.value.record.timed_out


# -- slow and late ranks


@triton.jit
def meet(context):
    """All ranks tell all ranks that they are there, and wait for all."""
    rank = rank_of(context)
    epoch = current_epoch(context)
    size = tl.load(context + 1).to(tl.int32)
    for peer in range(size):
        notify(segment_of(context, peer, tl.int64) + rank, epoch)
    for peer in range(size):
        wait(context, segment_of(context, rank, tl.int64) + peer, epoch, COMPUTE, ARRIVED, peer, 0)
    finish(context, epoch, 2)


@pytest.mark.parametrize("options", [{}, {"late": {0: 3000}}, {"late": {1: 500, 2: 5000}}, {"slow": {1: 0.001}}])
def test_slow_and_late_ranks_are_waited_for(options):
    """The clock stands still while anybody can do anything, so nobody times out."""

    def rank(group):
        workspace = group.workspace(OP, 8, 1024)
        for _ in range(3):
            launch(group, meet, context=workspace.context)
        return int(workspace.state[EPOCH.value])

    for seed in range(3):
        assert simulate(rank, gpus=3, seed=seed, timeout=1e-4, **options) == [3, 3, 3]


def test_a_late_rank_starts_late():
    assert simulate(lambda group: group.world.scheduler.steps, late={0: 400})[0] >= 400
    assert simulate(lambda group: group.world.scheduler.steps)[0] < 400


def test_a_slow_rank_is_chosen_less_often():
    done = []

    def rank(group):
        counter, out = torch.zeros(1, dtype=torch.int64), torch.zeros(6, dtype=torch.int64)
        for _ in range(5):
            launch(group, line_up, 2, counter=counter.zero_(), out=out)
        done.append(group.rank)

    for seed in range(6):
        simulate(rank, gpus=2, seed=seed, slow={0: 0.01})
    assert done[1::2] == [0] * 6, "the slow rank comes last"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(slow={2: 0.1}), "slow names rank 2, but the ranks are 0 to 1"),
        (dict(late={"0": 5}), "late names rank '0', but the ranks are 0 to 1"),
        (dict(schedule="late:2"), "schedule 'late:2' names rank 2"),
        (dict(slow=[0.1]), r"slow must be a dict, such as {0: ...} for rank 0; got \[0.1\]"),
        (dict(slow={0: 0}), r"slow\[0\] must be finite and more than 0"),
        (dict(slow={0: float("inf")}), r"slow\[0\] must be finite and more than 0"),
        (dict(late={1: -5}), r"late\[1\] must be a whole number of steps, 0 or more; got -5"),
        (dict(ctas=-2), "ctas must be a whole number, 1 or more; got -2"),
        (dict(resident=0), "resident must be a whole number, 1 or more; got 0"),
    ],
)
def test_options_that_mean_nothing_are_refused(options, message):
    with pytest.raises(mk.ArgumentError, match=message):
        simulate(lambda group: None, gpus=2, **options)


# -- failures


class Oops(Exception):
    pass


def failing(group):
    counter, out = torch.zeros(1, dtype=torch.int64), torch.zeros(12, dtype=torch.int64)
    launch(group, line_up, 4, counter=counter, out=out)
    if out[0] == 3:
        raise Oops(str(out.tolist()))
    group.barrier()


def failure_of(seed: int) -> Oops | None:
    try:
        simulate(failing, gpus=2, seed=seed)
    except Oops as failure:
        return failure
    return None


def test_a_failure_prints_its_seed_and_comes_back_with_it(capsys):
    failures = {}
    for seed in range(30):
        failure = failure_of(seed)
        printed = capsys.readouterr().err
        if failure is None:
            assert printed == ""
        else:
            failures[seed] = str(failure)
            assert f"seed={seed}," in printed
            assert "1 x 2 ranks" in printed
            # notes are there since Python 3.11
            assert any(f"seed={seed}," in note for note in getattr(failure, "__notes__", [printed]))
    assert 0 < len(failures) < 30
    for seed, what in failures.items():
        assert str(failure_of(seed)) == what


def test_a_failure_of_one_rank_ends_all():
    ended = []

    def rank(group):
        if group.rank == 1:
            raise Oops("rank 1")
        try:
            group.barrier()
            ended.append("went on")
        finally:
            ended.append("cleaned up")

    with pytest.raises(Oops, match="rank 1"):
        simulate(rank, gpus=3)
    assert "went on" not in ended


@triton.jit
def fail_in_one_cta(x):
    if tl.program_id(0) == 2:
        tl.load(x + 100)


def test_a_failure_in_a_kernel_ends_all():
    with pytest.raises(mk.SimulatorError):
        run(fail_in_one_cta, 4, x=torch.zeros(1))
    run(line_up, 4, counter=torch.zeros(1, dtype=torch.int64), out=torch.zeros(12, dtype=torch.int64))


def test_results_come_by_rank():
    assert simulate(lambda group, x: (group.rank, x), "word", gpus=2, nodes=2) == [(r, "word") for r in range(4)]


@triton.jit
def poll_two_words(words, out, POLLS: tl.constexpr):
    """One polls two words, in turns, until the second is raised, and then looks at what is raised behind it."""
    if POLLS:
        seen = 0
        while seen == 0:
            seen = tl.atomic_add(words + 1, 0, scope="sys")
            tl.atomic_add(words, 0, scope="sys")
        tl.store(out, tl.atomic_add(words + 2, 0, scope="sys"))
    else:
        tl.atomic_xchg(words + 1, 1, scope="sys")
        tl.atomic_xchg(words + 2, 1, scope="sys")


def test_who_polls_several_words_looks_at_each_after_a_change():
    """Rank 0 runs whenever it can. To have looked at a word that is the same is no reason to wait for the next write:
    it was another word that has changed."""
    words, out = torch.zeros(3, dtype=torch.int64), torch.full((1,), -1)

    def rank(group):
        launch(group.split(group.rank), poll_two_words, words=words, out=out, POLLS=group.rank == 0)

    simulate(rank, gpus=2, schedule="ahead:0")
    assert out.item() == 0
