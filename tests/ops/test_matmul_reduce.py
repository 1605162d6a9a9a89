"""matmul_reduce_scatter and matmul_all_reduce on simulated clusters: right, with the same bits on every schedule
(and, for all-reduce, on every rank), for every shape, layout and configuration."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support.operator_calls import (
    CLUSTERS,
    DTYPES,
    LAYOUTS,
    Canary,
    Guards,
    assert_same,
    cluster_name,
    lay_out,
    run,
    time_limit,
)
from support.patience import HANG
from support.reduce_reference import ONE_NODE, SMALL, WAYS, Sum, call, check, choose, mine, name_of, op_of

import mkernel as mk
from mkernel.ops.reduce.all_reduce import plan as all_reduce_plan
from mkernel.runtime.group import set_current

NODES = [cluster for cluster in CLUSTERS if cluster[0] > 1]


@pytest.fixture(params=WAYS)
def way(request, monkeypatch):
    choose(request.param, monkeypatch)
    return request.param


def rows_for(way, rows, cluster):
    """m of a case with so many rows per rank; all-reduce has a remainder."""
    size = cluster[0] * cluster[1]
    return rows * size if name_of(way) == "matmul_reduce_scatter" else rows * size + 1


def skip_unless_it_suits(way, cluster):
    if way in ONE_NODE and (cluster[0] > 1 or cluster[1] == 1):
        pytest.skip(f"{way} is for one node of several ranks")
    if way == "sliced" and (cluster[0] > 1 or cluster[1] != 2):
        pytest.skip("slices are for one node of 2, 4 or 8 ranks")


# -- many schedules

# rows of a rank, n, k: primes, 1, a tile and one more, less than 16 bytes in a row
SHAPES = [(33, 7, 17), (1, 1, 1), (7, 33, 5), (16, 16, 16), (2, 31, 33), (5, 17, 1)]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("cluster", CLUSTERS, ids=cluster_name)
def test_schedules(way, cluster, seed):
    skip_unless_it_suits(way, cluster)
    number = seed + sum(cluster)
    rows, n, k = SHAPES[number % len(SHAPES)]
    case = Sum(rows_for(way, rows, cluster), n, k, DTYPES[number % 3])
    run(lambda group: call(group, way, case, bias=seed % 2 == 0, residual=seed > 0), cluster=cluster, seed=seed)


@pytest.mark.parametrize(("cluster", "ctas"), [((1, 3), 1), ((1, 3), 4), ((2, 2), 7), ((3, 1), 4)], ids=cluster_name)
def test_many_tiles(way, cluster, ctas):
    """The tiles that are left for the last round go to few CTAs or to many."""
    skip_unless_it_suits(way, cluster)
    case = Sum(rows_for(way, 18, cluster), 34, 9, torch.bfloat16)
    run(lambda group: call(group, way, case, config=SMALL), cluster=cluster, seed=ctas, ctas=ctas)


@pytest.mark.parametrize("cluster", CLUSTERS, ids=cluster_name)
def test_ctas_one_after_the_other(way, cluster):
    """Rule 4: no CTA waits for a later one of its rank."""
    skip_unless_it_suits(way, cluster)
    case = Sum(rows_for(way, 5 if cluster[0] * cluster[1] > 4 else 17, cluster), 20, 5)

    def work(group):
        for turn in range(2):
            call(group, way, case, turn, config=SMALL)

    run(work, cluster=cluster, resident=1)


@pytest.mark.parametrize("options", [{"late": {1: 3000}}, {"late": {0: 3000}, "slow": {1: 0.02}}])
@pytest.mark.parametrize("cluster", [(1, 2), (2, 1), (2, 2)], ids=cluster_name)
def test_stragglers(way, cluster, options):
    skip_unless_it_suits(way, cluster)
    case = Sum(rows_for(way, 5, cluster), 10, 12)

    def work(group):
        for turn in range(3):
            call(group, way, case, turn, config=SMALL)

    run(work, cluster=cluster, **options)


def test_all_schedules_give_the_same_bits(way):
    cluster = (1, 3) if way in ONE_NODE else (2, 2)
    case = Sum(4 if name_of(way) == "matmul_reduce_scatter" else 17, 3, 8, torch.bfloat16)

    def work(group):
        return call(group, way, case, bias=True, config=SMALL)

    expected = run(work, cluster=cluster, seed=0)
    if name_of(way) == "matmul_all_reduce":
        for other in expected[1:]:
            assert_same(other, expected[0])
    for seed in range(1, 7):
        options = [{}, {"resident": 1}, {"slow": {2: 0.02}}][seed % 3]
        for y, z in zip(run(work, cluster=cluster, seed=seed, **options), expected):
            assert_same(y, z)


def test_ranks_of_an_all_reduce_have_the_same_bits(way):
    """With every dtype, and many tiles."""
    if way == "matmul_reduce_scatter":
        return
    for dtype, cluster in zip(DTYPES, [(1, 3), (1, 2), (1, 3)] if way in ONE_NODE else [(1, 3), (2, 2), (3, 1)]):
        case = Sum(37, 20, 30, dtype)
        first, *others = run(lambda group: call(group, way, case, residual=True, config=SMALL), cluster=cluster)
        for other in others:
            assert_same(other, first)


# -- what travels


@pytest.mark.parametrize(("cluster", "dtype"), [*(((1, 2), dtype) for dtype in DTYPES), ((2, 2), torch.bfloat16)])
def test_reduce_dtype(way, cluster, dtype):
    skip_unless_it_suits(way, cluster)
    case = Sum(rows_for(way, 9, cluster), 18, 200, dtype)

    def work(group):
        exact, _ = case.exact(group)
        errors = []
        for reduce_dtype in (dtype, torch.float32):
            y = call(group, way, case, reduce_dtype=reduce_dtype)
            errors.append((y.double() - mine(group, way, exact)).norm().item())
        return errors

    for in_its_own, in_float in run(work, cluster=cluster):
        assert in_float <= in_its_own
        assert (in_float < in_its_own) == (dtype != torch.float32)


@pytest.mark.parametrize("cluster", [*NODES, (1, 3)], ids=cluster_name)
def test_what_moves(way, cluster):
    """One sum of a node crosses the network, once; parts go to the rank that adds them."""
    skip_unless_it_suits(way, cluster)
    nodes, gpus = cluster
    size = nodes * gpus
    tile = 16 * 16 * 2
    # one tile of every rank's rows; or, all-reduce, one CTA that takes a tile of every owner
    m = 16 * size if way == "matmul_reduce_scatter" else 16 * gpus
    case = Sum(m, 16, 8, torch.bfloat16)

    def work(group):
        call(group, way, case, config=mk.Config(tile_m=16, tile_n=16, ctas=1))
        group.barrier()
        return group.world.traffic

    traffic = run(work, cluster=cluster)[0]
    for source in range(size):
        for target in range(size):
            same_node = source // gpus == target // gpus and source != target
            counterparts = source % gpus == target % gpus and source // gpus != target // gpus
            if way == "matmul_all_reduce" and nodes > 2:
                counterparts &= 0 in (source // gpus, target // gpus)  # node 0 is the home of this CTA's first tile
            assert traffic.network[source][target] == (tile if counterparts else 0)
            # all-reduce: a part is pushed to the owner, and a finished tile read back, or handed out by the switch
            times = {"matmul_reduce_scatter": nodes, "matmul_all_reduce": 2, "multicast": 1}
            moved = times[way] * tile
            assert traffic.nvlink[source][target] == (moved if same_node else 0)


def test_parts_are_pushed_while_others_are_computed(way):
    cluster = (1, 3) if way in ONE_NODE else (2, 2)
    case = Sum(rows_for(way, 32, cluster), 32, 16)

    def work(group):
        call(group, way, case, config=SMALL)
        group.barrier()
        return group.world.traffic

    traffic = run(work, cluster=cluster)[0]
    for before, all_of_them in zip(traffic.before_last_arrival, traffic.multiplications):
        assert before > 0.5 * all_of_them


# -- layouts of a, b, out, residual and bias


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout != "plain"])
@pytest.mark.thorough
def test_layouts(way, layout):
    """All tensors in a layout, each in its turn; nothing beside out is written."""
    case = Sum(36, 18, 24, torch.bfloat16)

    def work(group):
        call(group, way, case, a=lay_out(case.a(group.rank), layout))
        call(group, way, case, b=lay_out(case.b(group.rank), layout), bias=case.bias().repeat_interleave(2)[::2])
        residual = mine(group, way, case.residual())
        call(group, way, case, residual=lay_out(residual, layout))
        canary = Canary(*residual.shape, case.dtype, layout)
        assert call(group, way, case, out=canary.tensor, config=SMALL) is canary.tensor
        canary.check()

    run(work)


@pytest.mark.parametrize("cluster", [(1, 2), (2, 1)], ids=cluster_name)
def test_out_may_be_the_residual(way, cluster):
    skip_unless_it_suits(way, cluster)
    case = Sum(rows_for(way, 18, cluster), 20, 8, torch.bfloat16)

    def work(group):
        for layout in ("wide rows", "transposed"):
            canary = Canary(*mine(group, way, case.residual()).shape, case.dtype, layout)
            canary.tensor.copy_(mine(group, way, case.residual()))
            call(group, way, case, residual=canary.tensor, out=canary.tensor, config=SMALL)
            canary.check()

    run(work, cluster=cluster)


@pytest.mark.parametrize("cluster", [(1, 1), (1, 3), (2, 2)], ids=cluster_name)
def test_nothing_beside_the_workspace_is_written(way, cluster, monkeypatch):
    skip_unless_it_suits(way, cluster)
    guards = Guards(monkeypatch)

    def work(group):
        for turn, (rows, n) in enumerate([(3, 5), (17, 17), (1, 17)]):
            call(group, way, Sum(rows_for(way, rows, cluster), n, 7), turn, config=SMALL)

    run(work, cluster=cluster)
    guards.check()


# -- empty inputs, and k that differs


@pytest.mark.parametrize("cluster", [(1, 1), (1, 2), (2, 1)], ids=cluster_name)
def test_empty(way, cluster):
    skip_unless_it_suits(way, cluster)

    def work(group):
        for m, n, k in ((0, 5, 6), (group.size * 5, 0, 6), (group.size * 5, 6, 0), (0, 0, 0)):
            case = Sum(m, n, k)
            y = call(group, way, case, bias=True, residual=True)
            assert y.shape == mine(group, way, case.residual()).shape
            canary = Canary(*y.shape, case.dtype)
            call(group, way, case, out=canary.tensor)
            canary.check()
        call(group, way, Sum(group.size * 5, 6, 7))

    run(work, cluster=cluster)


@pytest.mark.parametrize("k", [(0, 40, 7), (33, 0, 0)])
@pytest.mark.parametrize("cluster", [(1, 3), (3, 1)], ids=cluster_name)
def test_k_differs(way, cluster, k):
    skip_unless_it_suits(way, cluster)

    def work(group):
        for turn in range(2):
            call(group, way, Sum(21, 9, k), turn, bias=True)

    run(work, cluster=cluster)


# -- many calls


@pytest.mark.parametrize(("cluster", "calls"), [((1, 2), 30), ((2, 1), 30)])
def test_many_calls(way, cluster, calls):
    skip_unless_it_suits(way, cluster)
    case = Sum(4, 6, 8, torch.bfloat16)

    def work(group):
        for turn in range(calls):
            call(group, way, case, turn, config=SMALL)

    run(work, cluster=cluster, seed=3)


@pytest.mark.parametrize(("cluster", "slow"), [((1, 2), 0), ((2, 1), 1), ((2, 2), 1)], ids=cluster_name)
def test_shapes_alternate(way, cluster, slow):
    """Numbers of tiles differ from call to call: slots and signals change their places, halves must not."""
    skip_unless_it_suits(way, cluster)

    def work(group):
        for turn, (rows, n, dtype) in enumerate([(9, 20, 0), (1, 3, 1), (3, 33, 2), (1, 3, 0), (9, 20, 1)]):
            case = Sum(rows_for(way, rows, cluster), n, 4, DTYPES[dtype])
            call(group, way, case, turn, reduce_dtype=torch.float32 if turn % 2 else None, config=SMALL)

    run(work, cluster=cluster, seed=slow, slow={slow: 0.02})


def test_slices_and_two_levels_alternate():
    """Both keep to one workspace, with different signals."""

    def work(group):
        for turn, n in enumerate([200, 32, 200, 32, 32, 200]):
            case = Sum(3, n, 4)
            config = mk.Config(tile_m=16, tile_n=32, tile_k=16)
            sliced = mk.explain("matmul_all_reduce", case.a(0), case.b(0), config=config).sliced
            assert sliced == (n == 32)
            call(group, "matmul_all_reduce", case, turn, config=config)

    for seed in range(2):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(all_reduce_plan, "LARGEST_SLICED", 1000)
            run(work, cluster=(1, 2), seed=seed, slow={seed: 0.05})


# -- several groups and streams


def test_groups_interleave(way):
    def work(group):
        part = group.split(group.rank % 2)
        for turn in range(3):
            call(group, way, Sum(8, 5, 9), turn)
            call(part, way, Sum(6, 6, 8), turn)

    run(work, cluster=(1, 4) if way in ONE_NODE else (2, 2))


def test_operators_interleave():
    def work(group):
        for turn in range(3):
            for each in ("matmul_reduce_scatter", "matmul_all_reduce"):
                call(group, each, Sum(8, 5, 9), turn)
            mk.all_gather_matmul(torch.ones(3, 4), torch.ones(4, 5))

    run(work, cluster=(2, 2))


def test_calls_on_two_streams(way):
    """Calls are queued without waiting, on two streams; each stream has a workspace of its own."""

    def work(group):
        results = []
        for turn in range(4):
            case = Sum(8, 5 + turn, 9)
            a, b = case.a(group.rank, turn), case.b(group.rank, turn)
            with group.world.stream(group.world_rank, turn % 2):
                results.append((case, op_of(way)(a, b), a, b))
        group.synchronize()
        for turn, (case, y, _, _) in enumerate(results):
            check(group, way, case, y, turn)

    for seed in range(2):
        run(work, cluster=(1, 2) if way in ONE_NODE else (2, 2), seed=seed)


@pytest.mark.skipif(torch.cuda.is_available(), reason="mk.init would take the GPU")
def test_one_rank_without_spawn():
    try:
        group = mk.init()
        for each in ("matmul_reduce_scatter", "matmul_all_reduce"):
            call(group, each, Sum(33, 9, 17), bias=True, residual=True)
    finally:
        set_current(None)


# -- configurations

CONFIGS = [
    mk.Config(tile_m=16, tile_n=64, tile_k=32),
    mk.Config(tile_m=64, tile_n=16, tile_k=16, group_m=1),
    mk.Config(tile_m=16, tile_n=16, ctas=5),
    mk.Config(tile_m=16, group_m=7, ctas=2),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: ", ".join(f"{n}={v}" for n, v in vars(c).items() if v))
@pytest.mark.parametrize("cluster", [(1, 2), (2, 1)], ids=cluster_name)
def test_config(way, cluster, config):
    skip_unless_it_suits(way, cluster)
    case = Sum(rows_for(way, 20, cluster), 40, 17)
    run(lambda group: call(group, way, case, config=config), cluster=cluster, seed=1)


def test_ranks_may_have_different_depths_of_tiles(way):
    configs = [mk.Config(tile_k=16), mk.Config(tile_k=32), mk.Config(tile_k=16, warps=8)]
    run(lambda group: call(group, way, Sum(36, 20, 50), config=configs[group.rank]), cluster=(1, 3))


# -- explain


def test_explain(way):
    def work(group):
        if group.rank:
            return None  # nobody else has to take part
        a, b = torch.zeros(40, 24), torch.zeros(24, 15)
        out = torch.zeros(40 if name_of(way) == "matmul_all_reduce" else 20, 15)
        plans = [
            mk.explain(name_of(way), a, b),
            mk.explain(name_of(way), a[:, ::2], torch.zeros(12, 16), config=SMALL),
            mk.explain(name_of(way), a, b, out=out, residual=out, reduce_dtype=torch.float32),
            mk.explain(name_of(way), torch.zeros(0, 24), b),
        ]
        return [str(plan) for plan in plans]

    plain, strided, chosen, empty = run(work, cluster=(1, 2))[0]
    for plan in (plain, strided, chosen, empty):
        assert plan.startswith(f"{name_of(way)}: tiles")
        multicast = way == "multicast" and plan is not empty
        assert ("multicast is not used" in plan) == (name_of(way) == "matmul_all_reduce" and not multicast)
        assert "elements go over NVLink" in plan
    assert "tiles 32x32x32" in plain
    assert "b has no contiguous, 16-byte aligned rows" in plain
    assert "a has no contiguous, 16-byte aligned rows" in strided
    assert "tiles 16x16x16" in strided
    assert "residual has no contiguous, 16-byte aligned rows" in chosen
    assert "travel as float32" in chosen


def test_small_results_are_cut_into_slices():
    def work(group):
        def sliced(m, n):
            a, b = torch.zeros(m, 8, dtype=torch.bfloat16), torch.zeros(8, n, dtype=torch.bfloat16)
            return mk.explain("matmul_all_reduce", a, b).sliced

        return sliced(1, 128), sliced(1024, 8192)

    assert run(work, cluster=(1, 2))[0] == (True, False)
    assert run(work, cluster=(1, 3))[0] == (False, False)  # slices of 2, 4 or 8
    assert run(work, cluster=(2, 2))[0] == (False, False)
    assert run(work, cluster=(1, 1))[0] == (False, False)


# -- time


def test_a_timeout_of_hours_ends_too(way):
    """The clock is simulated: a timeout must not take as long as it says, let alone longer."""

    def work(group):
        call(group, way, Sum(4, 3, 8))
        if group.rank:
            with pytest.raises(mk.CommTimeout):
                call(group, way, Sum(4, 3, 8))

    with time_limit():
        run(work, cluster=(1, 2), timeout=100 * HANG)


# -- anything


@settings(
    max_examples=15, deadline=None, derandomize=True, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
)
@given(
    way=st.sampled_from(WAYS),
    cluster=st.sampled_from([(1, 1), (1, 2), (1, 3), (2, 1), (3, 1), (2, 2)]),
    rows=st.integers(1, 40),
    n=st.integers(1, 40),
    k=st.integers(0, 40),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 10**6),
    layouts=st.tuples(*[st.sampled_from(list(LAYOUTS))] * 4),
    bias=st.booleans(),
    residual=st.booleans(),
    float_parts=st.booleans(),
    tiles=st.sampled_from([None, SMALL]),
)
def test_anything(way, cluster, rows, n, k, dtype, seed, layouts, bias, residual, float_parts, tiles):
    case = Sum(rows_for(way, rows, cluster), n, k, dtype)

    def work(group):
        for turn in range(2):
            canary = Canary(*mine(group, way, case.residual()).shape, dtype, layouts[2])
            more = lay_out(mine(group, way, case.residual(turn)), layouts[3]) if residual else False
            call(
                group, way, case, turn, a=lay_out(case.a(group.rank, turn), layouts[0]),
                b=lay_out(case.b(group.rank, turn), layouts[1]), bias=bias, residual=more, out=canary.tensor,
                reduce_dtype=torch.float32 if float_parts else None, config=tiles,
            )  # fmt: skip
            canary.check()

    with pytest.MonkeyPatch.context() as patch:
        choose(way, patch)
        run(work, cluster=cluster, seed=seed)
