"""Biases of the experts, forward and backward, beside float64."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from support.broken_variants import WRONG, Broken, assert_caught
from support.moe_gradients import Trains, ffn_gradients, halves_gradients
from support.moe_reference import SMALL, Layer, ffn, layer_of
from support.operator_calls import assert_same, cluster_name, lay_out, run

import mkernel as mk
from mkernel.ops.moe import bias_grad, gradient_rows, grouped
from mkernel.ops.moe.bias_grad import _sum_rows

both = pytest.mark.parametrize("call", [ffn_gradients, halves_gradients])


@both
@pytest.mark.parametrize("cluster", [(1, 1), (1, 2), (2, 1), pytest.param((2, 2), marks=pytest.mark.thorough)],
                         ids=cluster_name)  # fmt: skip
def test_clusters(cluster, call):
    layer = layer_of(cluster, dtype=torch.float32, has_bias=True)
    for save in ("inputs", "activations") if layer.size < 4 else ("inputs",):
        run(lambda group: call(group, layer, save=save), cluster=cluster, seed=layer.size)


@both
@pytest.mark.parametrize("routing", ["none", "zipf"])
def test_routings(routing, call):
    """Experts without rows have zeros as the gradients of their biases."""
    layer = layer_of((1, 2), routing=routing, has_bias=True)
    run(lambda group: call(group, layer), cluster=(1, 2))


def test_several_tiles():
    """Of rows, columns and sums over rows; short tiles at the ends of experts."""
    layer = Layer((40, 33), (1, 2), hidden=140, out=34, dtype=torch.float32, has_bias=True)
    run(lambda group: (ffn_gradients(group, layer, config=SMALL), halves_gradients(group, layer)), cluster=(1, 2))


def test_one_of_two_biases_and_strides():
    layer = Layer((6, 9), (2, 2), hidden=24, out=16, has_bias=True)

    def work(group):
        rank = group.rank
        given = (layer.x(rank), layer.ids(rank), layer.weights(rank), layer.gate_up(rank), layer.down(rank))
        for name, bias in layer.biases(rank).items():
            zeros = {other: torch.zeros_like(each) for other, each in layer.biases(rank).items() if other != name}
            strided = {name: lay_out(bias, "every second column")}
            assert_same(mk.moe_ffn(*given, **strided), mk.moe_ffn(*given, **{name: bias}, **zeros))

    run(work, cluster=(1, 2))


def test_wrong_biases():
    layer = Layer((6, 9), (2, 2), hidden=24, out=16, has_bias=True)

    def work(group):
        rank = group.rank
        given = (layer.x(rank), layer.ids(rank), layer.weights(rank), layer.gate_up(rank), layer.down(rank))
        for error, biases in {
            r"b_gate_up is \(2, 24\), but must be \(2, 32\): the experts and columns of w_gate_up": dict(
                b_gate_up=layer.b_down(rank)
            ),
            "b_down has dtype torch.float32, but w_down has torch.bfloat16": dict(b_down=layer.b_down(rank).float()),
            "b_down must have 2 dimensions": dict(b_down=layer.b_down(rank)[0]),
        }.items():
            with pytest.raises(mk.ArgumentError, match=error):
                mk.moe_ffn(*given, **biases)
        with pytest.raises(mk.ArgumentError, match=r"bias is \(2, 15\), but must be \(2, 16\)"):
            mk.moe_dispatch_matmul(layer.x(rank), layer.ids(rank), layer.w(rank), bias=layer.bias(rank)[:, :15])
        ffn(group, layer)

    run(work, cluster=(1, 2))


def test_all_schedules_give_the_same_bits():
    layer = Layer((5, 4), (2, 1), has_bias=True)
    expected = run(lambda group: ffn_gradients(group, layer), cluster=(1, 2))
    for results, same in zip(run(lambda group: ffn_gradients(group, layer), cluster=(1, 2), seed=1, ctas=4), expected):
        for one, other in zip(results, same, strict=True):
            assert_same(one, other)


# -- broken variants


@triton.jit
def sum_one_row_less(grad, first, end, j):
    return _sum_rows(grad, first, end - 1, j)


@triton.jit
def bias_of_the_first_expert(values, bias, tile, first):
    if bias is not None:
        j = tile.column + tl.arange(0, values.shape[1])
        values += tl.load(bias.data + first + j, mask=j < tile.columns, other=0.0)[None, :]
    return values


@triton.jit
def without_bias(rows, down, i, inside):
    return tl.zeros((rows.ROWS,), tl.float32)


CALLS = Trains((1, 2), layer=Layer((9, 5), (2, 3), hidden=16, out=16, dtype=torch.float32, has_bias=True))
BROKEN = {
    "an expert's last row is left out": Broken(CALLS, {bias_grad._sum_rows: sum_one_row_less}, WRONG),
    "all experts have the bias of the first": Broken(CALLS, {grouped.biased: bias_of_the_first_expert}, WRONG),
    "weights' gradients miss the bias": Broken(CALLS, {gradient_rows._with_bias: without_bias}, WRONG),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken(name):
    assert_caught(BROKEN[name])
