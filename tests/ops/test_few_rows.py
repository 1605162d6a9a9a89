"""Calls with few rows in one node: teams of CTAs that split k, and tiles that cover the rows of several ranks. Results
for every shape, layout and schedule, and plans. What they compile to is in test_few_rows_compile.py."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support import gradient_reference, operator_calls, reduce_reference
from support.operator_calls import DTYPES, LAYOUTS, Canary, Case, Guards, assert_same, lay_out, run
from support.reduce_reference import Sum, mine
from support.scenarios import FewRows

import mkernel as mk
from mkernel.runtime import planning
from mkernel.sim.backend import SimLauncher

GATHER, SCATTER, REDUCE = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"
OPS = [GATHER, SCATTER, REDUCE]
BF16 = torch.bfloat16
SMALL = mk.Config(tile_m=16, tile_n=16, tile_k=16)
CTAS = 16


def teams_of(team, **more):
    """Small tiles, each by a team of so many CTAs."""
    return mk.Config(**(dict(tile_m=16, tile_n=16, tile_k=16) | more), team_ctas=team)


def multiply(group, op, shape, turn=0, *, dtype=torch.float32, **arguments):
    """A call with so many rows of each rank, and its checks."""
    rows, n, k = shape
    if op == GATHER:
        return operator_calls.call(group, Case(rows, n, k, dtype), turn, **arguments)
    return reduce_reference.call(group, op, Sum(rows * group.size, n, k, dtype), turn, **arguments)


def explain(group, op, shape, config, dtype=torch.float32):
    rows, n, k = shape
    rows = rows if op == GATHER else rows * group.size
    return mk.explain(op, torch.zeros(rows, k, dtype=dtype), torch.zeros(k, n, dtype=dtype), config=config)


def simulate(function, *args, ranks=2, ctas=CTAS, **options):
    return run(function, *args, cluster=(1, ranks), ctas=ctas, **options)


def some_are_quick(quick, everything):
    """Parameters of a test; `make test` runs only some of them."""
    assert all(each in everything for each in quick)
    values = [each if isinstance(each, tuple) else (each,) for each in everything]
    return [
        pytest.param(*each, marks=() if given in quick else pytest.mark.thorough)
        for each, given in zip(values, everything)
    ]


# -- every shape

# rows of a rank, n, k, and the configuration besides the team
SHAPES = {
    "sizes of one": ((1, 1, 1), {}),
    "one row": ((1, 33, 40), {}),
    "k is smaller than a team": ((3, 7, 2), {}),
    "a tile covers several ranks": ((5, 17, 70), {}),
    "a rank covers several tiles": ((37, 9, 33), {}),
    "a unit covers several ranks": ((2, 20, 40), dict(tile_m=64)),
    "more tiles than CTAs": ((40, 40, 20), dict(ctas=4)),
    "default tiles": ((9, 35, 100), dict(tile_m=None, tile_n=None, tile_k=None)),
}
WHO = [(op, ranks) for op in OPS for ranks in ((1,) if op == REDUCE else (1, 2, 3, 4))]
EVERYTHING = [(op, ranks, team) for op, ranks in WHO for team in (1, 2, 4, 16)]
QUICK = [(GATHER, 2, 4), (SCATTER, 3, 2)]


@pytest.mark.parametrize(("op", "ranks", "team"), some_are_quick(QUICK, EVERYTHING))
def test_shapes(op, ranks, team):
    def work(group):
        for turn, (shape, more) in enumerate(SHAPES.values()):
            config = teams_of(team, **more)
            assert explain(group, op, shape, config).few_rows
            multiply(group, op, shape, turn, dtype=DTYPES[turn % 3], config=config)

    simulate(work, ranks=ranks, seed=team)


def test_teams_are_as_large_as_they_may_be():
    """No member is left without rows, and no team waits for CTAs that are not there."""

    def work(group):
        sizes = {}
        for name, shape, config in [
            ("as given", (1, 16, 16), teams_of(8)),
            ("tiles are low", (1, 16, 16), teams_of(16)),
            ("few CTAs", (1, 16, 16), teams_of(16, ctas=7)),
            ("many tiles", (1, 5 * 16, 16), teams_of(16)),
            ("more tiles than CTAs", (1, 17 * 16, 16), teams_of(16)),
        ]:
            plans = [explain(group, op, shape, config).config for op in (GATHER, SCATTER)]
            assert plans[0].team_ctas == plans[1].team_ctas
            assert all(plan.ctas <= (config.ctas or CTAS) and plan.ctas % plan.team_ctas == 0 for plan in plans)
            sizes[name] = plans[0].team_ctas
        return sizes

    expected = {"as given": 8, "tiles are low": 16, "few CTAs": 4, "many tiles": 2, "more tiles than CTAs": 1}
    assert simulate(work)[0] == expected


@settings(
    max_examples=60, deadline=None, derandomize=True, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
)
@given(
    who=st.sampled_from(WHO),
    shape=st.tuples(st.integers(1, 40), st.integers(1, 40), st.integers(1, 70)),
    team=st.sampled_from([1, 2, 4, 8, 16]),
    tile=st.tuples(*[st.sampled_from([16, 32, 64])] * 3),
    ctas=st.integers(1, 16),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 10**6),
    layouts=st.tuples(*[st.sampled_from(list(LAYOUTS))] * 3),
)
@pytest.mark.thorough
def test_anything(who, shape, team, tile, ctas, dtype, seed, layouts):
    op, ranks = who
    rows, n, _ = shape
    config = mk.Config(**dict(zip(("tile_m", "tile_n", "tile_k"), tile)), ctas=ctas, team_ctas=team)

    def work(group):
        for turn in range(2):
            a, b = inputs(group, op, shape, dtype, turn)
            canary = Canary(rows * group.size if op != SCATTER else rows, n, dtype, layouts[2])
            multiply(
                group, op, shape, turn, dtype=dtype, a=lay_out(a, layouts[0]), b=lay_out(b, layouts[1]),
                out=canary.tensor, config=config,
            )  # fmt: skip
            canary.check()

    simulate(work, ranks=ranks, seed=seed)


# -- layouts, and what is added


def inputs(group, op, shape, dtype, turn=0):
    """The values of a and b that `multiply` checks."""
    rows, n, k = shape
    if op == GATHER:
        case = Case(rows, n, k, dtype)
        return case.rows(group.rank, turn), case.weights(group.rank, turn)
    case = Sum(rows * group.size, n, k, dtype)
    return case.a(group.rank, turn), case.b(group.rank, turn)


@pytest.mark.parametrize(("op", "ranks"), some_are_quick([(SCATTER, 1)], [*WHO[:2], *WHO[4:6], WHO[-1]]))
def test_layouts(op, ranks):
    """Every layout of a, b and out, with canaries around out."""
    shape = (9, 20, 40)

    def work(group):
        a, b = inputs(group, op, shape, BF16)
        expected = None
        for layout in LAYOUTS:
            canary = Canary(shape[0] * (1 if op == SCATTER else group.size), shape[1], BF16, layout)
            given = dict(a=lay_out(a, layout), b=lay_out(b, layout), out=canary.tensor)
            y = multiply(group, op, shape, dtype=BF16, config=teams_of(4), **given)
            canary.check()
            expected = y.clone() if expected is None else expected
            assert_same(y, expected)

    simulate(work, ranks=ranks)


@pytest.mark.parametrize(("op", "ranks"), some_are_quick([(SCATTER, 2)], WHO[4:]))
def test_bias_and_residual(op, ranks):
    """Also in other layouts, and a residual that is out."""
    case = Sum(7 * ranks, 20, 40, BF16)

    def work(group):
        call = partial(reduce_reference.call, group, op, case, config=teams_of(4))
        residual = mine(group, op, case.residual())
        call(bias=True)
        call(residual=True)
        call(bias=case.bias().repeat_interleave(2)[::2], residual=lay_out(residual, "transposed"))
        call(bias=True, residual=True, reduce_dtype=torch.float32)
        for layout in ("wide rows", "every second column"):
            canary = Canary(*residual.shape, BF16, layout)
            canary.tensor.copy_(residual)
            call(bias=True, residual=canary.tensor, out=canary.tensor)
            canary.check()

    simulate(work, ranks=ranks)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.thorough
def test_reduce_dtype(dtype):
    """Partials in fp32 are closer to the exact sum, unless the operands have that type as well."""
    case = Sum(18, 18, 200, dtype)

    def work(group):
        exact = mine(group, SCATTER, case.exact(group)[0])
        calls = (
            reduce_reference.call(group, SCATTER, case, config=teams_of(4), reduce_dtype=kind)
            for kind in (dtype, torch.float32)
        )
        return [(y.double() - exact).norm().item() for y in calls]

    for in_its_own, in_float in simulate(work):
        assert (in_float < in_its_own) == (dtype != torch.float32)


@pytest.mark.parametrize(
    ("op", "ranks"), some_are_quick([], [(op, ranks) for op in (GATHER, SCATTER) for ranks in (1, 3)])
)
def test_nothing_beside_the_workspace_is_written(op, ranks, monkeypatch):
    guards = Guards(monkeypatch)

    def work(group):
        for turn, shape in enumerate([(1, 5, 7), (17, 17, 40), (3, 33, 16), (1, 5, 7)]):
            multiply(group, op, shape, turn, config=teams_of(4))

    simulate(work, ranks=ranks)
    guards.check()


# -- sizes and configurations that differ between ranks


@pytest.mark.parametrize(
    ("team", "n"),
    some_are_quick([(4, (0, 5, 40))], [(team, n) for team in (1, 4) for n in ((0, 5, 40), (33, 0, 0), (1, 300, 16))]),
)
def test_n_differs(n, team):
    """A rank without columns takes another kernel, and pushes its rows all the same."""

    def work(group):
        for turn in range(3):
            operator_calls.call(group, Case(5, n, 40, BF16), turn, config=teams_of(team))

    simulate(work, ranks=3, ctas=6, slow={1: 0.05})


@pytest.mark.parametrize(
    ("team", "k"),
    some_are_quick([(4, (0, 40, 7))], [(team, k) for team in (1, 4) for k in ((0, 40, 7), (33, 0, 0), (1, 1, 200))]),
)
def test_k_differs(k, team):
    def work(group):
        for turn in range(2):
            reduce_reference.call(group, SCATTER, Sum(9, 20, k), turn, bias=True, config=teams_of(team))

    simulate(work, ranks=3)


@pytest.mark.thorough
def test_gathering_ranks_may_have_different_teams():
    """Each computes its own columns: the configuration of the others is no business of it, nor is their kernel."""
    configs = [teams_of(4), teams_of(1, tile_m=32), SMALL, teams_of(2, copy_bytes=64, ctas=5)]

    def work(group):
        for turn in range(4):
            config = configs[(group.rank + turn) % 4]
            operator_calls.call(group, Case(5, 20, 40), turn, config=config and chunked(config))

    def chunked(config):
        return mk.Config(**{**vars(config), "chunk_rows": 2})

    simulate(work, ranks=3)


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (teams_of(2), teams_of(4), ["team_ctas=2", "team_ctas=4"]),
        (teams_of(4), SMALL, ["team_ctas=4", "team_ctas=0"]),
        (teams_of(4), teams_of(4, tile_m=32), ["tile_m=16", "tile_m=32"]),
        (teams_of(4), teams_of(4, ctas=4), ["team_ctas=4", "team_ctas=2"]),
        (teams_of(1), teams_of(1, group_m=1), ["group_m=2", "group_m=1"]),
    ],
)
def test_sums_need_the_same_teams_on_every_rank(first, second, words):
    def work(group):
        with pytest.raises(mk.ArgumentError) as caught:
            multiply(group, SCATTER, (5, 20, 40), config=second if group.rank else first)
        for word in words:
            assert word in str(caught.value)
        multiply(group, SCATTER, (5, 20, 40), config=first)

    simulate(work)


def test_ranks_may_have_different_depths_of_tiles():
    configs = [teams_of(4), teams_of(4, tile_k=32), teams_of(4, warps=8, stages=2)]
    simulate(lambda group: multiply(group, SCATTER, (5, 20, 100), config=configs[group.rank]), ranks=3)


@pytest.mark.parametrize("op", some_are_quick([GATHER], [GATHER, SCATTER]))
def test_ranks_may_have_different_numbers_of_ctas(op, monkeypatch):
    """As on GPUs of different sizes, or with other programs on some of them."""
    monkeypatch.setattr(SimLauncher, "ctas", lambda self, rank: 4 + 12 * rank)

    def work(group):
        for turn in range(2):
            multiply(group, op, (5, 20, 100), turn, config=teams_of(16))
            multiply(group, op, (40, 40, 20), turn, config=SMALL)

    guards = Guards(monkeypatch)
    simulate(work)
    guards.check()


# -- many calls, in many schedules


@pytest.mark.parametrize(("op", "ranks"), some_are_quick([(GATHER, 2)], WHO))
def test_calls_alternate(op, ranks):
    """Kernels, shapes, teams and dtypes change from call to call, and share signals, epochs and buffers."""
    calls = [
        ((3, 5, 40), teams_of(4)),
        ((40, 40, 20), SMALL),
        ((1, 20, 40), teams_of(2)),
        ((1, 20, 40), teams_of(2)),
        ((20, 5, 8), None),
        ((33, 17, 20), teams_of(1, ctas=2)),
        ((2, 5, 100), teams_of(16)),
        ((2, 5, 100), SMALL),
    ]

    def work(group):
        for turn, (shape, config) in enumerate(calls + calls[:3]):
            multiply(group, op, shape, turn, dtype=DTYPES[turn % 3], config=config)

    simulate(work, ranks=ranks, slow={ranks - 1: 0.05})


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.thorough
def test_operators_alternate(seed):
    def work(group):
        for turn in range(3):
            multiply(group, GATHER, (3, 20, 40), turn, config=teams_of(4))
            multiply(group, SCATTER, (3, 20, 40), turn, config=teams_of(2))
            multiply(group, REDUCE, (3, 20, 40), turn)

    simulate(work, seed=seed)


@pytest.mark.parametrize("op", [GATHER, SCATTER])
@pytest.mark.thorough
def test_many_calls(op):
    def work(group):
        for turn in range(30):
            multiply(group, op, (2, 6, 40), turn, dtype=BF16, config=teams_of(2))

    simulate(work, seed=3)


@pytest.mark.parametrize("op", [GATHER, SCATTER])
@pytest.mark.thorough
def test_groups_and_streams(op):
    """Each group and each stream has a workspace of its own."""

    def work(group):
        part = group.split(group.rank % 2)
        for turn in range(2):
            multiply(group, op, (2, 20, 40), turn, config=teams_of(4))
            multiply(part, op, (3, 20, 40), turn, config=teams_of(2))
        results = []
        for turn in range(4):
            a, b = inputs(group, op, (2, 5 + turn, 40), torch.float32, turn)
            with group.world.stream(group.world_rank, turn % 2):
                results.append((getattr(mk, op)(a, b, config=teams_of(4)), a, b))  # a and b are read later
        group.synchronize()
        for turn, (y, *_) in enumerate(results):
            assert_same(multiply(group, op, (2, 5 + turn, 40), turn, config=teams_of(4)), y)

    simulate(work, ranks=4)


@pytest.mark.parametrize("options", [{"late": {1: 3000}}, {"slow": {0: 0.02}}, {"late": {0: 3000}, "slow": {1: 0.02}}])
@pytest.mark.parametrize("op", [GATHER, SCATTER])
@pytest.mark.thorough
def test_stragglers(op, options):
    def work(group):
        for turn in range(4):
            multiply(group, op, (3, 20, 40), turn, config=teams_of(4))

    simulate(work, **options)


@pytest.mark.parametrize(("op", "ranks"), some_are_quick([(SCATTER, 2)], WHO))
def test_all_schedules_give_the_same_bits(op, ranks):
    def work(group):
        return multiply(group, op, (5, 20, 100), dtype=BF16, config=teams_of(4))

    expected = simulate(work, ranks=ranks)
    for seed, options in enumerate([{}, {"slow": {0: 0.02}}, {"late": {ranks - 1: 500}}, {"ctas": 9}], start=1):
        for y, z in zip(simulate(work, ranks=ranks, seed=seed, **options), expected):
            assert_same(y, z)


@pytest.mark.thorough
def test_tiles_one_after_the_other():
    """Sums by one CTA for each tile: no CTA waits for a later one of its rank."""

    def work(group):
        for turn in range(2):
            multiply(group, SCATTER, (40, 40, 20), turn, config=teams_of(1))

    simulate(work, resident=1)


@pytest.mark.parametrize("op", [GATHER, SCATTER])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.thorough
def test_many_seeds(op, seed):
    scenarios = [
        FewRows((1, 1 + seed), op, team=team, rows=rows, columns=columns, ctas=8, calls=3)
        for team, rows, columns in [(4, 3, (20,)), (2, 17, (5, 33)), (1, 20, (40, 5))]
    ]
    for scenario in scenarios:
        scenario.run(seed)


# -- gradients, traces, empty calls


@pytest.mark.parametrize("op", some_are_quick([REDUCE], OPS))
def test_gradients(op):
    """The configuration goes through autograd, and the calls of the gradient share the group with it."""
    options = dict(config=teams_of(4))

    def work(group):
        rows = 3 if op == GATHER else 3 * group.size
        for dtype in (torch.float32, BF16):
            case = gradient_reference.Case(op, (rows, 40), 20, dtype, bias=True, residual=op != GATHER, options=options)
            gradient_reference.check(group, case, twice=False)

    simulate(work, ranks=1 if op == REDUCE else 2)


@pytest.mark.parametrize("op", [GATHER, SCATTER])
@pytest.mark.thorough
def test_traces(op):
    def work(group):
        shape = (5, 20, 100)
        before = multiply(group, op, shape, config=teams_of(4))
        with mk.trace() as trace:
            assert_same(multiply(group, op, shape, config=teams_of(4)), before)
        return trace

    trace = simulate(work)[0]
    arrival = "wait for arrived" if op == GATHER else "wait for partial"
    for rank in range(2):
        for kind in ("launch", "tile", "push", "wait for partial sum", arrival):
            assert trace.of(rank, kind), kind
        assert {event.index for event in trace.of(rank, "tile")} == {0, 1}


@pytest.mark.parametrize("op", some_are_quick([GATHER], OPS))
def test_empty(op):
    def work(group):
        for shape in ((0, 5, 6), (5, 0, 6), (5, 6, 0), (0, 0, 0)):
            assert str(explain(group, op, shape, teams_of(4))).startswith(op)
            multiply(group, op, shape, config=teams_of(4))
        multiply(group, op, (5, 6, 7), config=teams_of(4))

    simulate(work, ranks=1 if op == REDUCE else 2)


# -- which calls take these kernels


@pytest.mark.thorough
def test_which_calls_take_them():
    """In the simulator only those that ask for teams."""
    shape = (3, 20, 40)

    def work(group):
        in_one_node, several = group.nodes == 1, group.size > 1
        for op in OPS:
            assert not explain(group, op, shape, None).few_rows
            assert not explain(group, op, shape, SMALL).few_rows
            found = explain(group, op, shape, teams_of(2))
            assert found.few_rows == (in_one_node and not (several and op == REDUCE))
            assert ("few rows" in str(found)) == found.few_rows
            multiply(group, op, shape, config=teams_of(2))
        _, gathered = mk.all_gather_matmul(
            torch.ones(3, 40), torch.ones(40, 20), return_gathered=True, config=teams_of(2)
        )  # fmt: skip
        assert gathered.shape == (3 * group.size, 40)

    for cluster in ((1, 1), (1, 2), (2, 1)):
        run(work, cluster=cluster)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("op", OPS)
def test_more_ctas_than_there_are(op, ranks):
    """They are refused, as without teams."""

    def work(group):
        for ctas, words in ((7, "only 6 CTAs"), (0, "at least 1")):
            with pytest.raises(mk.ArgumentError, match=words):
                multiply(group, op, (3, 20, 40), config=teams_of(2, ctas=ctas))

    simulate(work, ranks=ranks, ctas=6)


def test_a_device_with_more_ctas_than_a_launch_may_have():
    simulate(lambda group: multiply(group, GATHER, (3, 20, 40), config=teams_of(16)), ctas=600)


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_plans(dtype):
    """Tiles of which there is at most one for each CTA, and teams that they leave room for."""
    device = torch.device("cuda")
    for rows in [*range(1, 20), 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 200, 255, 256, 257, 1000, 4096]:
        for n in (1, 8, 63, 64, 65, 128, 1000, 1024, 4096, 8192, 14336, 28672, 128256):
            for k in (None, 0, 1, 127, 128, 256, 1024, 8192):
                for ctas in (1, 2, 5, 16, 66, 108, 132, 148):
                    found = planning.few_rows(device, dtype, rows, n, k, ctas)
                    if found is None:
                        height = 128 if rows > 64 else 1 << max(rows - 1, 15).bit_length()
                        assert math.ceil(rows / height) * math.ceil(n / 128) > ctas
                        continue
                    tiles = math.ceil(rows / found.tile_m) * math.ceil(n / found.tile_n)
                    assert tiles * found.team <= ctas
                    assert found.team & (found.team - 1) == 0
                    assert 1 <= found.team <= min(16, found.tile_m)
                    assert found.tile_m >= min(rows, 64)
                    if k is not None and found.team > 1:
                        assert k // found.team >= 2 * found.tile_k, "a member has fewer than two steps"
    for other in (torch.device("cpu"), torch.float32):
        given = (other, dtype) if isinstance(other, torch.device) else (device, other)
        assert planning.few_rows(*given, 16, 1024, 8192, 132) is None


# -- compiled for GPUs that are not there
