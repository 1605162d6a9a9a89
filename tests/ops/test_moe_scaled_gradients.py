"""Gradients of the mixture of experts in fp8 on simulated clusters: beside those, in float64, of what the fp8 stands
for."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from support.moe_gradients import check_all, exact_ffn, exact_halves, gradient_of, leaf
from support.moe_reference import LAYERS
from support.moe_scaled_reference import ScaledFfn, ScaledLayer, turned
from support.operator_calls import assert_same, cluster_name, run

import mkernel as mk

FP32 = torch.float32


@dataclass(frozen=True)
class Dequantized(ScaledFfn):
    """Matrices are what their fp8 stands for. Gradients of results are bf16, as results are."""

    def gate_up(self, rank, turn=0):
        return self._matrices("gate_up", rank, turn)

    def down(self, rank, turn=0):
        return self._matrices("down", rank, turn)

    def _matrices(self, name, rank, turn):
        return mk.dequantize(*self.pair(name, rank, turn), torch.float64).transpose(1, 2)

    def _values(self, *shape, key):
        return super()._values(*shape, key=key).bfloat16().to(self.dtype)


def layer_gradients(group, layer, turn=0, *, quantizes=True, **arguments):
    """Forward and backward pass of scaled_moe_ffn, with every gradient checked."""
    rank = group.rank
    (w1, scale_1), (w2, scale_2) = (turned(*layer.pair(name, rank, turn)) for name in ("gate_up", "down"))
    weights, ids = leaf(group, layer.weights(rank, turn)), layer.ids(rank, turn)
    x, scale_x = (leaf(group, layer.wide_x(rank, turn)), None) if quantizes else layer.quantized_x(rank, turn)
    arguments |= dict(recipe_x=layer.recipe, dtype_x=layer.kinds[0]) if quantizes else {}
    given = (x, ids, weights, w1, w2, scale_x, scale_1, scale_2)
    y = mk.scaled_moe_ffn(*given, activation=layer.activation, **arguments)
    y.backward(gradient_of(layer, rank, turn, layer.hidden).bfloat16())
    with torch.no_grad():
        assert_same(mk.scaled_moe_ffn(*given, activation=layer.activation, **arguments), y.detach())
    gradients = dict(weights=weights.grad) | (dict(x=x.grad) if quantizes else {})
    if quantizes:
        check_all(layer, rank, gradients, exact_ffn(layer, turn))
    return gradients


@pytest.mark.parametrize(
    ("cluster", "recipe"), [((1, 1), "RowWise"), ((1, 2), "RowWise"), ((2, 1), "BlockWise1x128"), ((2, 2), "RowWise")],
    ids=cluster_name,
)  # fmt: skip
def test_gradients_of_a_layer(cluster, recipe):
    plain = LAYERS[cluster]
    options = dict(recipe=recipe, activation="gelu" if recipe == "RowWise" else "silu")
    layer = Dequantized(plain.tokens, plain.experts, plain.k, 144, 128, dtype=FP32, wide=FP32, **options)
    run(layer_gradients, layer, cluster=cluster)


def test_weights_of_tokens_in_fp8_have_gradients():
    """Computed in bf16, which nothing in fp8 needs more than."""
    layer = Dequantized((5, 6), (2, 1), hidden=130, out=128, dtype=FP32, wide=FP32)

    def work(group):
        exact, sizes = exact_ffn(layer)
        found = layer_gradients(group, layer, quantizes=False)["weights"]
        bound = 8 * 2**-8 * sizes["weights"][group.rank]
        assert bool(((found.double() - exact["weights"][group.rank]).abs() <= bound).all())

    run(work, cluster=(1, 2))


@pytest.mark.parametrize(
    ("cluster", "recipe"), [((1, 2), "BlockWise1x128"), ((2, 1), "RowWise"), ((2, 2), "BlockWise1x128")],
    ids=cluster_name,
)  # fmt: skip
def test_gradients_of_a_dispatch(cluster, recipe):
    plain = LAYERS[cluster]
    options = dict(recipe=recipe, has_bias=True)
    layer = ScaledLayer(plain.tokens, plain.experts, plain.k, 144, 130, dtype=FP32, wide=FP32, **options)

    def work(group):
        rank = group.rank
        w, scale_w = layer.quantized_w(rank)
        x, weights, bias = (leaf(group, each(rank)) for each in (layer.wide_x, layer.weights, layer.bias))
        y, handle = mk.moe_dispatch_scaled_matmul(
            x, layer.ids(rank), w, None, scale_w, bias=bias, out_dtype=FP32, recipe_x=recipe
        )
        mk.moe_combine(y, handle, weights).backward(gradient_of(layer, rank, 0, layer.out))
        gradients = dict(x=x.grad, weights=weights.grad, bias=bias.grad)
        check_all(layer, rank, gradients, exact_halves(layer))

    run(work, cluster=cluster)
