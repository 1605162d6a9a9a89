"""moe_ffn on simulated clusters. Schedules and routings are in test_moe.py."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.moe_reference import SMALL, Layer, ffn, layer_of
from support.operator_calls import DTYPES, Canary, Guards, assert_same, cluster_name, lay_out, run, time_limit

import mkernel as mk


def test_many_rows_of_few_experts():
    """Several groups of blocks, so that both GEMMs take turns."""
    layer = Layer((40, 33), (1, 2), k=2, hidden=40, out=34, dtype=torch.float16)
    run(lambda group: ffn(group, layer, config=SMALL), cluster=(1, 2), seed=4)


@pytest.mark.parametrize("config", [
    mk.Config(chunk_rows=2, tile_m=16), mk.Config(chunk_rows=32, group_m=1), mk.Config(intra_ctas=3, send_ctas=2),
], ids=["small chunks", "small groups", "helpers"])  # fmt: skip
def test_configurations(config):
    layer = Layer((9, 17), (2, 3), k=4, dtype=torch.float32)
    run(lambda group: ffn(group, layer, config=config), cluster=(2, 1), ctas=7)


@pytest.mark.parametrize(("hidden", "inter"), [(1, 1), (7, 33), (33, 7)])
def test_ragged_sizes(hidden, inter):
    run(ffn, Layer((5, 6), (2, 1), hidden=hidden, out=inter, dtype=torch.float32), cluster=(1, 2))


def test_the_same_as_dispatch_activation_and_combine():
    """In fp32 the one launch gives what three operators give, but for the order of some sums."""
    layer = Layer((9, 5), (2, 3), dtype=torch.float32)

    def work(group):
        rank = group.rank
        y = ffn(group, layer)
        rows, handle = mk.moe_dispatch_matmul(layer.x(rank), layer.ids(rank), layer.gate_up(rank))
        gate, up = rows.chunk(2, dim=1)
        inner = torch.nn.functional.silu(gate) * up
        counts = handle.counts.tolist()
        parts = inner[: sum(counts)].split(counts)
        done = torch.zeros(len(rows), layer.hidden)
        done[: sum(counts)] = torch.cat([part @ w for part, w in zip(parts, layer.down(rank), strict=True)])
        assert torch.allclose(mk.moe_combine(done, handle, layer.weights(rank)), y, rtol=1e-4, atol=1e-5)

    run(work, cluster=(1, 2))


def test_layouts():
    """Tokens, matrices and results with strides, ids of 32 bits, weights of 16."""
    layer = Layer((6, 9), (2, 2), hidden=24, out=16)

    def work(group):
        rank = group.rank
        weights = layer.weights(rank).bfloat16()
        canary = Canary(layer.tokens[rank], 24, layer.dtype, "odd column")
        y = mk.moe_ffn(
            lay_out(layer.x(rank), "every second column"), layer.ids(rank).int(), weights,
            layer.gate_up(rank).transpose(1, 2).contiguous().transpose(1, 2),
            lay_out(layer.down(rank).view(-1, 24), "odd column").unflatten(0, (2, 16)), out=canary.tensor,
        )  # fmt: skip
        canary.check()
        plain = mk.moe_ffn(layer.x(rank), layer.ids(rank), weights.float(), layer.gate_up(rank), layer.down(rank))
        assert_same(y.contiguous(), plain)

    run(work, cluster=(1, 2))


@pytest.mark.parametrize("cluster", [(1, 2), (2, 1)], ids=cluster_name)
def test_nothing_beside_the_workspaces_is_written(cluster, monkeypatch):
    guards = Guards(monkeypatch)

    def work(group):
        ffn(group, layer_of(cluster), config=SMALL)
        ffn(group, layer_of(cluster, k=1, hidden=8), capacity=60, max_tokens=20)

    run(work, cluster=cluster)
    guards.check()


@pytest.mark.parametrize("cluster", [(2, 2), (2, 1)], ids=cluster_name)
def test_a_token_crosses_to_a_node_once_and_comes_back_once(cluster):
    nodes, gpus = cluster
    size = nodes * gpus
    layer = Layer(tuple(range(3, 3 + size)), (2,) * size, k=5, hidden=32, out=16, dtype=torch.float32)

    def crossings(source, node):
        low, high = layer.first(node * gpus), layer.first(node * gpus) + 2 * gpus
        return int(((layer.ids(source) >= low) & (layer.ids(source) < high)).any(1).sum())

    def work(group):
        ffn(group, layer)
        group.barrier()
        return group.world.traffic.network

    traffic = run(work, cluster=cluster)[-1]
    for source in range(size):
        for target in range(size):
            node = target // gpus
            if source % gpus != target % gpus or source // gpus == node:
                assert traffic[source][target] == 0, "only counterparts talk over the network"
            else:
                # header, ids, as many as any rank may have, weights
                table = (16 + (max(layer.tokens) + layer.tokens[source]) * layer.k) * 4
                rows = crossings(source, node) + crossings(target, source // gpus)
                assert traffic[source][target] == table + rows * layer.hidden * 4


def test_tiles_are_computed_before_all_tokens_are_here():
    """No barrier between the stages: with a late rank the others have computed tiles when its tokens come."""
    layer = Layer((40, 40), (2, 2), k=2, hidden=32, out=32)

    def work(group):
        ffn(group, layer, config=SMALL)
        return group.world.traffic

    traffic = run(work, cluster=(1, 2), seed=1, slow={1: 0.02})[0]
    assert traffic.multiplications[0] > 0


@pytest.mark.parametrize("cluster", [(1, 2), (2, 1)], ids=cluster_name)
def test_one_row_too_many_is_an_error_everywhere_and_the_group_goes_on(cluster):
    layer = layer_of(cluster)

    def work(group):
        needed = len(layer.rows(1)[1])
        capacity = len(layer.rows(group.rank)[1]) - (group.rank == 1)
        out = torch.zeros(layer.tokens[group.rank], layer.hidden, dtype=layer.dtype)
        for turn in range(2):
            with pytest.raises(mk.CapacityError, match=f"{needed} rows go to rank 1, whose capacity is {needed - 1}"):
                ffn(group, layer, capacity=capacity, out=out)
            assert out.isnan().all()
            ffn(group, layer, turn, capacity=needed + capacity, out=out)
        return True

    assert all(run(work, cluster=cluster))


def test_an_id_beyond_the_last_expert():
    layer = Layer((6, 9), (2, 2))

    def work(group):
        rank = group.rank
        ids = layer.ids(rank)
        ids[0, 0] = 4
        with pytest.raises(mk.RoutingError, match="2 of the topk_ids"):
            mk.moe_ffn(layer.x(rank), ids, layer.weights(rank), layer.gate_up(rank), layer.down(rank))
        ffn(group, layer)

    run(work, cluster=(1, 2))


@st.composite
def any_layer(draw):
    cluster = draw(st.sampled_from([(1, 1), (1, 2), (2, 1), (1, 3)]))
    size = cluster[0] * cluster[1]
    tokens = tuple(draw(st.lists(st.integers(0, 21), min_size=size, max_size=size)))
    experts = tuple(draw(st.lists(st.integers(0, 3), min_size=size, max_size=size)))
    layer = Layer(
        tokens, experts, k=draw(st.integers(1, 4)), hidden=draw(st.integers(1, 40)), out=draw(st.integers(1, 40)),
        dtype=draw(st.sampled_from(DTYPES)), routing=draw(st.sampled_from(["random", "zipf"])),
    )  # fmt: skip
    return cluster, layer, draw(st.integers(0, 2**16))


@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(any_layer())
def test_any_layer(case):
    cluster, layer, seed = case
    with time_limit():
        run(ffn, layer, cluster=cluster, seed=seed)
