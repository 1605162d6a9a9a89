"""all_gather_matmul on simulated clusters: right, for every shape, layout, schedule and configuration."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support.operator_calls import (
    CLUSTERS,
    DTYPES,
    LAYOUTS,
    SMALL_TILES,
    Canary,
    Case,
    Guards,
    assert_product,
    assert_same,
    call,
    cluster_name,
    lay_out,
    run,
    time_limit,
)
from support.patience import HANG

import mkernel as mk
from mkernel.runtime.group import set_current

# ragged: primes, 1, a tile and one more, less than 16 bytes in a row
SHAPES = [(33, 7, 17), (1, 1, 1), (7, 33, 5), (16, 16, 16), (2, 31, 33), (13, 3, 40), (5, 17, 1), (1, 40, 8)]
LARGER_SHAPES = [(33, 33, 33), (67, 31, 37), (64, 64, 32), (37, 65, 19)]
SEVERAL = [cluster for cluster in CLUSTERS if cluster != (1, 1)]
NODES = [cluster for cluster in CLUSTERS if cluster[0] > 1]


over_clusters = pytest.mark.parametrize("cluster", CLUSTERS, ids=cluster_name)


# -- many schedules


@pytest.mark.parametrize("seed", range(2))
@over_clusters
def test_schedules(cluster, seed):
    number = 2 * CLUSTERS.index(cluster) + seed
    case = Case(*SHAPES[number % len(SHAPES)], DTYPES[number % len(DTYPES)])
    run(call, case, cluster=cluster, seed=seed)


@pytest.mark.parametrize("shape", LARGER_SHAPES)
@pytest.mark.parametrize("cluster", [(1, 1), (1, 2), (1, 3), (2, 1), (2, 2)], ids=cluster_name)
def test_several_tiles(cluster, shape):
    run(call, Case(*shape, torch.bfloat16), cluster=cluster, seed=sum(shape))


@pytest.mark.parametrize("resident", [1, 2])
@over_clusters
def test_ctas_one_after_the_other(cluster, resident):
    """Rule 4: no CTA waits for a later one of its rank."""
    run(call, Case(11, 18, 9), cluster=cluster, seed=resident, resident=resident)


@pytest.mark.parametrize("config", [mk.Config(join_tiles=2), mk.Config(intra_ctas=2, send_ctas=2)])
@pytest.mark.parametrize("cluster", [(2, 2), (3, 1)], ids=cluster_name)
def test_ctas_one_after_the_other_with_helpers(cluster, config):
    def work(group):
        for turn in range(3):
            call(group, Case(40, 20, 8), turn, config=config)

    run(work, cluster=cluster, resident=1)


@pytest.mark.parametrize("options", [{"late": {1: 3000}}, {"slow": {0: 0.02}}, {"late": {0: 3000}, "slow": {1: 0.02}}])
@pytest.mark.parametrize("cluster", [(1, 2), (2, 1), (2, 2)], ids=cluster_name)
def test_stragglers(cluster, options):
    def work(group):
        for turn in range(4):
            call(group, Case(9, 5, 12), turn)

    run(work, cluster=cluster, **options)


def test_the_same_seed_is_the_same_run():
    case = Case(17, 9, 20, torch.bfloat16)

    def work(group):
        return call(group, case), group.world

    (first, world), *_ = run(work, cluster=(2, 2), seed=5)
    (again, same_world), *_ = run(work, cluster=(2, 2), seed=5)
    _, other_world = run(work, cluster=(2, 2), seed=6)[0]
    assert_same(first, again)
    assert world.scheduler.steps == same_world.scheduler.steps
    assert world.scheduler.steps != other_world.scheduler.steps
    assert vars(world.traffic) == vars(same_world.traffic)


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_schedules_give_the_same_bits(dtype):
    case = Case(19, 9, 70, dtype)
    expected = run(call, case, cluster=(2, 2), seed=0)
    for seed, options in enumerate([{}, {"resident": 1}, {"slow": {2: 0.02}}, {"ctas": 9}], start=1):
        for y, z in zip(run(call, case, cluster=(2, 2), seed=seed, **options), expected):
            assert_same(y, z)


def test_ranks_with_the_same_b_get_the_same_bits():
    case = Case(19, 9, 70, torch.bfloat16)

    def work(group):
        return call(group, case, b=case.weights(0))

    first, *others = run(work, cluster=(2, 2))
    for other in others:
        assert_same(other, first)


def test_ranks_may_share_a_tensor():
    case = Case(21, 48, 16)
    b = case.weights(0)

    def work(group):
        for turn in range(3):
            call(group, case, turn, b=b)

    for seed in range(2):
        run(work, cluster=(1, 2), seed=seed)


# -- layouts of a, b and out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout != "plain"])
@pytest.mark.parametrize("cluster", [(1, 1), (1, 2), (2, 1)], ids=cluster_name)
def test_layout_of_a(cluster, layout, dtype):
    case = Case(18, 9, 24, dtype)

    def work(group):
        call(group, case, a=lay_out(case.rows(group.rank), layout))

    run(work, cluster=cluster)


def test_every_rank_has_another_layout_of_a():
    case = Case(18, 9, 24, torch.float16)

    def work(group):
        for turn in range(2):
            for layout in ("wide rows", "transposed", "off by one", "plain"):
                turned = list(LAYOUTS)[(list(LAYOUTS).index(layout) + group.rank) % len(LAYOUTS)]
                call(group, case, turn, a=lay_out(case.rows(group.rank, turn), turned))

    run(work, cluster=(2, 2))


@pytest.mark.parametrize("n", [1, 8, 37])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_of_b(layout, n):
    case = Case(9, n, 24, torch.bfloat16)

    def work(group):
        call(group, case, b=lay_out(case.weights(group.rank), layout))

    run(work)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [7, 16, 40])
@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout != "plain"])
def test_layout_of_out(layout, n, dtype):
    case = Case(5, n, 8, dtype)

    def work(group):
        canary = Canary(group.size * case.m, n, dtype, layout)
        assert call(group, case, out=canary.tensor) is canary.tensor
        canary.check()

    run(work, cluster=(1, 2))


@over_clusters
def test_nothing_beside_out_is_written(cluster):
    case = Case(35, 33, 17, torch.bfloat16)

    def work(group):
        for layout in ("wide rows", "odd column"):
            canary = Canary(group.size * case.m, case.n, case.dtype, layout)
            call(group, case, out=canary.tensor, config=mk.Config(chunk_rows=9))
            canary.check()

    run(work, cluster=cluster)


def test_an_expanded_a():
    case = Case(9, 5, 8)

    def work(group):
        row = case.rows(group.rank)[:1]
        everyone = torch.cat([case.rows(rank)[:1].expand(9, 8) for rank in range(group.size)])
        b = case.weights(group.rank)
        assert_product(mk.all_gather_matmul(row.expand(9, 8), b), everyone, b)

    run(work, cluster=(2, 2))


# -- canaries around what the library allocates


@pytest.mark.parametrize("heap", [False, True])
@over_clusters
def test_nothing_beside_the_workspace_is_written(cluster, heap, monkeypatch):
    guards = Guards(monkeypatch)

    def work(group):
        for turn, case in enumerate([Case(3, 5, 7), Case(35, 3, 8), Case(3, 5, 7), Case(8, 9, 16)]):
            a = case.rows(group.rank, turn)
            if heap:
                a = mk.empty(case.m, case.k, dtype=case.dtype).copy_(a)
            call(group, case, turn, a=a, config=mk.Config(tile_m=16, tile_n=16, tile_k=16, chunk_rows=9))

    run(work, cluster=cluster)
    guards.check()


# -- gathered rows


@pytest.mark.parametrize("layout", ["plain", "transposed", "wide rows"])
@over_clusters
def test_return_gathered(cluster, layout):
    case = Case(11, 34, 7, torch.bfloat16)

    def work(group):
        a, b = lay_out(case.rows(group.rank), layout), case.weights(group.rank)
        y, gathered = mk.all_gather_matmul(a, b, return_gathered=True)
        assert_product(y, case.gathered(group.size), b)
        assert_same(gathered, case.gathered(group.size))

    run(work, cluster=cluster)


@pytest.mark.parametrize("cluster", [(1, 1), (1, 2), (2, 1)], ids=cluster_name)
def test_return_gathered_without_columns(cluster):
    case = Case(11, 0, 7)

    def work(group):
        y, gathered = mk.all_gather_matmul(case.rows(group.rank), case.weights(group.rank), return_gathered=True)
        assert y.shape == (group.size * 11, 0)
        assert_same(gathered, case.gathered(group.size))

    run(work, cluster=cluster)


# -- empty inputs, and n that differs


@pytest.mark.parametrize("shape", [(0, 5, 6), (5, 0, 6), (5, 6, 0), (0, 0, 0), (0, 5, 0)])
@pytest.mark.parametrize("cluster", [(1, 1), (1, 2), (2, 2)], ids=cluster_name)
def test_empty(cluster, shape):
    case = Case(*shape)

    def work(group):
        call(group, case)
        call(group, Case(5, 6, 7))
        canary = Canary(group.size * case.m, case.n, case.dtype)
        call(group, case, out=canary.tensor)
        canary.check()

    run(work, cluster=cluster)


@pytest.mark.parametrize("n", [(0, 5, 9), (5, 0, 0), (1, 33, 64)])
@pytest.mark.parametrize("cluster", [(1, 3), (3, 1)], ids=cluster_name)
def test_n_differs(cluster, n):
    def work(group):
        for turn in range(3):
            call(group, Case(18, n, 9), turn)

    run(work, cluster=cluster)


def test_n_differs_on_a_large_device():
    """How many CTAs copy may follow from n, but ranks must agree on the chunks."""

    def work(group):
        call(group, Case(64, (1, 400, 0), 16))

    run(work, cluster=(1, 3), ctas=16)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("cluster", [(1, 2), (2, 1), (3, 1)], ids=cluster_name)
def test_a_rank_without_columns_does_not_run_ahead(cluster, seed):
    """A rank with n = 0 needs no rows, but they come all the same: rule 3 holds for it, too."""

    def work(group):
        for turn, m in enumerate([9, 4, 4, 9, 3, 8]):
            n = tuple(0 if rank == 0 and turn % 3 < 2 else 3 for rank in range(group.size))
            call(group, Case(m, n, 8), turn, config=mk.Config(tile_m=16, tile_n=16, tile_k=16, chunk_rows=2))

    run(work, cluster=cluster, seed=seed, slow={1: 0.02})


@pytest.mark.parametrize("seed", range(2))
def test_the_workspace_grows_under_a_rank_without_columns(seed):
    def work(group):
        for turn, m in enumerate([1, 20, 40]):
            call(group, Case(m, (0, 3), 8), turn, config=mk.Config(chunk_rows=4))

    run(work, cluster=(2, 1), seed=seed, slow={1: 0.02})


# -- inputs in the symmetric heap


@pytest.mark.parametrize("k", [16, 7])
@pytest.mark.parametrize("cluster", [(1, 2), (2, 1), (2, 2)], ids=cluster_name)
def test_a_in_the_heap(cluster, k):
    case = Case(20, 5, k, torch.bfloat16)

    def work(group):
        a = mk.empty(20, k, dtype=torch.bfloat16)
        for turn in range(3):
            a.copy_(case.rows(group.rank, turn))
            call(group, case, turn, a=a)

    run(work, cluster=cluster)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("cluster", [(1, 2), (2, 1), (2, 2)], ids=cluster_name)
def test_a_may_be_overwritten_after_the_call(cluster, seed):
    """The network must have read a when the launch is over."""
    case = Case(20, 5, 16)

    def work(group):
        a = mk.empty(20, 16, dtype=torch.float32)
        for turn in range(3):
            b = case.weights(group.rank, turn)
            y = mk.all_gather_matmul(a.copy_(case.rows(group.rank, turn)), b, config=mk.Config(chunk_rows=4))
            a.fill_(float("nan"))
            assert_product(y, case.gathered(group.size, turn), b)

    run(work, cluster=cluster, seed=seed)


@pytest.mark.parametrize("offset", [8, 1])
@pytest.mark.parametrize("cluster", [(1, 2), (2, 1), (2, 2)], ids=cluster_name)
def test_a_in_the_middle_of_a_segment(cluster, offset):
    """Offset 1: contiguous rows in the heap, but not aligned."""
    case = Case(9, 5, 16, torch.bfloat16)

    def work(group):
        a = mk.empty(9 * 16 + 8, dtype=torch.bfloat16).fill_(float("nan"))[offset : offset + 9 * 16].view(9, 16)
        call(group, case, a=a.copy_(case.rows(group.rank)))

    run(work, cluster=cluster)


def test_only_some_ranks_have_a_in_the_heap():
    case = Case(9, 5, 16)

    def work(group):
        heap = mk.empty(9, 16, dtype=torch.float32).copy_(case.rows(group.rank))
        call(group, case, a=heap if group.rank % 2 else None)

    run(work, cluster=(2, 2))


def test_a_in_the_heap_of_another_group():
    case = Case(9, 5, 16)

    def work(group):
        a = mk.empty(9, 16, dtype=torch.float32)
        part = group.split(group.rank % 2)
        call(part, case, a=a.copy_(case.rows(part.rank)))

    run(work, cluster=(2, 2))


# -- many calls


@pytest.mark.parametrize(("cluster", "calls"), [((1, 2), 50), ((2, 1), 50), ((1, 3), 10), ((2, 2), 10)])
def test_many_calls(cluster, calls):
    case = Case(5, 6, 8, torch.bfloat16)

    def work(group):
        for turn in range(calls):
            call(group, case, turn, config=SMALL_TILES)

    run(work, cluster=cluster, seed=3)


@pytest.mark.parametrize("slow", [0, 1])
@pytest.mark.parametrize("cluster", [(2, 1), (3, 1), (2, 2)], ids=cluster_name)
@pytest.mark.thorough
def test_shapes_alternate(cluster, slow):
    """The numbers of chunks differ from call to call: the two halves of signals must stay apart."""
    config = mk.Config(tile_m=16, tile_n=16, tile_k=16, chunk_rows=1)

    def work(group):
        for turn, m in enumerate([8, 8, 1, 8, 1, 8]):
            call(group, Case(m, 3, 4), turn, config=config)

    for seed in range(2):
        run(work, cluster=cluster, seed=seed, slow={slow: 0.02})


@pytest.mark.parametrize("cluster", [(1, 2), (2, 2)], ids=cluster_name)
def test_shapes_dtypes_and_configurations_alternate(cluster):
    configs = [None, mk.Config(chunk_rows=3), mk.Config(tile_m=16, chunk_rows=7)]

    def work(group):
        for turn in range(8):
            m = [3, 70, 1, 34][turn % 4]
            call(group, Case(m, 1 + turn, 5 + turn, DTYPES[turn % 3]), turn, config=configs[turn // 2 % 3])

    run(work, cluster=cluster, seed=1)


# -- several groups and streams


def test_groups_interleave():
    def work(group):
        part = group.split(group.rank % 2)
        for turn in range(4):
            call(group, Case(7, 5, 9), turn)
            call(part, Case(5, 6, 8), turn)
            call(part, Case(6, 3, 8), turn + 4)

    for seed in range(2):
        run(work, cluster=(2, 2), seed=seed)


@pytest.mark.parametrize(("ranks", "topology"), [([0, 1, 2], (3, 1)), ([3, 0], (2, 1)), ([1, 0], (1, 2)), ([2], (1, 1)),
                                                 ([0, 2, 1], (3, 1)), ([2, 3, 0, 1], (2, 2))])  # fmt: skip
def test_subset(ranks, topology):
    def work(group):
        if group.rank in ranks:
            part = group.subset(ranks)
            assert part.rank == ranks.index(group.rank)
            assert (part.nodes, part.gpus_per_node) == topology
            for turn in range(2):
                call(part, Case(7, 5, 9), turn)
        call(group, Case(7, 5, 9))

    run(work, cluster=(2, 2))


def test_split_without_some_ranks():
    def work(group):
        part = group.split(None if group.rank == 1 else 0, key=-group.rank)
        if group.rank == 1:
            assert part is None
        else:
            call(part, Case(7, 5, 9))
        call(group, Case(7, 5, 9))

    run(work, cluster=(1, 3))


def test_calls_on_two_streams():
    """Calls are queued without waiting, on two streams; each stream has a workspace of its own."""
    case = Case(9, 5, 8)

    def work(group):
        results = []
        for turn in range(4):
            a, b = case.rows(group.rank, turn), case.weights(group.rank, turn)
            with group.world.stream(group.world_rank, turn % 2):
                results.append((mk.all_gather_matmul(a, b), a, b))
        group.synchronize()
        for turn, (y, _, b) in enumerate(results):
            assert_product(y, case.gathered(group.size, turn), b)

    for seed in range(2):
        run(work, cluster=(2, 2), seed=seed)


def test_the_workspace_grows_while_calls_are_queued():
    def work(group):
        results = []
        for turn, m in enumerate([4, 20, 4, 50]):
            case = Case(m, 5, 8)
            a, b = case.rows(group.rank, turn), case.weights(group.rank, turn)
            with group.world.stream(group.world_rank, "side"):
                results.append((case, mk.all_gather_matmul(a, b), a, b))
        group.synchronize()
        for turn, (case, y, _, b) in enumerate(results):
            assert_product(y, case.gathered(group.size, turn), b)

    for seed in range(3):
        run(work, cluster=(2, 1), seed=seed)


@pytest.mark.skipif(torch.cuda.is_available(), reason="mk.init would take the GPU")
def test_one_rank_without_spawn():
    try:
        group = mk.init()
        for turn in range(2):
            call(group, Case(33, 9, 17), turn)
            assert_product(mk.all_gather_matmul(torch.ones(3, 4), torch.ones(4, 5)), torch.ones(3, 4), torch.ones(4, 5))
    finally:
        set_current(None)


# -- configurations

CONFIGS = [
    mk.Config(tile_m=16, tile_n=16, tile_k=16),
    mk.Config(tile_m=16, tile_n=64, tile_k=32),
    mk.Config(tile_m=64, tile_n=16, tile_k=16, group_m=1),
    mk.Config(chunk_rows=1),
    mk.Config(chunk_rows=5),
    mk.Config(chunk_rows=64),
    mk.Config(intra_ctas=1, send_ctas=3),
    mk.Config(intra_ctas=2, send_ctas=2, chunk_rows=3),
    mk.Config(intra_ctas=3, send_ctas=1, chunk_rows=3),
    mk.Config(join_tiles=0),
    mk.Config(join_tiles=1, tile_m=16, tile_n=16),
    mk.Config(join_tiles=100, tile_m=16),
    mk.Config(ctas=3, intra_ctas=1, send_ctas=1),
    mk.Config(ctas=5, intra_ctas=2, send_ctas=2, join_tiles=3),
    mk.Config(ctas=4, intra_ctas=1, send_ctas=1, join_tiles=1, tile_m=16, tile_n=16),
    mk.Config(group_m=1, tile_m=16),
    mk.Config(group_m=7, tile_m=16, tile_n=16),
    mk.Config(copy_bytes=64),
    mk.Config(copy_bytes=4096, chunk_rows=16),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: ", ".join(f"{n}={v}" for n, v in vars(c).items() if v))
@pytest.mark.parametrize(
    "cluster",
    [*(pytest.param(each, marks=pytest.mark.thorough) for each in ((1, 1), (1, 2))), (2, 2)],
    ids=cluster_name,
)
@pytest.mark.thorough
def test_config(cluster, config):
    run(lambda group: call(group, Case(35, 20, 17), config=config), cluster=cluster, seed=1)


def test_ranks_may_have_different_configurations():
    """All but chunk_rows is a rank's own affair."""
    configs = [mk.Config(chunk_rows=6), mk.Config(chunk_rows=6, tile_m=16, ctas=4), mk.Config(chunk_rows=6, tile_k=16)]

    def work(group):
        for turn in range(3):
            call(group, Case(35, 20, 17), turn, config=configs[group.rank])

    run(work, cluster=(1, 3))


# -- what moves


@pytest.mark.parametrize("heap", [False, True])
@pytest.mark.parametrize("cluster", [*NODES, (1, 3)], ids=cluster_name)
def test_each_row_crosses_between_two_nodes_once(cluster, heap):
    case = Case(10, 5, 24, torch.bfloat16)
    nodes, gpus = cluster
    row_bytes = 24 * 2

    def work(group):
        a = mk.empty(10, 24, dtype=case.dtype).copy_(case.rows(group.rank)) if heap else None
        call(group, case, a=a, config=mk.Config(chunk_rows=4))
        group.barrier()
        return group.world.traffic

    traffic = run(work, cluster=cluster)[0]
    for source in range(nodes * gpus):
        for target in range(nodes * gpus):
            same_node = source // gpus == target // gpus
            counterparts = source % gpus == target % gpus and not same_node
            assert traffic.network[source][target] == (10 * row_bytes if counterparts else 0)
            pushed = 10 * row_bytes * nodes if same_node and source != target else 0
            assert traffic.nvlink[source][target] == pushed


def test_ragged_rows_cross_with_their_padding_only():
    case = Case(10, 5, 17, torch.bfloat16)

    def work(group):
        call(group, case)
        group.barrier()
        return group.world.traffic.network

    network = run(work, cluster=(2, 2))[0]
    assert 10 * 17 * 2 <= network[0][2] <= 10 * 24 * 2
    assert network[0][1] == network[0][3] == 0


# -- explain


def test_explain():
    def work(group):
        if group.rank:
            return None  # nobody else has to take part
        steps = group.world.scheduler.steps
        a, b = torch.zeros(40, 24), torch.zeros(24, 16)
        plans = {
            "good": mk.explain("all_gather_matmul", a, b),
            "strided": mk.explain("all_gather_matmul", a[:, ::2], torch.zeros(12, 15)),
            "chosen": mk.explain("all_gather_matmul", a, b, config=mk.Config(tile_m=16, chunk_rows=5, intra_ctas=2)),
            "out": mk.explain("all_gather_matmul", a, b, out=torch.zeros(160, 17)[:, 1:]),
        }
        assert group.world.scheduler.steps == steps
        return {name: str(plan) for name, plan in plans.items()}

    plans = run(work, cluster=(2, 2))[0]
    assert "all_gather_matmul: tiles 32x32x32" in plans["good"]
    assert "mk.empty would save that" in plans["good"]
    assert "over NVLink" in plans["good"]
    assert "a has no contiguous, 16-byte aligned rows" in plans["strided"]
    assert "b has no contiguous, 16-byte aligned rows" in plans["strided"]
    assert "tiles 16x32x32" in plans["chosen"]
    assert "2 intra" in plans["chosen"]
    assert "8 chunks of 5 rows" in plans["chosen"]
    assert "out has no contiguous, 16-byte aligned rows" in plans["out"]


def test_explain_the_heap():
    def work(group):
        return str(mk.explain("all_gather_matmul", mk.empty(8, 16), torch.zeros(16, 8, dtype=torch.bfloat16)))

    assert "a is in the symmetric heap: the network reads it directly" in run(work, cluster=(2, 1))[0]


@pytest.mark.parametrize("shape", [(0, 5, 6), (5, 0, 6), (5, 6, 0)])
@pytest.mark.parametrize("cluster", [(1, 1), (1, 2), (2, 1)], ids=cluster_name)
def test_explain_empty(cluster, shape):
    m, n, k = shape

    def work(group):
        return str(mk.explain("all_gather_matmul", torch.zeros(m, k), torch.zeros(k, n)))

    assert "all_gather_matmul" in run(work, cluster=cluster)[0]


def test_explain_is_what_runs():
    def work(group):
        plan = mk.explain("all_gather_matmul", torch.zeros(40, 24), torch.zeros(24, 16))
        launched = []
        launch = group.world.launcher.launch
        group.world.launcher.launch = lambda rank, spec: (launched.append(spec.grid), launch(rank, spec))
        call(group, Case(40, 16, 24))
        return plan.config.ctas, launched

    ctas, launched = run(work, cluster=(1, 1))[0]
    assert launched == [ctas]


# -- time


def test_a_timeout_of_hours_ends_too():
    """The clock is simulated: a timeout must not take as long as it says, let alone longer."""

    def work(group):
        call(group, Case(4, 3, 8))
        if group.rank:
            with pytest.raises(mk.CommTimeout):
                call(group, Case(4, 3, 8))

    with time_limit():
        run(work, cluster=(1, 2), timeout=100 * HANG)


# -- anything


@settings(
    max_examples=30, deadline=None, derandomize=True, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
)
@given(
    cluster=st.sampled_from([(1, 1), (1, 2), (1, 3), (2, 1), (3, 1), (2, 2)]),
    m=st.integers(1, 40),
    n=st.integers(0, 40),
    k=st.integers(1, 40),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 10**6),
    layouts=st.tuples(*[st.sampled_from(list(LAYOUTS))] * 3),
    chunk_rows=st.sampled_from([None, 1, 3, 16, 40]),
    return_gathered=st.booleans(),
)
def test_anything(cluster, m, n, k, dtype, seed, layouts, chunk_rows, return_gathered):
    case = Case(m, n, k, dtype)

    def work(group):
        for turn in range(2):
            a, b = lay_out(case.rows(group.rank, turn), layouts[0]), lay_out(case.weights(group.rank, turn), layouts[1])
            canary = Canary(group.size * m, n, dtype, layouts[2])
            result = mk.all_gather_matmul(
                a, b, out=canary.tensor, return_gathered=return_gathered, config=mk.Config(chunk_rows=chunk_rows)
            )
            assert_product(canary.tensor, case.gathered(group.size, turn), b)
            canary.check()
            if return_gathered:
                assert_same(result[1], case.gathered(group.size, turn))

    run(work, cluster=cluster, seed=seed)
