"""What the tests of operators with scales have in common: quantized operands, and float64 of what they stand for."""

from __future__ import annotations

from dataclasses import dataclass

import torch

import mkernel as mk
from support import operator_calls, reduce_reference
from support.operator_calls import assert_same

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
TENSORS, ROWS, BLOCKS = ("TensorWise",) * 2, ("RowWise",) * 2, ("BlockWise1x128", "BlockWise128x128")
# those that may be mixed, too
RECIPES = [TENSORS, ROWS, ("TensorWise", "RowWise"), ("RowWise", "TensorWise"), BLOCKS]


def recipe_name(value):
    """For the names of tests."""
    return "-".join(value).replace("Wise", "") if isinstance(value, tuple) and value in RECIPES else None


@dataclass(frozen=True)
class Quantized:
    """How operands are quantized. Ranks, rows, columns and blocks differ in size, so that a scale of another one
    shows."""

    recipe: tuple[str, str] = ROWS
    kinds: tuple[torch.dtype, torch.dtype] = (E4M3, E4M3)

    def rows(self, rows, k, key):
        """a [rows, k] and its scales."""
        return self._quantized(rows, k, (1, *key), 0)

    def columns(self, k, n, key):
        """b [k, n], a transposed view, and its scales."""
        w, scale = self._quantized(n, k, (2, *key), 1)
        return w.t(), scale.t() if scale.dim() else scale

    def _quantized(self, rows, columns, key, which):
        generator = torch.Generator().manual_seed(hash(key) % 2**31)
        values = torch.randn(rows, columns, generator=generator)
        size = 2.0 ** torch.randint(-3, 4, (rows, 1 + columns // 128), generator=generator)
        values *= size.repeat_interleave(128, 1)[:, :columns] * 2 ** torch.randn((), generator=generator)
        return mk.quantize(values, self.recipe[which], dtype=self.kinds[which])


@dataclass(frozen=True)
class ScaledSum(reduce_reference.Sum):
    """A sum over ranks; `dtype` is that of the result."""

    how: Quantized = Quantized()

    def a(self, rank, turn=0):
        return mk.dequantize(*self.how.rows(self.m, self.depth(rank), (rank, turn)), torch.float64)

    def b(self, rank, turn=0):
        return mk.dequantize(*self.how.columns(self.depth(rank), self.n, (rank, turn)), torch.float64)


def call_sum(group, way, case, turn=0, *, lay_out=lambda tensor: tensor, bias=False, residual=False, **arguments):
    """One call of an operator that sums over ranks; the result and the inputs are checked. lay_out: of a, b, and
    scales."""
    a, scale_a = case.how.rows(case.m, case.depth(group.rank), (group.rank, turn))
    b, scale_b = case.how.columns(case.depth(group.rank), case.n, (group.rank, turn))
    given = [lay_out(each) for each in (a, b, scale_a, scale_b)]
    before = [each.clone() for each in given]
    more = {"bias": case.bias(turn)} if bias else {}
    if residual:
        more["residual"] = reduce_reference.mine(group, way, case.residual(turn)).clone()
    function = getattr(mk, f"scaled_{reduce_reference.name_of(way)}")
    y = function(*given, group=group, out_dtype=case.dtype, **more, **arguments)
    for each, old in zip(given, before):
        assert_same_bytes(each, old)
    reduce_reference.check(
        group, way, case, y, turn, bias=bias, residual=residual, reduce_dtype=arguments.get("reduce_dtype")
    )
    return y


@dataclass(frozen=True)
class ScaledGather:
    """The shape of a call of all_gather_scaled_matmul: m rows of each rank, n columns, of each rank or of all."""

    m: int
    n: int | tuple[int, ...]
    k: int
    dtype: torch.dtype = torch.bfloat16
    how: Quantized = Quantized()

    def rows(self, rank, turn=0):
        return self.how.rows(self.m, self.k, (rank, turn))

    def columns(self, rank, turn=0):
        return self.how.columns(self.k, self.n[rank] if isinstance(self.n, tuple) else self.n, (rank, turn))

    def gathered(self, size, turn=0):
        """All rows in float64."""
        return torch.cat([mk.dequantize(*self.rows(rank, turn), torch.float64) for rank in range(size)])


def call_gather(group, case, turn=0, *, lay_out=lambda tensor: tensor, bias=None, **arguments):
    """One call on this rank; the results and the inputs are checked."""
    given = [
        lay_out(each) for pair in zip(case.rows(group.rank, turn), case.columns(group.rank, turn)) for each in pair
    ]
    before = [each.clone() for each in given]
    found = mk.all_gather_scaled_matmul(*given, group=group, out_dtype=case.dtype, bias=bias, **arguments)
    for each, old in zip(given, before):
        assert_same_bytes(each, old)
    y, *others = found if isinstance(found, tuple) else (found,)
    check_gather(group, case, y, turn, bias)
    if others:
        rows, scales = others
        everyone = [case.rows(rank, turn) for rank in range(group.size)]
        assert_same_bytes(rows, torch.cat([a for a, _ in everyone]))
        expected = [scale.reshape(1, 1).expand(case.m, 1) if scale.numel() == 1 else scale for _, scale in everyone]
        assert torch.equal(scales, torch.cat(expected))
    return y


def check_gather(group, case, y, turn=0, bias=None):
    """Every element within its bound of float64: sums in fp32, the result rounded once, with a bias twice."""
    a, b = case.gathered(group.size, turn), mk.dequantize(*case.columns(group.rank, turn), torch.float64)
    product = a @ b
    exact = product if bias is None else product + bias.double()
    rounded = torch.finfo(case.dtype).eps / 2 * (exact.abs() + (0 if bias is None else product.abs()))
    bound = 1.02 * rounded + (case.k + 5) * 2**-24 * (a.abs() @ b.abs()) + 1e-30
    assert y.dtype == case.dtype
    assert y.shape == exact.shape
    error = (y.double() - exact).abs()
    assert bool((error <= bound).all()), f"rank {group.rank}: {(error - bound).max().item()} over the bound"


def assert_same_bytes(actual, expected):
    """Bit for bit; of any dtype."""
    if actual.element_size() == 1:
        assert actual.shape == expected.shape
        assert torch.equal(actual.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))
    else:
        assert_same(actual, expected)


def run(function, *args, **options):
    return operator_calls.run(function, *args, **options)
