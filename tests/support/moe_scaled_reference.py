"""What the tests of the mixture of experts in fp8 have in common: layers, and float64 of what operands stand for."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

import mkernel as mk
from support.moe_reference import Layer, assert_sum, check_rows, of_expert
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
