"""moe_dispatch_matmul and moe_combine on simulated clusters: every row where it belongs, bit for bit. Schedules and
routings are in test_moe.py."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.moe_reference import SMALL, Layer, check_dispatch, combine, dispatch, layer_of
from support.operator_calls import DTYPES, Guards, assert_same, cluster_name, lay_out, run, time_limit

import mkernel as mk
from mkernel.ops.moe.grouped import short_tile


@pytest.mark.parametrize("k", [1, 5, 16])
def test_slots(k):
    run(combine, Layer((7, 3), (9, 8), k=k), cluster=(1, 2))


def test_many_rows_of_few_experts():
    """Blocks with rows of several sources, full ones and ragged ones, and more tiles than CTAs."""
    layer = Layer((40, 33), (1, 2), k=2, hidden=40, out=50, dtype=torch.float32)
    run(combine, layer, cluster=(1, 2), seed=4, ctas=4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_the_tokens_bit_for_bit(dtype):
    """Multiplied by the identity, rows are what was sent."""
    layer = Layer((9, 12), (2, 3), k=3, hidden=24, out=24, dtype=dtype)

    def work(group):
        w = torch.eye(24, dtype=dtype).expand(layer.experts[group.rank], 24, 24)
        y, handle = mk.moe_dispatch_matmul(layer.x(group.rank), layer.ids(group.rank), w)
        rows = int(handle.counts.sum())
        assert_same(y[:rows].contiguous(), layer.dispatched(group.rank))

    run(work, cluster=(2, 1))


@pytest.mark.parametrize("config", [
    SMALL, mk.Config(chunk_rows=2), mk.Config(chunk_rows=32, group_m=1, copy_bytes=64),
    mk.Config(intra_ctas=3, send_ctas=2),
], ids=["small tiles", "small chunks", "one chunk", "helpers"])  # fmt: skip
def test_configurations(config):
    layer = Layer((9, 17), (2, 3), k=4, dtype=torch.float32)
    run(lambda group: combine(group, layer, config=config), cluster=(2, 1), ctas=7)


def test_who_copies():
    """Nearly all CTAs place their rank's rows; as many as keep pace with a link go on with those of others."""
    layer = Layer((30, 41, 7, 36), (3, 2, 4, 1), k=2, dtype=torch.float32)

    def work(group):
        arguments = layer.x(group.rank), layer.ids(group.rank), layer.w(group.rank)
        plan = mk.explain("moe_dispatch_matmul", *arguments, max_tokens=41)
        assert (plan.config.ctas, plan.config.send_ctas, plan.config.intra_ctas) == (12, 3, 8)
        assert (plan.copying.near_intra_ctas, plan.copying.far_intra_ctas) == (8, 3)
        assert "sent by 3 CTAs" in str(plan)
        assert "(8 of them fetch tokens from the node, 3 from other nodes)" in str(plan)
        combine(group, layer, max_tokens=41)

    run(work, cluster=(2, 2), ctas=12)


@pytest.mark.parametrize(
    ("device", "tile", "short"),
    [("cuda", 128, 64), ("cuda", 64, 64), ("cuda", 16, 16), ("cpu", 32, 16), ("cpu", 16, 8), ("cpu", 4, 4)],
)
def test_the_height_of_short_tiles(device, tile, short):
    assert short_tile(torch.device(device), tile) == short


def test_more_ctas_than_a_group_has_records_for():
    def work(group):
        with pytest.raises(mk.ArgumentError, match="a launch can have 512 CTAs at most; got 513"):
            combine(group, Layer((5,), (2,), dtype=torch.float32))

    run(work, cluster=(1, 1), ctas=513)


@pytest.mark.parametrize("hidden", [1, 7, 33])
@pytest.mark.parametrize("out", [1, 17])
def test_ragged_sizes(hidden, out):
    run(combine, Layer((5, 6), (2, 1), hidden=hidden, out=out, dtype=torch.float32), cluster=(1, 2))


@pytest.mark.parametrize("layout", ["transposed", "every second column", "odd column", "wide rows"])
def test_layouts(layout):
    """Tokens, matrices, rows and results with strides, ids of 32 bits, weights of 16."""
    layer = Layer((6, 9), (2, 2), hidden=24, out=16)

    def work(group):
        rank = group.rank
        x, ids = lay_out(layer.x(rank), layout), layer.ids(rank).int()
        flat = layer.w(rank).transpose(1, 2).contiguous() if layout == "transposed" else layer.w(rank)
        w = flat.transpose(1, 2) if layout == "transposed" else lay_out(flat.view(-1, 16), layout).unflatten(0, (2, 24))
        y, handle = mk.moe_dispatch_matmul(x, ids, w)
        plain, _ = dispatch(group, layer)
        assert_same(y.contiguous(), plain.contiguous())
        weights = layer.weights(rank).bfloat16()
        out = torch.full((layer.tokens[rank], 40), 7.0, dtype=layer.dtype)
        z = mk.moe_combine(lay_out(y, layout), handle, weights, out=out[:, 4:36:2])
        assert_same(z.contiguous(), mk.moe_combine(plain, handle, weights.float()))
        out[:, 4:36:2] = 7.0
        assert (out == 7.0).all()

    run(work, cluster=(1, 2))


@pytest.mark.parametrize("cluster", [(1, 2), (2, 1)], ids=cluster_name)
def test_nothing_beside_the_workspaces_is_written(cluster, monkeypatch):
    guards = Guards(monkeypatch)

    def work(group):
        combine(group, layer_of(cluster), config=SMALL)
        combine(group, layer_of(cluster, k=1, hidden=8), capacity=60)

    run(work, cluster=cluster)
    guards.check()


def test_any_y_can_be_combined():
    """Rows of another width than the dispatch had, for instance behind another layer of the experts."""
    layer = Layer((6, 9), (2, 2), hidden=24, out=16, dtype=torch.float32)

    def work(group):
        y, handle = dispatch(group, layer)
        wide = torch.cat([y, 2 * y, 3 * y], dim=1)
        one, two, three = mk.moe_combine(wide, handle, layer.weights(group.rank)).chunk(3, dim=1)
        assert_same(one.contiguous(), mk.moe_combine(y, handle, layer.weights(group.rank)))
        assert torch.allclose(2 * one, two)
        assert torch.allclose(3 * one, three)

    run(work, cluster=(1, 2))


# -- how much moves


@pytest.mark.parametrize(
    ("cluster", "routing"),
    [((3, 2), "random"), ((2, 2), "zipf"), ((2, 1), "random"), ((3, 1), "one")],
    ids=cluster_name,
)
def test_a_token_crosses_to_a_node_once(cluster, routing):
    """Bytes between nodes: the tables, and each token once for every other node that has an expert of it; as many rows
    come back."""
    nodes, gpus = cluster
    size = nodes * gpus
    layer = Layer(tuple(range(3, 3 + size)), (2,) * size, k=6, hidden=32, out=16, dtype=torch.float32, routing=routing)

    def crossings(source, node):
        low, high = layer.first(node * gpus), layer.first(node * gpus) + 2 * gpus
        ids = layer.ids(source)
        return int(((ids >= low) & (ids < high)).any(1).sum())

    def work(group):
        y, handle = dispatch(group, layer)
        there = [list(row) for row in group.world.traffic.network]
        group.barrier()
        mk.moe_combine(y, handle, layer.weights(group.rank))
        group.barrier()
        return there, [list(row) for row in group.world.traffic.network]

    results = run(work, cluster=cluster)
    there, both = results[0][0], results[-1][1]
    table = 16 * 4
    for source in range(size):
        for target in range(size):
            node = target // gpus
            if source % gpus != target % gpus or source // gpus == node:
                assert both[source][target] == 0, "only counterparts talk over the network"
            else:
                ids = layer.tokens[source] * layer.k * 4 + table
                rows = crossings(source, node) * layer.hidden * 4
                back = crossings(target, source // gpus) * layer.out * 4
                assert both[source][target] == ids + rows + ids + back
    assert sum(map(sum, there)) < sum(map(sum, both))


# -- bounds


def test_a_declared_bound_on_tokens_needs_no_talk():
    """With max_tokens the ranks compare their calls once they agreed, and exchange nothing else on the host."""
    layer = Layer((6, 9), (2, 2))

    def work(group):
        dispatch(group, layer, max_tokens=12)
        before = group._exchanges
        for turn in range(3):
            dispatch(group, layer, turn, max_tokens=12)
        y, _ = dispatch(group, Layer((3, 2), (2, 2)), max_tokens=12)
        assert y.shape[0] == 2 * 12 * 2
        assert group._exchanges == before + 4

    run(work, cluster=(1, 2))


@pytest.mark.parametrize("cluster", [(1, 2), (2, 1)], ids=cluster_name)
def test_exactly_enough_capacity(cluster):
    layer = layer_of(cluster)

    def work(group):
        counts, _, _ = layer.rows(group.rank)
        y, _ = dispatch(group, layer, capacity=sum(counts))
        assert y.shape[0] == sum(counts)

    run(work, cluster=cluster)


@pytest.mark.parametrize("cluster", [(1, 1), (1, 2), (2, 1)], ids=cluster_name)
def test_one_row_too_many_is_an_error_everywhere_and_the_group_goes_on(cluster, monkeypatch):
    layer = layer_of(cluster)
    full = 0
    guards = Guards(monkeypatch)

    def work(group):
        counts, _, _ = layer.rows(group.rank)
        needed = len(layer.rows(full)[1])
        for turn in range(2):
            with pytest.raises(
                mk.CapacityError, match=f"{needed} rows go to rank {full}, whose capacity is {needed - 1}"
            ):
                dispatch(group, layer, capacity=sum(counts) - (group.rank == full))
            combine(group, layer, turn)
        return True

    assert all(run(work, cluster=cluster))
    guards.check()


def test_over_capacity_the_result_is_nan(monkeypatch):
    layer = Layer((6, 9), (2, 2))
    kept = {}
    original = mk.Group.launch

    def launch(self, launch):
        kept[self.rank] = launch.arguments["gemm"].y_rows.data
        original(self, launch)

    monkeypatch.setattr(mk.Group, "launch", launch)

    def work(group):
        with pytest.raises(mk.CapacityError):
            dispatch(group, layer, capacity=3)
        assert kept[group.rank].shape[0] == 3
        assert kept[group.rank].isnan().all()

    run(work, cluster=(1, 2))


def test_an_id_beyond_the_last_expert():
    layer = Layer((6, 9), (2, 2))

    def work(group):
        ids = layer.ids(group.rank)
        if group.rank == 1:
            ids[3, 0] = 4
            ids[2, 1] = 2**40
        with pytest.raises(
            mk.RoutingError, match="2 of the topk_ids of all ranks are beyond the last of the 4 experts"
        ):
            mk.moe_dispatch_matmul(layer.x(group.rank), ids, layer.w(group.rank))
        ids = layer.ids(group.rank)
        ids[0, 0] = -5
        mk.moe_dispatch_matmul(layer.x(group.rank), ids, layer.w(group.rank))

    run(work, cluster=(1, 2))


def test_layers_of_many_sizes_take_turns():
    layers = [
        Layer((6, 9), (2, 2)),
        Layer((1, 0), (0, 3), k=1),
        Layer((30, 2), (5, 1), k=4, hidden=50),
        Layer((6, 9), (2, 2)),
    ]

    def work(group):
        for turn, layer in enumerate(layers):
            combine(group, layer, turn)

    run(work, cluster=(2, 1))


def test_two_streams():
    layer = Layer((6, 9), (2, 2))

    def work(group):
        calls = []
        for turn in range(3):
            for stream in ("one", "two"):
                with group.world.stream(group.rank, stream):
                    calls.append((turn, dispatch(group, layer, turn, check=False)))
        group.synchronize()
        for turn, (y, handle) in calls:
            check_dispatch(layer, group.rank, y, handle, turn)

    run(work, cluster=(1, 2))


# -- any input


@st.composite
def any_layer(draw):
    cluster = draw(st.sampled_from([(1, 1), (1, 2), (2, 1), (1, 3)]))
    size = cluster[0] * cluster[1]
    tokens = tuple(draw(st.lists(st.integers(0, 21), min_size=size, max_size=size)))
    experts = tuple(draw(st.lists(st.integers(0, 3), min_size=size, max_size=size)))
    routing = draw(st.sampled_from(["random", "zipf", "one", "twice"])) if sum(experts) else "none"
    layer = Layer(
        tokens, experts, k=draw(st.integers(1, 6)), hidden=draw(st.integers(1, 40)), out=draw(st.integers(1, 40)),
        dtype=draw(st.sampled_from(DTYPES)), routing=routing,
    )  # fmt: skip
    return cluster, layer, draw(st.integers(0, 2**16))


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(any_layer())
def test_any_layer(case):
    cluster, layer, seed = case
    with time_limit():
        run(lambda group: combine(group, layer), cluster=cluster, seed=seed)


@pytest.mark.parametrize(
    ("cluster", "tokens", "experts", "chunk_rows"),
    [
        ((1, 1), (300,), (20,), None),  # many segments, and more experts than are counted at once
        ((1, 1), (300,), (3,), 256),  # a segment with more ids than are counted at once
        ((1, 2), (300, 9), (0, 17), 128),
        ((2, 1), (9, 300), (18, 1), None),
        ((1, 1), (1100,), (2,), None),  # more chunks than segments
    ],
)
def test_how_ids_are_counted(cluster, tokens, experts, chunk_rows):
    layer = Layer(tokens, experts, k=4, hidden=8, out=8, dtype=torch.float32)
    config = mk.Config(chunk_rows=chunk_rows)
    for turn in range(3):
        run(lambda group, turn=turn: dispatch(group, layer, turn, config=config), cluster=cluster, seed=turn)


@pytest.mark.parametrize("config", [
    SMALL, mk.Config(intra_ctas=3, send_ctas=2), mk.Config(intra_ctas=6), mk.Config(ctas=2, intra_ctas=1),
], ids=["small tiles", "helpers", "all but one settle", "two CTAs"])  # fmt: skip
def test_a_rank_that_is_alone(config):
    """It places its rows in the order of the tiles."""
    layer = Layer((90,), (5,), k=4, hidden=24, dtype=torch.float32)
    run(lambda group: combine(group, layer, config=config), cluster=(1, 1), ctas=7)
