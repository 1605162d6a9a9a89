"""all_gather_matmul_weight_grad on simulated clusters: right, for every shape, layout, schedule and configuration."""

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
    Guards,
    assert_same,
    cluster_name,
    lay_out,
    run,
)
from support.weight_grad_reference import Case, assert_weight_grad, call

import mkernel as mk

# (m, n, k), ragged: primes, 1, a tile and one more, less than 16 bytes in a row
SHAPES = [(33, 7, 17), (1, 1, 1), (7, 33, 5), (16, 16, 16), (2, 31, 33), (13, 3, 40), (5, 17, 1), (1, 40, 8)]
LARGER_SHAPES = [(33, 33, 33), (67, 31, 37), (64, 64, 32), (37, 65, 70)]
NODES = [(2, 1), (2, 2), (3, 1)]


def over(clusters, often):
    """A test for each of these clusters: `often` in every run of the suite, for the others in thorough ones."""
    marked = [pytest.param(each, marks=() if each in often else pytest.mark.thorough) for each in clusters]
    return pytest.mark.parametrize("cluster", marked, ids=cluster_name)


over_clusters = over(CLUSTERS, CLUSTERS)
over_dtypes = pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.thorough)]
)
over_some = over(CLUSTERS, [(1, 2), (2, 2)])


def small(**fields):
    """Many tiles, chunks and steps in small tensors."""
    return mk.Config(tile_m=16, tile_n=16, tile_k=16, **fields)


# -- many schedules


@pytest.mark.parametrize("seed", range(2))
@over_clusters
def test_schedules(cluster, seed):
    number = 4 * CLUSTERS.index(cluster) + seed
    case = Case(*SHAPES[number % len(SHAPES)], DTYPES[number % len(DTYPES)])
    run(call, case, cluster=cluster, seed=seed)


@pytest.mark.parametrize("shape", LARGER_SHAPES)
@over([(1, 1), (1, 2), (1, 3), (2, 1), (2, 2)], [(1, 1), (2, 2)])
def test_several_tiles(cluster, shape):
    run(call, Case(*shape, torch.bfloat16), cluster=cluster, seed=sum(shape))


@over_clusters
def test_fp32_is_multiplied_as_fp32(cluster):
    """With tf32, whose products have 10 bits, the error would be a thousand times the bound."""

    def work(group):
        assert mk.explain("all_gather_matmul_weight_grad", *inputs(group)).precision == "ieee"
        call(group, case)

    def inputs(group):
        return case.rows(group.rank), case.gradient(group.rank, group.size)

    case = Case(21, 18, 20, torch.float32)
    run(work, cluster=cluster)


@pytest.mark.parametrize("resident", [1, 2])
@over_some
def test_ctas_one_after_the_other(cluster, resident):
    """Rule 4: no CTA waits for a later one of its rank, if those that move rows compute nothing afterwards."""

    def work(group):
        for turn in range(2):
            call(group, Case(18, 20, 33), turn, config=small(join_tiles=0))

    run(work, cluster=cluster, seed=resident, resident=resident)


@pytest.mark.parametrize("options", [{"late": {1: 3000}}, {"slow": {0: 0.02}}, {"late": {0: 3000}, "slow": {1: 0.02}}])
@over([(1, 2), (2, 1), (2, 2)], [(1, 2), (2, 1)])
def test_stragglers(cluster, options):
    def work(group):
        for turn in range(3):
            call(group, Case(20, 5, 17), turn, config=small())

    run(work, cluster=cluster, **options)


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_schedules_give_the_same_bits(dtype):
    case = Case(18, 17, 20, dtype)

    def work(group):
        return call(group, case, config=small(ctas=4))

    expected = run(work, cluster=(2, 2), seed=0)
    for seed, options in enumerate([{}, {"slow": {2: 0.02}}, {"late": {1: 2000}}, {"ctas": 9}], start=1):
        for y, z in zip(run(work, cluster=(2, 2), seed=seed, **options), expected):
            assert_same(y, z)


def test_ranks_may_share_a_tensor():
    case = Case(21, 40, 16)

    def work(group):
        for turn in range(3):
            call(group, case, turn, dy=everyones)

    for seed in range(2):
        everyones = case.gradient(0, 2)
        run(work, cluster=(1, 2), seed=seed)


# -- passes


@pytest.mark.parametrize("passes", [1, 2, 3, 5])
@pytest.mark.parametrize("held", [1, 7, pytest.param(2, marks=pytest.mark.thorough)])
@over([(1, 1), (1, 3), (2, 2)], [(1, 3)])
def test_passes_and_held_tiles(cluster, held, passes):
    """Fewer tiles than are held, and passes with no chunk of some ranks, are among them."""

    def work(group):
        for turn in range(2):
            call(group, Case(18, 17, 33), turn, config=small(passes=passes, held_tiles=held))

    run(work, cluster=cluster, seed=passes, ctas=4)


@pytest.mark.parametrize("chunk_rows", [2, 8, 16, 32, 48, 96])
@over([(1, 2), (3, 2)], [(1, 2)])
def test_chunks(cluster, chunk_rows):
    """Several of a step, several steps of one, and more than a rank has rows."""
    run(lambda group: call(group, Case(50, 17, 18), config=small(chunk_rows=chunk_rows)), cluster=cluster)


def test_more_chunks_than_are_polled_at_once():
    """128 signals at a time: two batches here."""
    run(lambda group: call(group, Case(16 * 135, 3, 4), config=small(passes=2, chunk_rows=16)), cluster=(1, 2))


@pytest.mark.parametrize("join", [0, 1, 3, 100])
@over([(1, 2), (2, 2)], [(1, 2)])
def test_ctas_that_move_rows_join(cluster, join):
    def work(group):
        for turn in range(2):
            config = small(join_tiles=join, send_ctas=2 * (group.nodes > 1), intra_ctas=2)
            call(group, Case(20, 40, 40), turn, config=config)

    run(work, cluster=cluster, seed=join, ctas=6)


# -- layouts of a, dy and out


@over_dtypes
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
def test_layout_of_dy(layout, n):
    case = Case(9, n, 24, torch.bfloat16)

    def work(group):
        call(group, case, dy=lay_out(case.gradient(group.rank, group.size), layout))

    run(work)


@over_dtypes
@pytest.mark.parametrize(("n", "k"), [(7, 40), (40, 7), (1, 24)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_of_out(layout, n, k, dtype):
    case = Case(5, n, k, dtype)

    def work(group):
        canary = Canary(k, n, dtype, layout)
        assert call(group, case, out=canary.tensor) is canary.tensor
        canary.check()

    run(work, cluster=(1, 2))


@pytest.mark.parametrize("passes", [1, 3])
@over(CLUSTERS, [(1, 1), (1, 2), (2, 1)])
def test_the_gradient_of_a_transposed_weight(cluster, passes):
    """The layout in which autograd accumulates it: that of w [n, k], if b was w.t()."""
    case = Case(18, 24, 40, torch.bfloat16)

    def work(group):
        w = torch.empty(case.n, case.k, dtype=case.dtype)
        inputs = case.rows(group.rank), case.gradient(group.rank, group.size)
        assert mk.explain("all_gather_matmul_weight_grad", *inputs, out=w.t()).access.transposed
        call(group, case, out=w.t(), config=small(passes=passes))
        plain = call(group, case, config=small(passes=passes))
        assert_weight_grad(w.t(), case.gathered(group.size), inputs[1])
        assert plain.is_contiguous()

    run(work, cluster=cluster)


@over(CLUSTERS, [(1, 2), (2, 1)])
def test_nothing_beside_out_is_written(cluster):
    case = Case(18, 18, 17, torch.bfloat16)

    def work(group):
        for layout in ("wide rows", "odd column", "transposed in wide rows"):
            canary = Canary(case.k, case.n, case.dtype, layout)
            call(group, case, out=canary.tensor, config=small())
            canary.check()

    run(work, cluster=cluster)


def test_expanded_inputs():
    case = Case(9, 5, 8)

    def work(group):
        row = case.rows(group.rank)[:1]
        everyone = torch.cat([case.rows(rank)[:1].expand(9, 8) for rank in range(group.size)])
        dy = case.gradient(group.rank, group.size)[:1].expand(9 * group.size, 5)
        assert_weight_grad(mk.all_gather_matmul_weight_grad(row.expand(9, 8), dy), everyone, dy)

    run(work, cluster=(2, 2))


# -- canaries around what the library allocates


@pytest.mark.parametrize("heap", [False, True])
@over_some
def test_nothing_beside_the_workspace_is_written(cluster, heap, monkeypatch):
    guards = Guards(monkeypatch)

    def work(group):
        for turn, case in enumerate([Case(3, 5, 7), Case(35, 3, 8), Case(3, 5, 7), Case(8, 9, 16)]):
            a = case.rows(group.rank, turn)
            if heap:
                a = mk.empty(case.m, case.k, dtype=case.dtype).copy_(a)
            call(group, case, turn, a=a, config=small())

    run(work, cluster=cluster)
    guards.check()


# -- empty inputs, and n that differs


@pytest.mark.parametrize("shape", [(0, 5, 6), (5, 0, 6), (5, 6, 0), (0, 0, 0), (0, 5, 0)])
@pytest.mark.parametrize("cluster", [(1, 1), (1, 2), (2, 2)], ids=cluster_name)
def test_empty(cluster, shape):
    case = Case(*shape)

    def work(group):
        call(group, case)
        call(group, Case(5, 6, 7))
        canary = Canary(case.k, case.n, case.dtype)
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


@pytest.mark.parametrize("seed", range(2))
@over([(1, 2), (2, 1), (3, 1)], [(1, 2), (2, 1)])
def test_a_rank_without_columns_does_not_run_ahead(cluster, seed):
    """A rank with n = 0 needs no rows, but they come all the same: rule 3 holds for it, too."""

    def work(group):
        for turn, m in enumerate([40, 18, 18, 40, 3, 33]):
            n = tuple(0 if rank == 0 and turn % 3 < 2 else 3 for rank in range(group.size))
            call(group, Case(m, n, 8), turn, config=small(chunk_rows=16))

    run(work, cluster=cluster, seed=seed, slow={1: 0.02})


# -- inputs in the symmetric heap


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("cluster", [(1, 2), (2, 1), (2, 2)], ids=cluster_name)
def test_a_may_be_overwritten_after_the_call(cluster, seed):
    """The network must have read a when the launch is over."""
    case = Case(40, 5, 16)

    def work(group):
        a = mk.empty(40, 16, dtype=torch.float32)
        for turn in range(3):
            dy = case.gradient(group.rank, group.size, turn)
            config = small(chunk_rows=16)
            y = mk.all_gather_matmul_weight_grad(a.copy_(case.rows(group.rank, turn)), dy, config=config)
            a.fill_(float("nan"))
            assert_weight_grad(y, case.gathered(group.size, turn), dy)

    run(work, cluster=cluster, seed=seed)


@pytest.mark.parametrize("cluster", NODES, ids=cluster_name)
def test_a_row_crosses_to_another_node_once(cluster):
    case = Case(32, 8, 16)
    nodes, gpus = cluster

    def work(group):
        call(group, case, config=small())
        group.barrier()
        return group.world.traffic

    traffic = run(work, cluster=cluster)[0]
    part = case.m * case.k * 4
    for rank in range(nodes * gpus):
        for peer in range(nodes * gpus):
            here, counterpart = rank // gpus == peer // gpus, rank % gpus == peer % gpus
            assert traffic.network[rank][peer] == (part if counterpart and not here else 0)
            assert traffic.nvlink[rank][peer] == (nodes * part if here and rank != peer else 0)


# -- many calls


@pytest.mark.parametrize(("cluster", "calls"), [((1, 2), 12), ((2, 1), 12)])
def test_many_calls(cluster, calls):
    case = Case(5, 6, 8, torch.bfloat16)

    def work(group):
        for turn in range(calls):
            call(group, case, turn, config=SMALL_TILES)

    run(work, cluster=cluster, seed=3)


@over([(1, 2), (2, 2)], [(1, 2)])
def test_shapes_dtypes_and_configurations_alternate(cluster):
    configs = [None, mk.Config(chunk_rows=64), small(chunk_rows=16, passes=2)]

    def work(group):
        for turn in range(8):
            m = [3, 70, 1, 34][turn % 4]
            call(group, Case(m, 1 + turn, 5 + turn, DTYPES[turn % 3]), turn, config=configs[turn // 2 % 3])

    run(work, cluster=cluster, seed=1)


def test_beside_the_forward():
    """Forward and backward of a layer: both operators gather, each in a workspace of its own."""
    case = Case(18, 20, 24, torch.bfloat16)

    def work(group):
        for turn in range(2):
            a, w = case.rows(group.rank, turn), case.weights(group.rank, turn).t().contiguous()
            y = mk.all_gather_matmul(a, w.t())
            call(group, case, turn, a=a, out=torch.empty_like(w).t())
            torch.testing.assert_close(
                y.double(), case.gathered(group.size, turn).double() @ w.double().t(), rtol=0.02, atol=0.1
            )  # fmt: skip

    run(work, cluster=(2, 2))


def test_the_gradient_of_autograd():
    """What PyTorch computes for a layer that multiplies the gathered rows, on every rank."""
    case = Case(13, 9, 20)

    def work(group):
        w = case.weights(group.rank).requires_grad_()
        dy = case.gradient(group.rank, group.size)
        (case.gathered(group.size) @ w).backward(dy)
        with torch.no_grad():
            y = mk.all_gather_matmul_weight_grad(case.rows(group.rank), dy)
        torch.testing.assert_close(y, w.grad, rtol=1e-5, atol=1e-5)

    run(work, cluster=(2, 2))


def test_subgroups():
    def work(group):
        part = group.split(group.rank % 2)
        for turn in range(2):
            call(group, Case(7, 5, 9), turn)
            call(part, Case(20, 6, 8), turn)

    run(work, cluster=(2, 2))


def test_calls_on_two_streams():
    """Calls are queued without waiting, on two streams; each stream has a workspace of its own."""
    case = Case(9, 5, 8)

    def work(group):
        results = []
        for turn in range(4):
            a, dy = case.rows(group.rank, turn), case.gradient(group.rank, group.size, turn)
            with group.world.stream(group.world_rank, turn % 2):
                results.append((mk.all_gather_matmul_weight_grad(a, dy), a, dy))
        group.synchronize()
        for turn, (y, _, dy) in enumerate(results):
            assert_weight_grad(y, case.gathered(group.size, turn), dy)

    run(work, cluster=(2, 2))


# -- anything


@pytest.mark.thorough
@settings(
    max_examples=20, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.explicit, Phase.generate]
)
@given(
    cluster=st.sampled_from(CLUSTERS),
    m=st.integers(1, 70),
    n=st.integers(0, 70),
    k=st.integers(1, 70),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**20),
    layouts=st.tuples(*[st.sampled_from(list(LAYOUTS))] * 3),
    fields=st.fixed_dictionaries(
        {},
        optional=dict(
            chunk_rows=st.sampled_from([16, 32, 48]), passes=st.integers(1, 5), held_tiles=st.integers(1, 4),
            join_tiles=st.integers(0, 3),
        ),
    ),
)  # fmt: skip
def test_anything(cluster, m, n, k, dtype, seed, layouts, fields):
    case = Case(m, n, k, dtype)

    def work(group):
        for turn in range(2):
            a = lay_out(case.rows(group.rank, turn), layouts[0])
            dy = lay_out(case.gradient(group.rank, group.size, turn), layouts[1])
            canary = Canary(k, n, dtype, layouts[2])
            mk.all_gather_matmul_weight_grad(a, dy, out=canary.tensor, config=small(**fields))
            assert_weight_grad(canary.tensor, case.gathered(group.size, turn), dy)
            canary.check()

    run(work, cluster=cluster, seed=seed)
