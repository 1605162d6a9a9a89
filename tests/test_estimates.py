"""How long the simulator will take: from the cost of calls, and the speed of a machine."""

import dataclasses
import io
import itertools
import time

import pytest
import torch
from support.workloads import workload_of

import mkernel as mk
from mkernel import demo, estimates, operators
from mkernel.bench.shapes import parse
from mkernel.estimates import Simulation, Speed
from mkernel.workloads import Cost

WORKLOADS = {name: workload_of(name) for name in operators.registered("workload")}
SHOWN = [operator.name for operator in demo.shown_operators()]
SPEED = Speed(tile=0.01, step=0.001)
EXACT = (
    "all_gather_matmul",
    "all_gather_matmul_weight_grad",
    "all_gather_scaled_matmul",
    "matmul_reduce_scatter",
    "matmul_all_reduce",
    "scaled_matmul_reduce_scatter",
    "scaled_matmul_all_reduce",
    "ring_attention",
    "ring_attention_backward",
    "moe_dispatch",
)


@pytest.fixture
def known_speed(monkeypatch):
    monkeypatch.setattr(estimates, "measure", lambda workload: SPEED)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("op", list(WORKLOADS))
def test_a_cost_has_the_tile_steps_that_are_computed(op, ranks):
    workload = WORKLOADS[op]
    shape = workload.smallest(ranks)

    def on_rank(group):
        workload.make(group, shape, torch.bfloat16).run(None)
        group.barrier()
        return sum(group.world.traffic.multiplications)

    counted = mk.spawn(on_rank, gpus_per_node=ranks, device="cpu")[0]
    expected = workload.cost(shape, ranks).dots
    if op in EXACT:
        assert counted == expected
    else:  # experts do not get equally many rows
        assert 0.5 < expected / counted < 2


@pytest.mark.parametrize("op", SHOWN)
def test_the_demo_knows_its_shapes(op):
    ranks = 2

    def on_rank(group):
        operators.find(op).load("demo").on_rank(group, 0).call()
        group.barrier()
        return sum(group.world.traffic.multiplications)

    counted = mk.spawn(on_rank, gpus_per_node=ranks, device="cpu")[0]
    expected = WORKLOADS[op].cost(operators.find(op).load("demo").simulated(ranks), ranks).dots
    assert counted == expected if op in EXACT else 0.5 < expected / counted < 2


@pytest.mark.parametrize("op", list(WORKLOADS))
def test_costs_grow_with_every_size_and_with_ranks(op):
    workload = WORKLOADS[op]
    for ranks in (1, 2, 8):
        shape = tuple(64 * size for size in workload.smallest(ranks))
        least = SPEED.seconds(workload.cost(shape, ranks), ranks)
        for place in range(len(shape) - op.startswith("ring_attention")):  # the last is the size of a head there
            double = (*shape[:place], 2 * shape[place], *shape[place + 1 :])
            assert SPEED.seconds(workload.cost(double, ranks), ranks) > least
            assert workload.cost(double, ranks).elements > workload.cost(shape, ranks).elements
    times = [SPEED.seconds(workload.cost(workload.smallest(ranks), ranks), ranks) for ranks in (2, 8, 64, 512)]
    assert times == sorted(times)


@pytest.mark.parametrize("op", list(WORKLOADS))
def test_a_speed_explains_the_calls_that_it_was_measured_with(op):
    costs = [WORKLOADS[op].cost(shape, 2) for shape in (WORKLOADS[op].smallest(2), estimates.larger(WORKLOADS[op], 2))]
    times = [SPEED.seconds(cost, 2) for cost in costs]
    found = estimates._solve(costs, times, 2)
    assert found.tile == pytest.approx(SPEED.tile)
    if not any(cost.dots for cost in costs):  # what multiplies nothing has no steps
        assert all(found.seconds(cost, 2) == pytest.approx(time) for cost, time in zip(costs, times, strict=True))
        return
    assert found.step == pytest.approx(SPEED.step)
    for first, second in itertools.product((0.2, 1, 5), repeat=2):  # a machine that pauses
        found = estimates._solve(costs, [times[0] * first, times[1] * second], 2)
        assert found.tile > 0
        assert found.step > 0


@pytest.mark.parametrize(
    "costs",
    [
        [Cost(4, 0, 8, 0), Cost(8, 0, 16, 0)],  # an operator that multiplies nothing
        [Cost(4, 4, 0, 0), Cost(8, 8, 0, 0)],  # whose larger shape has as many steps to a tile
        [Cost(4, 4, 0, 0), Cost(4, 4, 0, 0)],
    ],
)
def test_a_speed_is_found_where_tiles_and_steps_can_not_be_told_apart(costs):
    times = [10 * cost.tiles + cost.dots for cost in costs]
    found = estimates._solve(costs, times, 0)
    assert found.tile > 0
    assert found.step >= 0
    for cost, seconds in zip(costs, times):
        assert found.seconds(cost, 0) == pytest.approx(seconds, rel=0.02)


@pytest.mark.measures
def test_an_estimate_is_near_what_a_call_takes():
    workload, shape, ranks = WORKLOADS["matmul_reduce_scatter"], (256, 128, 1024), 4

    def on_rank(group):
        call = workload.make(group, shape, torch.bfloat16)
        with mk.trace():
            call.run(None)

    estimated = Simulation([(workload, shape, 1)], ranks).seconds()
    start = time.process_time()  # not of the other processes of a machine that has much to do
    mk.spawn(on_rank, gpus_per_node=ranks, device="cpu")
    assert 0.2 < estimated / (time.process_time() - start) < 5


def test_what_does_not_fit_is_refused_without_running_anything(monkeypatch):
    monkeypatch.setattr(estimates, "spawn", lambda *_, **__: pytest.fail("nothing needs to run for this"))
    workload = WORKLOADS["all_gather_matmul"]
    fits = Simulation([(workload, (16384, 2048, 8192), 1)], 4)
    monkeypatch.setattr(estimates, "available_bytes", lambda: fits.nbytes)
    fits.check_fits()
    for too_large in (
        dataclasses.replace(fits, itemsize=4),
        dataclasses.replace(fits, events=10**9),
        dataclasses.replace(fits, ranks=4096),
        dataclasses.replace(fits, jobs=[(workload, (16384, 2**31 - 1, 8192), 1)]),
    ):
        with pytest.raises(mk.ArgumentError, match=r"the memory of all \d+ ranks: about .* are free here"):
            too_large.check_fits()
    with pytest.raises(mk.ArgumentError, match="65534 ranks at most, not 100000"):
        Simulation([(workload, (100000, 32, 32), 1)], 100000).check_fits()


def test_available_memory_is_some():
    assert 2**20 < estimates.available_bytes() < 2**60


@pytest.mark.usefixtures("known_speed")
@pytest.mark.parametrize("ranks", [1, 3, 4, 16])
@pytest.mark.parametrize("op", list(WORKLOADS))
def test_a_shorter_shape_is_one_and_is_short(op, ranks):
    workload = WORKLOADS[op]
    shape = tuple(
        size * ranks * 16 if name in workload.operator.shared else size
        for name, size in zip(workload.operator.dimensions, workload.operator.shapes[0])
    )
    found = estimates.shorter(workload, shape, ranks)
    assert parse("x".join(map(str, found)), workload.operator, ranks) == found
    assert all(size <= given for size, given in zip(found, shape))
    seconds = SPEED.seconds(workload.cost(found, ranks), ranks)
    assert seconds <= estimates.SHORT or found == workload.smallest(ranks)


@pytest.mark.usefixtures("known_speed")
def test_too_many_ranks_are_answered_with_fewer():
    workload = WORKLOADS["all_gather_matmul"]
    assert estimates.shorter_call(workload, (16384, 64, 64), 1, 4).endswith("--device cpu --ranks 4")
    assert estimates.shorter_call(workload, (16384, 64, 64), 2, 2).endswith("--device cpu --ranks 2 --nodes 2")
    assert estimates.shorter_call(workload, (16384, 64, 64), 64, 8) == estimates.smallest_call(workload)


def test_the_defaults_are_short_everywhere():
    """So that nothing is measured before they run."""
    for workload in WORKLOADS.values():
        assert Simulation([(workload, workload.smallest(4), 2)], 4).is_surely_short(), workload.op
    assert demo.simulation(4).is_surely_short()
    assert not demo.simulation(64).is_surely_short()


def test_times_are_said_as_people_do():
    said = [estimates.text_of(seconds) for seconds in (0.2, 5, 119, 3600, 7300, 200_000, 10**10)]
    assert said == ["a second", "5 s", "119 s", "60 minutes", "2 hours", "2 days", "317 years"]


def test_progress_in_lines_is_little_and_grows(monkeypatch, capsys):
    clock = [0.0]
    monkeypatch.setattr(estimates.time, "monotonic", lambda: clock[0])
    workload = WORKLOADS["all_gather_matmul"]
    simulation = Simulation([(workload, workload.smallest(2), 2)], 2)

    def on_rank(group):
        watch.begin(group)
        call = workload.make(group, workload.smallest(2), torch.bfloat16)
        clock[0] += 20  # before and between calls, for both ranks
        call.run(None)

    with estimates.progress(simulation, 80.0) as watch:
        for _ in range(2):
            mk.spawn(on_rank, gpus_per_node=2, device="cpu")
    lines = capsys.readouterr().err.splitlines()
    assert 1 < len(lines) <= 3
    shares = [int(line.split("%")[0].rpartition(" ")[2]) for line in lines]
    assert shares == sorted(shares)
    assert 50 <= shares[-1] < 100, "the second cluster goes on where the first one ended"
    assert all("done after" in line for line in lines)


def test_progress_on_a_terminal_is_a_bar(monkeypatch):
    screen = io.StringIO()
    console = estimates.Console(file=screen, force_terminal=True, width=100)
    monkeypatch.setattr(estimates, "Console", lambda **_: console)
    workload = WORKLOADS["all_gather_matmul"]

    def on_rank(group):
        watch.begin(group)
        workload.make(group, workload.smallest(2), torch.bfloat16).run(None)

    with estimates.progress(Simulation([(workload, workload.smallest(2), 1)], 2), 80.0) as watch:
        mk.spawn(on_rank, gpus_per_node=2, device="cpu")
    assert "simulating" in screen.getvalue()
    assert "of about 80 s" in screen.getvalue()


def test_a_call_without_tile_steps_has_a_cost():
    assert SPEED.seconds(Cost(tiles=10, dots=0, copies=8, elements=1), 1) > 0.1
