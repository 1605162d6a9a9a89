"""Systematic schedules: each finds what it is for, comes again by its name, and the report says what was covered."""

import itertools
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl

import mkernel as mk
from mkernel.lang.context import SEGMENT, rank_of, segment_of
from mkernel.lang.requests import Transfer, post
from mkernel.lang.roles import COMPUTE, SEND
from mkernel.lang.signals import ARRIVED, wait
from mkernel.sim.choices import Choices, Point, Schedule, Systematic
from mkernel.sim.explore import Exploration, Report, names, round_robin, spread
from mkernel.sim.scheduler import Options
from mkernel.sim.world import SimWorld
from mkernel.testing import check

from .harness import OP, launch, simulate
from .test_scheduler import line_up, order_of

TIMEOUT = 1e-3  # simulated seconds


class Wrong(Exception):
    """A wrong result."""


def expect(result, expected):
    if result != expected:
        raise Wrong(f"{result} instead of {expected}")


def failure_of(fn, **arguments):
    """What the first schedule that fails raises, and how many were run up to it."""
    exploration = Exploration(fn, timeout=TIMEOUT, **arguments)
    with pytest.raises(Wrong) as caught:
        for _ in exploration:
            pass
    return caught.value, len(exploration.report.ran) + 1


def assert_found(fn, within, **cluster):
    """The bug is found within so many schedules, not by the first one, and its schedule finds it again, alone."""
    failure, needed = failure_of(fn, schedules=within, **cluster)
    assert 1 < needed <= within
    name = failure.schedule
    for _ in range(2):
        with pytest.raises(Wrong) as again:
            check(fn, schedule=name, timeout=TIMEOUT, **cluster)
        assert again.value.schedule == name
        assert str(again.value) == str(failure)
    with pytest.raises(Wrong):
        mk.spawn(fn, device="cpu", timeout=TIMEOUT, sim=Options(schedule=name), **cluster)
    return name


# -- bugs that one order shows


@triton.jit
def add_one(counter):
    """Reads and writes where it should add."""
    seen = tl.atomic_add(counter, 0)
    tl.atomic_xchg(counter, seen + 1)


def loses_an_update(group):
    counter = torch.zeros(1, dtype=torch.int64)
    launch(group, add_one, 3, counter=counter)
    expect(counter.item(), 3)


def test_a_lost_update_is_found():
    assert_found(loses_an_update, within=8, gpus_per_node=1)


@triton.jit
def count_to_six(flags, own, out, TURNS: tl.constexpr):
    """In every turn CTA 1 raises a flag six times. CTA 0 looks at it twice, and must not see it as it was before
    and then after all of that."""
    for turn in range(TURNS):
        if tl.program_id(0) == 1:
            for _ in range(6):
                tl.atomic_add(flags + turn, 1)
        else:
            first = tl.atomic_add(flags + turn, 0)
            tl.atomic_add(own, 1)
            second = tl.atomic_add(flags + turn, 0)
            tl.store(out + turn, second - first)


def misses_a_value(group):
    alone = group.split(group.rank)
    flags, own, out = (torch.zeros(4, dtype=torch.int64) for _ in range(3))
    launch(alone, count_to_six, 2, flags=flags, own=own, out=out, TURNS=4)
    expect(6 in out.tolist(), False)


def test_a_window_of_one_point_is_found_by_a_stall():
    """No slow rank and no order of CTAs shows this one: one of them has to be stalled between two of its steps."""
    assert assert_found(misses_a_value, within=20).startswith("stall:")


@triton.jit
def read_without_waiting(context, out):
    """Rank 0 writes into rank 1's memory, which rank 1 reads without a wait."""
    theirs = segment_of(context, 1, tl.int64)
    if rank_of(context) == 0:
        tl.atomic_xchg(theirs, 7, sem="release", scope="sys")
    else:
        tl.store(out, tl.atomic_add(theirs, 0, sem="acquire", scope="sys"))


def relies_on_the_order_of_ranks(group):
    workspace = group.workspace(OP, 8, 1024)
    out = torch.zeros(1, dtype=torch.int64)
    launch(group, read_without_waiting, context=workspace.context, out=out)
    expect(out.item(), 7 * group.rank)


def test_an_order_of_two_ranks_is_found():
    assert assert_found(relies_on_the_order_of_ranks, within=3) == "slow:0"


@triton.jit
def send_two_signals(context, out):
    """Two requests. Who has seen the second one relies on the first one, but the network keeps no order."""
    segment = tl.load(context + SEGMENT)
    mine = segment_of(context, rank_of(context), tl.int64)
    if rank_of(context) == 0:
        peer = tl.cast(1, tl.int32)
        for signal in range(2):
            post(context, Transfer(peer, segment, 0, segment, 0, 0), signal * 8, 1, SEND)
    else:
        wait(context, mine + 1, 1, COMPUTE, ARRIVED, 0, 0)
        tl.store(out, tl.atomic_add(mine, 0, sem="acquire", scope="sys"))


def relies_on_the_order_of_requests(group):
    workspace = group.workspace(OP, 8, 1024)
    out = torch.zeros(1, dtype=torch.int64)
    launch(group, send_two_signals, context=workspace.context, out=out)
    expect(out.item(), group.rank)


def test_requests_that_overtake_each_other_are_found():
    assert assert_found(relies_on_the_order_of_requests, within=5, nodes=2, gpus_per_node=1) == "newest-first"
    check(relies_on_the_order_of_requests, nodes=2, gpus_per_node=1, schedule="oldest-first")


# -- what each schedule does


@triton.jit
def sign(log, WHO: tl.constexpr, TURNS: tl.constexpr):
    """Every CTA writes down three times that it was here, in a list that all ranks share."""
    for _ in range(TURNS):
        place = tl.atomic_add(log, 1, scope="sys")
        tl.atomic_xchg(log + 1 + place, 10 * WHO + tl.program_id(0))


def signatures(schedule, ranks=3, ctas=2, turns=3):
    """Rank and CTA, in the order in which they came."""
    log = torch.zeros(1 + ranks * ctas * turns, dtype=torch.int64)

    def rank(group):
        launch(group.split(group.rank), sign, ctas, log=log, WHO=group.rank, TURNS=turns)

    simulate(rank, gpus=ranks, schedule=schedule)
    return [divmod(number, 10) for number in log[1:].tolist()]


def ranks_of(schedule, **arguments):
    return [rank for rank, _ in signatures(schedule, **arguments)]


@pytest.mark.parametrize("rank", range(3))
def test_a_slow_rank_is_last_and_one_that_is_ahead_first(rank):
    assert ranks_of(f"slow:{rank}")[-6:] == [rank] * 6
    assert ranks_of(f"ahead:{rank}")[:6] == [rank] * 6


@pytest.mark.parametrize("rank", range(3))
def test_a_late_rank_is_the_last_to_make_every_call(rank):
    calls = []

    def on_rank(group):
        mine = group.split(group.rank)
        for _ in range(3):
            group.barrier()
            calls.append(group.rank)
            counter, out = torch.zeros(1, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
            launch(mine, line_up, counter=counter, out=out)

    simulate(on_rank, gpus=3, schedule=f"late:{rank}")
    assert calls[2::3] == [rank] * 3


def test_a_task_runs_until_it_has_to_wait():
    order = signatures("in-order")
    assert [next(same) for _, same in itertools.groupby(order)] == list(dict.fromkeys(order))
    assert len(set(order)) == 6


def test_reversed_is_the_other_order():
    launched = [cta for _, cta in signatures("in-order", ranks=1, ctas=4)]
    assert [cta for _, cta in signatures("reversed", ranks=1, ctas=4)] == launched[::-1]


def test_alternating_changes_at_every_point():
    order = signatures("alternating")
    assert all(one != other for one, other in itertools.pairwise(order))


def test_one_cta_runs_at_a_time():
    assert Options(schedule="one-cta").resident == 1
    order, _ = order_of(0, schedule="one-cta")
    assert order == [cta + 10 * turn for cta in range(4) for turn in range(3)]


def test_a_stall_lasts_until_no_other_task_can_run():
    usual = signatures("in-order")
    rank, cta = usual[0]
    stalled = signatures(f"stall:{rank}.cta{cta}@2")
    # start, ticket, signature, ticket: the second ticket is the stalled point's
    assert stalled[0] == usual[0]
    assert stalled[-2:] == [usual[0]] * 2
    assert Counter(stalled) == Counter(usual)


def test_of_two_stalled_tasks_the_first_goes_on_first():
    usual = list(dict.fromkeys(signatures("in-order")))
    first, second = usual[:2]
    name = "+".join(f"{rank}.cta{cta}@0" for rank, cta in (first, second))
    assert list(dict.fromkeys(signatures(f"stall:{name}"))) == [*usual[2:], first, second]


@triton.jit
def spin(flag, turns):
    """CTA 0 spins, and changes memory with every poll; the others end that."""
    if tl.program_id(0) == 0:
        while tl.atomic_add(flag, 0) < 2:
            tl.atomic_add(turns, 1)
    else:
        tl.atomic_add(flag, 1)


@pytest.mark.parametrize(
    "schedule", ["in-order", "alternating", "slow:1", "late:1", "ahead:0", "stall:1.cta0@0", "stall:0.cta1@0"]
)
def test_whoever_spins_does_not_keep_the_others_from_running(schedule, monkeypatch):
    monkeypatch.setattr("mkernel.sim.choices.UNBROKEN", 20)
    monkeypatch.setattr("mkernel.sim.choices.STARVED", 100)
    flag, turns = (torch.zeros(1, dtype=torch.int64) for _ in range(2))

    def rank(group):
        mine = group.split(group.rank)
        if group.rank == 0:
            launch(mine, spin, 2, flag=flag, turns=turns)
        else:
            flag.add_(1)

    simulate(rank, gpus=2, schedule=schedule)
    assert flag.item() == 2


# -- which schedules there are


@pytest.mark.parametrize("count", [0, 1, 2, 7, 64, 1000])
def test_numbers_are_spread_evenly_however_many_are_taken(count):
    order = list(spread(count))
    assert sorted(order) == list(range(count))
    for taken in (8, 16, 50):
        if taken <= count:
            gaps = itertools.pairwise(sorted([0, *order[:taken], count]))
            assert max(b - a for a, b in gaps) <= 4 * count / taken


def run_of(ranks, ctas=4, turns=20, places=5):
    """Points of a made-up run: CTAs one after the other, in loops over so many places, and a rare place in one."""
    points = [
        (Point(f"{rank}.cta{cta}", count), ("loop", count % places))
        for rank in range(ranks)
        for cta in range(ctas)
        for count in range(turns)
    ]
    return [*points, (Point(f"{ranks - 1}.cta0", turns), "rare")]


def test_every_place_in_the_code_has_its_turn_first():
    points = run_of(ranks=4)
    turns = round_robin(points)
    assert sorted(map(str, turns)) == sorted(str(point) for point, _ in points)
    place_of = dict(points)
    assert len({place_of[point] for point in turns[:6]}) == 6


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_first_fifty_cover_the_run_and_every_rank(ranks):
    points = run_of(ranks)
    first = list(itertools.islice(names(points, ranks), 49))
    assert {f"slow:{rank}" for rank in range(ranks)} <= set(first)
    assert {"one-cta", "reversed", "alternating"} <= set(first)
    when = {str(point): number for number, (point, _) in enumerate(points)}
    stalled = sorted(when[name.partition(":")[2]] for name in first if name.startswith("stall:"))
    assert len(stalled) >= 20
    assert max(b - a for a, b in itertools.pairwise([0, *stalled, len(points)])) < len(points) / 4
    assert len({name.split(":")[1].split(".")[0] for name in first if name.startswith("stall:")}) == ranks


def test_the_network_has_schedules_where_there_is_one():
    with_network = [*run_of(2), (Point("0.net", 0), "net")]
    assert {"newest-first", "oldest-first"} <= set(itertools.islice(names(with_network, 2), 8))
    assert not {"newest-first", "oldest-first"} & set(names(run_of(2), 2, bound=1))


def test_one_stall_comes_before_two_and_all_are_there():
    points = [(Point("0.cta0", count), count) for count in range(5)]
    stalls = [name for name in names(points, 1) if name.startswith("stall:")]
    assert [name.count("@") for name in stalls] == [1] * 5 + [2] * 10
    assert len(set(stalls)) == 15
    assert list(names(points, 1, bound=3))[: len(stalls)] == list(names(points, 1))[: len(stalls)]
    assert sum(name.count("@") == 3 for name in names(points, 1, bound=3)) == 10


def small(group):
    counter, out = torch.zeros(1, dtype=torch.int64), torch.zeros(6, dtype=torch.int64)
    launch(group, line_up, 2, counter=counter, out=out)
    assert sorted(out.tolist()) == [0, 1, 10, 11, 20, 21]


def test_more_schedules_only_go_further():
    ten, forty = (check(small, gpus_per_node=1, schedules=count) for count in (10, 40))
    assert len(ten.ran) == 10
    assert forty.ran[:10] == ten.ran
    assert len(set(forty.ran)) == 40


def test_all_of_them_are_all():
    points = check(small, gpus_per_node=1, schedules=1).points
    report = check(small, gpus_per_node=1, schedules=10_000)
    assert report.complete
    assert "these are all schedules" in str(report)
    stalls = [name for name in report.ran if name.startswith("stall:")]
    assert len(stalls) == points + points * (points - 1) // 2
    assert not check(small, gpus_per_node=1, schedules=10).complete


def test_random_ones_come_behind_and_are_those_of_their_seeds():
    report = check(small, gpus_per_node=1, schedules=3, random=4, seed=7)
    assert report.ran[3:] == ["random:7", "random:8", "random:9", "random:10"]
    assert check(small, gpus_per_node=1, schedules=0, random=2).ran == ["random:0", "random:1"]
    for seed in range(5):
        assert order_of(0, schedule=f"random:{seed}") == order_of(seed)


def test_some_can_be_left_out():
    report = check(small, gpus_per_node=1, schedules=6, without=["one-cta", "alternating"])
    assert not {"one-cta", "alternating"} & set(report.ran)
    assert len(report.ran) == 6


# -- the same order again


@pytest.mark.thorough
def test_an_operator_repeats_itself_exactly(monkeypatch):
    resumed = []
    for kind in (Choices, Systematic):
        pick = kind.pick

        def noted(self, ready, slow, pick=pick):
            task = pick(self, ready, slow)
            resumed.append(task.name)
            return task

        monkeypatch.setattr(kind, "pick", noted)

    def rank(group):
        generator = torch.Generator().manual_seed(group.rank)
        a, b = torch.randn(16, 16, generator=generator), torch.randn(16, 16, generator=generator)
        return mk.all_gather_matmul(a, b)

    results, orders = [], {}
    exploration = Exploration(rank, nodes=2, gpus_per_node=2, schedules=16)
    for name in exploration:
        orders[name] = list(resumed)
        resumed.clear()
    assert len(set(map(tuple, orders.values()))) > 12
    for name, order in orders.items():
        results.append(simulate(rank, nodes=2, gpus=2, timeout=30.0, schedule=name))
        assert resumed == order, name
        resumed.clear()
    assert all(torch.equal(y, first) for each in results for y, first in zip(each, results[0]))


def test_a_failure_says_how_to_see_it_again(capsys):
    failure, _ = failure_of(relies_on_the_order_of_ranks)
    how = "1 x 2 ranks failed with sim=Options(schedule='slow:0'), which reproduces the failure"
    assert how in capsys.readouterr().err
    assert any(how in note for note in getattr(failure, "__notes__", [how]))  # since Python 3.11


# -- what was covered


def world_with(orders, waits):
    """A world that has run, with what its race detector recorded."""
    return SimpleNamespace(
        scheduler=SimpleNamespace(choices=Choices(0)), races=SimpleNamespace(orders=orders, waits=waits)
    )


def test_a_report_adds_up_what_the_race_detector_saw():
    orders, waits = {("a.py:1 f", "b.py:2 g"): 3, ("c.py:3 h", "c.py:3 h"): 1}, {"a.py:9 w": [5, 0], "b.py:8 w": [2, 1]}
    report = Report(1, 2)
    report.add(world_with(orders, waits))
    assert report.both_orders == [("c.py:3 h", "c.py:3 h")]
    assert report.never_waited == ["a.py:9 w"]
    more = {("b.py:2 g", "a.py:1 f"): 1, ("d.py:4 k", "e.py:5 l"): 2}
    report.add(world_with(orders | more, {"a.py:9 w": [0, 4], "d.py:7 w": [6, 0]}))
    assert report.orders[("a.py:1 f", "b.py:2 g")] == 6
    assert report.both_orders == [("a.py:1 f", "b.py:2 g"), ("c.py:3 h", "c.py:3 h")]
    assert report.one_order == [("d.py:4 k", "e.py:5 l")]
    assert report.waits["a.py:9 w"] == [5, 4]
    assert report.waited == ["a.py:9 w", "b.py:8 w"]
    assert report.never_waited == ["d.py:7 w"]
    text = str(report)
    assert "2 seen in both orders, 1 in one order only" in text
    assert "d.py:4 k, then e.py:5 l (2 times)" in text
    assert "lines at which a CTA waits: at 2 it had to, at 1 it never had to" in text
    assert "d.py:7 w (6 times)" in text


def test_the_race_detector_is_told_to_record_orders(monkeypatch):
    if not hasattr(SimWorld, "races"):
        fake = SimpleNamespace(record_orders=False, orders={}, waits={})
        monkeypatch.setattr(SimWorld, "races", fake, raising=False)
    seen = []
    check(lambda group: seen.append(group.world.races.record_orders), schedules=1)
    assert seen == [True, True]


def test_a_long_report_is_cut():
    report = Report(1, 2, orders=Counter({(f"{i:03}", "x"): 1 for i in range(50)}), waits={})
    assert "and 30 more" in str(report)


def test_a_report_without_a_race_detector_says_so():
    report = Report(1, 2)
    report.add(SimpleNamespace(scheduler=SimpleNamespace(choices=Choices(0)), races=None))
    assert "not recorded, since the race detector is off" in str(report)
    assert (report.both_orders, report.one_order, report.waited, report.never_waited) == ([], [], [], [])


def test_a_report_of_a_failure_has_what_was_done_until_then():
    exploration = Exploration(relies_on_the_order_of_ranks, timeout=TIMEOUT)
    with pytest.raises(Wrong):
        list(exploration)
    assert exploration.report.ran == ["in-order"]
    assert exploration.report.failed == "slow:0"
    assert "slow:0 failed" in str(exploration.report)
    assert "all passed" not in str(exploration.report)


def test_a_report_counts_points():
    report = check(small, gpus_per_node=1, schedules=30)
    assert report.points > report.places > 3
    assert 10 < len(report.stalled) <= report.points
    assert "30 schedules of 1 x 1 ranks" in str(report)
    assert "all passed" in str(report)


def test_a_stall_that_no_task_comes_to_is_told():
    report = check(small, gpus_per_node=1, schedule="stall:0.cta1@2+0.cta1@400")
    assert report.unreached == {Point("0.cta1", 400)}
    assert "no task reached 0.cta1@400" in str(report)


# -- what is refused


def test_warps_of_a_gluon_kernel_can_be_stalled():
    """One by one: the load warp, and the warp that pushes."""

    def program(group):
        generator = torch.Generator().manual_seed(group.rank)
        a, b = torch.randn(256, 64, generator=generator).bfloat16(), torch.ones(64, 512).bfloat16()
        y = mk.all_gather_matmul(a, b)
        assert "Hopper" in str(mk.explain("all_gather_matmul", a, b))
        torch.testing.assert_close(y.float()[256 * group.rank :][:256], a.float() @ b.float(), rtol=2e-2, atol=1e-1)

    options = Options(capability=(9, 0), ctas=2)
    for warps in ("0.cta1w1", "1.cta0w3"):
        report = check(program, schedule=f"stall:{warps}@2", sim=options)
        assert report.stalled == {Point(warps, 2)}


@pytest.mark.parametrize(
    "name", ["", "17", "slow", "slow:", "slow:x", "slow:-1", "stall:", "stall:0.cta1", "stall:0.gpu@1", "random:x"]
)
def test_there_is_no_such_schedule(name):
    with pytest.raises(mk.ArgumentError, match=r"there is no schedule .*slow:0.*stall:0.cta3@17.*random:17"):
        Schedule.parse(name)
    with pytest.raises(mk.ArgumentError, match="there is no schedule"):
        Options(schedule=name)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(schedules=-1), "schedules must be a whole number, 0 or more; got -1"),
        (dict(random=1.5), "random must be a whole number, 0 or more; got 1.5"),
        (dict(schedules=0), "schedules and random are both 0"),
        (dict(nodes=0), "nodes must be a whole number, 1 or more; got 0"),
        (dict(schedule="slow:2"), "'slow:2' names rank 2, but the ranks are 0 to 1"),
        (dict(schedule="stall:0.cta1@2+5.net@3"), "names rank 5"),
        (dict(schedule="fast"), "there is no schedule 'fast'"),
        (dict(without=["fast"]), "there is no schedule 'fast'"),
        (dict(without=["in-order"]), "without must not name 'in-order'"),
        (dict(sim=Options(slow={0: 0.1})), r"sim.slow must be empty: .* such as slow:0; got {0: 0.1}"),
        (dict(sim=Options(late={1: 50})), "sim.late must be empty"),
        (
            dict(sim=Options(schedule="slow:0")),
            "sim.schedule must be None; to run one schedule, pass schedule='slow:0'",
        ),
        (dict(sim={}), "sim must be a mkernel.sim.scheduler.Options, got dict"),
        (dict(without="one-cta"), r"without must be a list of the names of schedules, such as \['one-cta'\]"),
        (dict(seed="17"), "seed must be an integer, got '17'"),
        (dict(timeout=-1.0), "timeout"),
    ],
)
def test_arguments_are_refused(arguments, message):
    with pytest.raises(mk.ArgumentError, match=message):
        check(small, **arguments)
