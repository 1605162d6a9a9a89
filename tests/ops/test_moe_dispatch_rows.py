"""moe_dispatch: the rows themselves, there and back, and their gradients. Nearly all of it is shared with
moe_dispatch_matmul, and broken in test_moe_broken.py."""

from __future__ import annotations

import pytest
import torch
import triton
from support.broken_variants import Broken, assert_caught
from support.moe_gradients import rows_gradients
from support.moe_reference import SMALL, Layer, assert_sum, dispatch_rows, layer_of
from support.operator_calls import DTYPES, Guards, assert_same, cluster_name, lay_out, run
from support.scenarios import Routes

import mkernel as mk
from mkernel.ops.moe import placing
from mkernel.ops.moe.placing import _wait_origin

CLUSTERS = [(1, 1), (1, 2), (2, 1), (2, 2), pytest.param((3, 2), marks=pytest.mark.thorough)]


@pytest.mark.parametrize("cluster", CLUSTERS, ids=cluster_name)
def test_clusters(cluster):
    layer = layer_of(cluster)

    def work(group):
        for turn in range(3):
            dispatch_rows(group, layer, turn, max_tokens=20, config=SMALL)

    run(work, cluster=cluster, seed=3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [1, 33])
def test_dtypes_and_ragged_sizes(dtype, hidden):
    run(dispatch_rows, Layer((9, 12), (2, 3), k=3, hidden=hidden, dtype=dtype), cluster=(1, 2))


@pytest.mark.parametrize("routing", ["zipf", "one", "none", "twice", "same"])
def test_routings(routing):
    run(dispatch_rows, layer_of((2, 1), routing=routing), cluster=(2, 1))


def test_experts_of_ones_own():
    """A grouped GEMM of PyTorch's, say, between dispatch and combine."""
    layer = Layer((9, 5), (2, 3), dtype=torch.float32, has_bias=True)

    def work(group):
        rank = group.rank
        rows, handle = mk.moe_dispatch(layer.x(rank), layer.ids(rank), layer.experts[rank])
        y = torch.zeros(len(rows), layer.out)
        parts = rows[: int(handle.counts.sum())].split(handle.counts.tolist())
        done = [part @ w + bias for part, w, bias in zip(parts, layer.w(rank), layer.bias(rank), strict=True)]
        y[: sum(map(len, done))] = torch.cat(done)
        assert_sum(mk.moe_combine(y, handle, layer.weights(rank)), *layer.combined(rank), layer.hidden)

    run(work, cluster=(1, 2))


def test_layouts():
    layer = Layer((6, 9), (2, 2), hidden=24)

    def work(group):
        rank = group.rank
        for layout in ("transposed", "every second column", "odd column"):
            y, _ = mk.moe_dispatch(lay_out(layer.x(rank), layout), layer.ids(rank).int(), 2)
            rows = layer.dispatched(rank)
            assert_same(y[: len(rows)], rows)

    run(work, cluster=(1, 2))


@pytest.mark.parametrize("cluster", [(1, 2), (2, 1), pytest.param((2, 2), marks=pytest.mark.thorough)],
                         ids=cluster_name)  # fmt: skip
def test_gradients(cluster):
    layer = layer_of(cluster, dtype=torch.float32)

    def work(group):
        for turn in range(2):
            rows_gradients(group, layer, turn, max_tokens=20)

    run(work, cluster=cluster)


def test_all_schedules_give_the_same_bits():
    layer = Layer((5, 4), (2, 1))
    expected = run(lambda group: rows_gradients(group, layer), cluster=(1, 2))
    for results, same in zip(run(lambda group: rows_gradients(group, layer), cluster=(1, 2), seed=1, ctas=4), expected):
        for one, other in zip(results, same, strict=True):
            assert_same(one, other)


def test_one_row_too_many_is_an_error_everywhere_and_the_group_goes_on():
    layer = layer_of((2, 1))

    def work(group):
        needed = len(layer.rows(1)[1])
        capacity = len(layer.rows(group.rank)[1]) - (group.rank == 1)
        with pytest.raises(mk.CapacityError, match=f"{needed} rows go to rank 1, whose capacity is {needed - 1}"):
            dispatch_rows(group, layer, capacity=capacity)
        ids = layer.ids(group.rank)
        ids[0, 0] = 4
        with pytest.raises(mk.RoutingError, match="2 of the topk_ids"):
            mk.moe_dispatch(layer.x(group.rank), ids, 2)
        dispatch_rows(group, layer, capacity=needed + capacity)
        return True

    assert all(run(work, cluster=(2, 1)))


def test_a_token_crosses_to_a_node_once():
    layer = Layer((3, 4), (2, 2), k=4, hidden=32, dtype=torch.float32)

    def work(group):
        dispatch_rows(group, layer, max_tokens=4)
        group.barrier()
        return group.world.traffic.network

    traffic = run(work, cluster=(2, 1))[-1]
    for source in range(2):
        low = layer.first(1 - source)
        tokens = int(((layer.ids(source) >= low) & (layer.ids(source) < low + 2)).any(1).sum())
        assert traffic[source][1 - source] == 64 + layer.tokens[source] * layer.k * 4 + tokens * layer.hidden * 4


def test_nothing_beside_the_workspaces_is_written(monkeypatch):
    guards = Guards(monkeypatch)
    run(dispatch_rows, layer_of((2, 1)), cluster=(2, 1))
    guards.check()


def test_the_plan():
    def work(group):
        x, ids = torch.ones(8, 16), torch.zeros(8, 2, dtype=torch.int64)
        plan = mk.explain("moe_dispatch", x, ids, 3, max_tokens=8)
        assert "moe_dispatch: " in str(plan)
        assert "capacity 32 rows for 3 experts" in str(plan)
        for experts in (-1, 2.0, torch.ones(3)):
            with pytest.raises(mk.ArgumentError, match="experts must be a whole number, 0 or more"):
                mk.moe_dispatch(x, ids, experts)

    run(work, cluster=(1, 2))


# -- broken variants


@triton.jit
def fetch_at_once(comm, dispatch, batch, rank, holder, source, chunk, wanted):
    return _wait_origin(comm, dispatch, batch, rank, holder, source, chunk, wanted * 0)


NODE, NETWORK = (Routes(cluster, "moe_dispatch", calls=2) for cluster in ((1, 2), (2, 1)))
BROKEN = {
    "tokens are fetched before they are there": Broken(NODE, {placing._wait_origin: fetch_at_once}),
    "tokens are fetched before the network brought them": Broken(NETWORK, {placing._wait_origin: fetch_at_once}),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken(name):
    assert_caught(BROKEN[name])
