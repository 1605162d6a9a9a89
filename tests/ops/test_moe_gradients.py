"""Gradients of moe_ffn, and of moe_dispatch_matmul with moe_combine, on simulated clusters: every gradient beside
float64."""

from __future__ import annotations

import functools

import pytest
import torch
from support.moe_gradients import ffn_gradients, halves_gradients, rows_gradients
from support.moe_reference import SMALL, Layer, layer_of
from support.operator_calls import Guards, assert_same, cluster_name, run

import mkernel as mk
from mkernel.ops.moe.plan import tile_width
from mkernel.runtime import planning
from mkernel.runtime.gpus import SimulatedGpu

both = pytest.mark.parametrize("call", [ffn_gradients, halves_gradients])
THOROUGH = pytest.mark.thorough
CLUSTERS = [(1, 1), (1, 2), (2, 1), (2, 2), (3, 2)]


@both
@pytest.mark.parametrize("cluster", CLUSTERS, ids=cluster_name)
def test_clusters(cluster, call):
    """Ranks with other numbers of tokens and experts, also none."""
    layer = layer_of(cluster, dtype=torch.float32)
    for save in ("inputs", "activations") if layer.size < 4 else ("inputs",):
        run(lambda group: call(group, layer, save=save), cluster=cluster, seed=layer.size)


@both
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtypes(dtype, call):
    run(lambda group: call(group, layer_of((1, 2), dtype=dtype), save="activations"), cluster=(1, 2))


@both
@pytest.mark.parametrize(
    "routing", ["zipf", "none", "twice", *(pytest.param(each, marks=THOROUGH) for each in ("one", "same"))]
)
def test_routings(routing, call):
    """Skewed ones, experts without rows, all ids dropped, experts that a token names twice."""
    layer = layer_of((2, 1), routing=routing, dtype=torch.float32)
    run(lambda group: call(group, layer), cluster=(2, 1), seed=len(routing))


@pytest.mark.parametrize("call", [ffn_gradients, pytest.param(halves_gradients, marks=THOROUGH)])
def test_several_tiles_and_blocks(call):
    """Of rows, columns and sums over rows; several calls in a row, so that both halves of the workspaces are used."""
    layer = Layer((40, 33), (1, 2), k=2, hidden=40, out=34, dtype=torch.float32)

    def work(group):
        for turn in range(2):
            call(group, layer, turn, config=SMALL, max_tokens=44)

    run(work, cluster=(1, 2), seed=4)


@pytest.mark.parametrize("call", [ffn_gradients, halves_gradients, rows_gradients])
@pytest.mark.parametrize("k", [1, 16])
@pytest.mark.parametrize("cluster", [(1, 2), pytest.param((2, 1), marks=THOROUGH)], ids=cluster_name)
def test_top_1_and_top_16(cluster, k, call):
    """The fewest and the most experts of a token, forward and backward."""
    layer = Layer((5, 4), (9, 10), k=k, hidden=8, out=8, dtype=torch.float32)
    run(lambda group: call(group, layer, max_tokens=6), cluster=cluster)


def test_more_than_16_experts_of_a_token_are_refused():
    def work(group):
        with pytest.raises(mk.ArgumentError, match="topk_ids has 17 experts per token; it must be 1 to 16"):
            mk.moe_dispatch(torch.ones(2, 8), torch.zeros(2, 17, dtype=torch.int64), 20)

    run(work, cluster=(1, 1))


@pytest.mark.parametrize("activation", ["gelu", "relu", "relu2", "none"])
def test_activations(activation):
    """Forward and backward pass; recomputed, and kept."""
    layer = layer_of((1, 2), dtype=torch.float32, activation=activation)

    def work(group):
        for save in ("inputs", "activations"):
            ffn_gradients(group, layer, save=save)

    run(work, cluster=(1, 2))


def test_matrices_that_are_transposed_views():
    """Their gradients are laid out as they are."""
    layer = layer_of((1, 2), dtype=torch.float32)
    run(lambda group: ffn_gradients(group, layer, transposed=True), cluster=(1, 2))


@both
@pytest.mark.parametrize("cluster", [(1, 2), pytest.param((2, 2), marks=THOROUGH)], ids=cluster_name)
def test_all_schedules_give_the_same_bits(cluster, call):
    layer = Layer((5, 4, 3, 6)[: cluster[0] * 2], (2, 1, 2, 1)[: cluster[0] * 2], k=2 * cluster[0])
    expected = run(lambda group: call(group, layer), cluster=cluster, seed=0)
    for seed, options in enumerate([{"slow": {1: 0.02}}, {"ctas": 4}], start=1):
        for results, same in zip(
            run(lambda group: call(group, layer), cluster=cluster, seed=seed, **options), expected
        ):
            for one, other in zip(results, same, strict=True):
                assert_same(one, other)


@pytest.mark.thorough
@both
@pytest.mark.parametrize("options", [{"slow": {0: 0.02}}, {"late": {1: 3000}}])
def test_stragglers(options, call):
    layer = layer_of((2, 1), dtype=torch.float32)

    def work(group):
        for turn in range(2):
            call(group, layer, turn, max_tokens=20)

    run(work, cluster=(2, 1), **options)


def test_nothing_beside_the_workspaces_is_written(monkeypatch):
    guards = Guards(monkeypatch)
    layer = layer_of((2, 1), dtype=torch.float32)
    run(lambda group: (ffn_gradients(group, layer), halves_gradients(group, layer)), cluster=(2, 1))
    guards.check()


def test_a_token_crosses_to_a_node_once_in_each_direction():
    """In the backward pass, as in the forward pass, whose routing it takes: no ids cross again."""
    cluster, gpus = (2, 2), 2
    layer = Layer((3, 4, 5, 6), (2,) * 4, k=5, hidden=32, out=16, dtype=torch.float32)

    def crossings(source, node):
        low, high = layer.first(node * gpus), layer.first(node * gpus) + 2 * gpus
        return int(((layer.ids(source) >= low) & (layer.ids(source) < high)).any(1).sum())

    def work(group):
        ffn_gradients(group, layer, save="activations")
        group.barrier()
        return group.world.traffic.network

    traffic = run(work, cluster=cluster)[-1]
    width = layer.hidden * 4
    for source in range(4):
        for target in range(4):
            node = target // gpus
            if source % gpus != target % gpus or source // gpus == node:
                assert traffic[source][target] == 0, "only counterparts talk over the network"
                continue
            there, back = crossings(source, node), crossings(target, source // gpus)
            weights = layer.tokens[source] * layer.k * 4
            forward = 64 + max(layer.tokens) * layer.k * 4 + weights + (there + back) * width
            # dout and its weights, then dx and the gradients of weights, each a combine with weights of its own
            # whose rows are 64 bytes apart
            backward = 3 * (64 + weights) + (there + back) * width + max(64 * (back - 1) + layer.k * 4, 0)
            assert traffic[source][target] == forward + backward


def test_a_trace_shows_the_launches_in_order():
    """Those without communication, too, which complete no epoch."""

    def work(group):
        with mk.trace() as trace:
            ffn_gradients(group, layer_of((1, 2), dtype=torch.float32))
        return trace

    launches = {event.call: event.op for event in run(work, cluster=(1, 2))[0].of(1, "launch")}
    assert [launches[call] for call in sorted(launches)] == [
        "moe_ffn", "moe_dispatch_matmul", "moe_dispatch_matmul", "moe_gated_backward", "moe_weight_grad",
        "moe_weight_grad", "moe_grouped_matmul", "moe_combine", "moe_combine",
    ]  # fmt: skip


@pytest.mark.parametrize("gate", [32767.9, 2.0**27, -(2.0**27)])
def test_the_slope_of_silu_is_right_for_large_gates(gate):
    """It is 1 + gate - silu(gate) for large gates, of which fp32 has no digits left."""

    def work(group):
        x = torch.tensor([[gate]], requires_grad=True)
        ones = torch.ones(1, 1)
        mk.moe_ffn(x, torch.zeros(1, 1, dtype=torch.int64), ones, torch.ones(1, 1, 2), ones[None]).sum().backward()
        exact = torch.tensor([[gate]], dtype=torch.float64, requires_grad=True)
        (torch.nn.functional.silu(exact) * exact).sum().backward()
        torch.testing.assert_close(x.grad.double(), exact.grad, rtol=1e-6, atol=0)

    run(work, cluster=(1, 1))


def test_blocks_that_are_as_high_as_a_tile_can_be():
    """The backward pass has the blocks of the forward pass, and takes fewer columns if these are high."""
    layer = Layer((5,), (2,), k=2, hidden=24, out=20, dtype=torch.float32)
    high = functools.partial(halves_gradients, config=mk.Config(tile_m=4096, tile_n=16))
    run(high, layer, cluster=(1, 1))
    tiles = planning.default_tiles(SimulatedGpu((9, 0)), torch.bfloat16, 4096, True)
    assert [tile_width(tiles, tile_m) for tile_m in (64, 128, 256, 512)] == [256, 256, 128, 64]
