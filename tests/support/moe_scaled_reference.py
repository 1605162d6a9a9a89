"""What the tests of the mixture of experts in fp8 have in common: layers, and float64 of what operands stand for."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

import mkernel as mk
from support.moe_reference import Layer, activation_of, assert_sum, check_rows, of_expert
from support.scaled_reference import E4M3, assert_same_bytes

OF_WEIGHTS = {"RowWise": "RowWise", "BlockWise1x128": "BlockWise128x128"}


def turned(*tensors):
    return [each.transpose(1, 2) for each in tensors]


@dataclass(frozen=True)
class ScaledLayer(Layer):
    """Tokens and experts of every rank. dtype: that of the result, and of biases. wide: that of tokens before they are
    quantized; kinds: of tokens and matrices afterwards."""

    recipe: str = "BlockWise1x128"
    wide: torch.dtype = torch.bfloat16
    kinds: tuple[torch.dtype, torch.dtype] = (E4M3, E4M3)

    @cached_property
    def narrow(self):
        return Layer(self.tokens, self.experts, self.k, self.hidden, self.out, torch.float32, self.routing)

    def wide_x(self, rank, turn=0):
        """Tokens and their blocks differ in size, so that a scale of another one shows; one is zero."""
        x = self.narrow.x(rank, turn)
        size = 2.0 ** torch.randint(-5, 6, (len(x), 1 + self.hidden // 128), generator=self._generator(21, rank, turn))
        x = x * size.repeat_interleave(128, 1)[:, : self.hidden]
        x[2:3] = 0
        return x.to(self.wide)

    def quantized_x(self, rank, turn=0):
        return mk.quantize(self.wide_x(rank, turn), self.recipe, dtype=self.kinds[0])

    def _quantized_w(self, rank, turn):
        w = self.narrow.w(rank, turn).transpose(1, 2).contiguous()
        w *= 2.0 ** torch.randint(-3, 4, (len(w), self.out, 1), generator=self._generator(22, rank, turn))
        return mk.quantize(w, OF_WEIGHTS[self.recipe], dtype=self.kinds[1])

    def quantized_w(self, rank, turn=0):
        return turned(*self._quantized_w(rank, turn))

    def x(self, rank, turn=0):
        return mk.dequantize(*self.quantized_x(rank, turn), torch.float64)

    def w(self, rank, turn=0):
        return mk.dequantize(*self._quantized_w(rank, turn), torch.float64).transpose(1, 2)


@dataclass(frozen=True)
class ScaledFfn(ScaledLayer):
    """A whole layer, with `out` inner columns. recipe: of tokens and gate_up."""

    def pair(self, name, rank, turn=0):
        """Quantized matrices [experts, columns, k] and their scales, of "gate_up" or "down"."""
        recipe = OF_WEIGHTS[self.recipe] if name == "gate_up" else "BlockWise128x128"
        wide = getattr(self.narrow, name)(rank, turn).transpose(1, 2).contiguous()
        wide *= 2.0 ** torch.randint(-2, 3, (len(wide), wide.shape[1], 1), generator=self._generator(23, rank, turn))
        return mk.quantize(wide, recipe, dtype=self.kinds[1])

    def layer(self, rank, turn=0):
        """(sum of weight * row, its error's bound), in float64: inner activations are rounded to fp8 by the kernel, as
        its fp32 values tell, which may be off by one step of fp8 where these lie between two numbers of it."""

        def function(owner, expert):
            gate, up = mk.dequantize(*self.pair("gate_up", owner, turn), torch.float64)[expert].T.chunk(2, dim=1)
            down = mk.dequantize(*self.pair("down", owner, turn), torch.float64)[expert].T

            def apply(x):
                inner = activation_of(self.activation)(x @ gate) * (x @ up)
                narrow, scale = mk.quantize(inner.float(), "BlockWise1x128")
                rounded = mk.dequantize(narrow, scale, torch.float64)
                spread = 1e-5 * ((x.abs() @ gate.abs()) * (x.abs() @ up.abs()))
                low, high = ((inner + sign * spread).float() for sign in (-1, 1))
                steps = scale.repeat_interleave(128, 1)[:, : self.out]
                low, high = ((each / steps).to(E4M3).double() * steps for each in (low, high))
                unsure = torch.maximum((high - rounded).abs(), (low - rounded).abs())
                return rounded @ down, (rounded.abs() * 2**-7 + unsure) @ down.abs()

            return apply

        return self.result_of_experts(rank, turn, self.hidden, function)


def ffn_scaled(group, layer, turn=0, *, quantizes=False, lay_out=lambda each: each, **arguments):
    """One checked call of scaled_moe_ffn on this rank."""
    rank = group.rank
    (w1, scale_1), (w2, scale_2) = (turned(*layer.pair(name, rank, turn)) for name in ("gate_up", "down"))
    if quantizes:
        x, scale_x = lay_out(layer.wide_x(rank, turn)), None
        arguments |= dict(recipe_x=layer.recipe, dtype_x=layer.kinds[0])
    else:
        x, scale_x = map(lay_out, layer.quantized_x(rank, turn))
    ids, weights = layer.ids(rank, turn), layer.weights(rank, turn)
    y = mk.scaled_moe_ffn(
        x, ids, weights, w1, w2, scale_x, scale_1, scale_2, group=group, activation=layer.activation, **arguments
    )
    total, bound = layer.layer(rank, turn)
    assert y.dtype == torch.bfloat16
    error = (y.double() - total).abs()
    assert bool((error <= bound + 2**-8 * total.abs() + 1e-30).all()), (error - bound).max()
    return y


def check_scaled_dispatch(layer, rank, y, handle, turn=0):
    """Every element within its bound of float64: sums in fp32, the result rounded once."""
    counts = check_rows(layer, rank, handle, turn)
    rows, w, bias = layer.dispatched(rank, turn).double(), layer.w(rank, turn), layer.bias(rank, turn)
    first = 0
    for expert, count in enumerate(counts):
        part = rows[first : first + count]
        exact = part @ w[expert] + of_expert(bias, expert)
        terms = part.abs() @ w[expert].abs() + of_expert(bias, expert).abs()
        bound = 1.02 * torch.finfo(layer.dtype).eps / 2 * exact.abs() + (layer.hidden + 5) * 2**-24 * terms + 1e-30
        error = (y[first : first + count].double() - exact).abs()
        assert bool((error <= bound).all()), f"rank {rank}, expert {expert}: {(error - bound).max()} over the bound"
        first += count
    assert y.dtype == layer.dtype
    assert y[first:].isnan().all(), "rows beyond the counts were written"


def dispatch_scaled(group, layer, turn=0, *, quantizes=False, check=True, lay_out=lambda each: each, **arguments):
    """One checked call of moe_dispatch_scaled_matmul on this rank."""
    rank = group.rank
    w, scale_w = layer.quantized_w(rank, turn)
    if quantizes:
        x, scale_x = lay_out(layer.wide_x(rank, turn)), None
        arguments |= dict(recipe_x=layer.recipe, dtype_x=layer.kinds[0])
    else:
        x, scale_x = map(lay_out, layer.quantized_x(rank, turn))
    before = x.clone()
    y, handle = mk.moe_dispatch_scaled_matmul(
        x, layer.ids(rank, turn), w, scale_x, scale_w, group=group, out_dtype=layer.dtype, bias=layer.bias(rank, turn),
        **arguments,
    )  # fmt: skip
    assert_same_bytes(x, before)
    if check:
        check_scaled_dispatch(layer, rank, y, handle, turn)
    return y, handle


def combine_scaled(group, layer, turn=0, **arguments):
    """A dispatch and a checked combine on this rank."""
    y, handle = dispatch_scaled(group, layer, turn, **arguments)
    z = mk.moe_combine(y, handle, layer.weights(group.rank, turn), group=group)
    if layer.tokens[group.rank]:
        assert_sum(z, *layer.combined(group.rank, turn), layer.hidden)
    return z
