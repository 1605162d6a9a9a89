"""The tile GEMM: every shape, every kind of operand, against float64."""

from typing import Any, NamedTuple

import pytest
import torch
import triton
import triton.language as tl

from mkernel.lang.gemm import masked_block, multiply_tile, store_tile
from mkernel.lang.matrix import Block, Matrix, Strides, Tile, Tiling
from mkernel.runtime.operands import DTYPES, constants, descriptor, matmul_precision

from .harness import launch, simulate, workspace_of

TILE_M, TILE_N, TILE_K = 16, 32, 16
CANARY = 123.0


class Call(NamedTuple):
    """Strides of a, b and c, sizes, and how tiles are made."""

    a: Any
    b: Any
    c: Any
    parts: Any
    rows: Any
    n: Any
    k: Any
    tiling: Any


@triton.jit
def _multiply(a, b, c, call):
    for part in range(call.parts):
        for row in range(0, call.rows, call.tiling.M):
            for column in range(0, call.n, call.tiling.N):
                place = Tile(part, row, call.rows, column, call.n)
                store_tile(c, place, multiply_tile(a, b, place, call.k, call.tiling))


@triton.jit
def multiply(context, a, b, c, call):
    """c[part] = a[part] @ b for every part, tile by tile."""
    _multiply(Matrix(a, call.a), Matrix(b, call.b), Matrix(c, call.c), call)


def padded(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Random values with aligned rows, and NaN behind every row's end."""
    memory = torch.full((rows, -(-columns // 8) * 8 + 8), float("nan"), dtype=dtype)
    memory[:, :columns] = torch.randn(rows, columns)
    return memory[:, :columns]


def run(a, b, parts, *, described, transposed, out_described):
    """a is [parts * rows, k]; returns all of c's memory: canary columns on both sides, rows behind."""
    rows, k, n = a.shape[0] // parts, a.shape[1], b.shape[1]
    width = -(-n // 8) * 8 + 16
    memory = torch.full((parts * rows + 3, width), CANARY, dtype=a.dtype)
    c = memory[: parts * rows, 8 : 8 + n]
    operand_a, operand_b, operand_c = a, b, c
    if described:
        operand_a = descriptor(a, [parts, rows, k], [rows * a.stride(0), a.stride(0), 1], [1, TILE_M, TILE_K])
        if transposed:
            operand_b = descriptor(b, [n, k], [b.stride(1), 1], [TILE_N, TILE_K])
        else:
            operand_b = descriptor(b, [k, n], [b.stride(0), 1], [TILE_K, TILE_N])
    if out_described:
        operand_c = descriptor(c, [parts, rows, n], [rows * width, width, 1], [1, TILE_M, TILE_N])

    def rank(group):
        call = Call(
            a=Strides(rows * a.stride(0), *a.stride(), *constants(described, False)),
            b=Strides(0, *b.stride(), *constants(described, transposed)),
            c=Strides(rows * c.stride(0), *c.stride(), *constants(out_described, False)),
            parts=parts, rows=rows, n=n, k=k,
            tiling=Tiling(*constants(TILE_M, TILE_N, TILE_K, 1, matmul_precision(a.dtype))),
        )  # fmt: skip
        launch(group, workspace_of(group), multiply, a=operand_a, b=operand_b, c=operand_c, call=call)

    simulate(rank)
    return memory, c


def check(memory, c, a, b):
    exact = a.double() @ b.double()
    scale = a.double().abs() @ b.double().abs()
    k = a.shape[1]
    bound = torch.finfo(c.dtype).eps * exact.abs() + k**0.5 * torch.finfo(torch.float32).eps * scale + 1e-30
    assert ((c.double() - exact).abs() <= bound).all()
    around = memory.clone()
    around[: c.shape[0], 8 : 8 + c.shape[1]] = CANARY
    assert (around == CANARY).all(), "something outside of c was written"


@pytest.mark.parametrize("transposed", [False, True], ids=["plain", "transposed"])
@pytest.mark.parametrize("described", [False, True], ids=["pointers", "descriptors"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("parts", "rows", "n", "k"), [(1, 16, 32, 16), (3, 21, 37, 45), (2, 1, 1, 1)])
def test_products(dtype, described, transposed, parts, rows, n, k):
    a = padded(parts * rows, k, dtype)
    b = padded(n, k, dtype).t() if transposed else padded(k, n, dtype)
    memory, c = run(a, b, parts, described=described, transposed=transposed, out_described=described)
    check(memory, c, a, b)


@pytest.mark.parametrize(("described", "out_described"), [(False, True), (True, False)])
def test_kinds_of_operands_can_be_mixed(described, out_described):
    a, b = padded(2 * 19, 33, torch.bfloat16), padded(33, 35, torch.bfloat16)
    memory, c = run(a, b, 2, described=described, transposed=False, out_described=out_described)
    check(memory, c, a, b)


def test_pointers_take_any_strides_of_b():
    a, wide = padded(20, 24, torch.float32), torch.randn(24 * 3, 40 * 2)
    b = wide[::3, ::2]
    memory, c = run(a, b, 1, described=False, transposed=False, out_described=False)
    check(memory, c, a, b)


@pytest.mark.parametrize("described", [False, True], ids=["pointers", "descriptors"])
def test_values_that_are_not_finite_stay_in_their_row_and_column(described):
    a, b = torch.randn(32, 32), torch.randn(32, 64)
    a[3, 5] = float("nan")
    b[7, 40] = float("inf")
    _, c = run(a, b, 1, described=described, transposed=False, out_described=described)
    broken = ~torch.isfinite(c)
    expected = torch.zeros_like(broken)
    expected[3, :] = True
    expected[:, 40] = True
    assert torch.equal(broken, expected)


def test_bf16_and_fp16_are_summed_in_fp32():
    """4096 ones: bf16 sums would stop at 256, fp16 sums at 2048."""
    for dtype in (torch.bfloat16, torch.float16):
        a, b = torch.ones(16, 4096, dtype=dtype), torch.ones(4096, 32, dtype=dtype)
        _, c = run(a, b, 1, described=True, transposed=False, out_described=True)
        assert (c == 4096).all()


@triton.jit
def mark(context, c, row_stride, rows, n, value, M: tl.constexpr, N: tl.constexpr):
    """One tile, marked by adding a value to all of it."""
    tile = tl.zeros((M, N), tl.float32) + tl.load(value)
    store_tile(Matrix(c, Strides(rows * row_stride, row_stride, 1, False, False)), Tile(1, 16, rows, 32, n), tile)


def test_a_tile_of_nan_stays_inside_its_part():
    rows, n = 20, 40
    c = torch.zeros(3 * rows, n)

    def rank(group):
        value = torch.tensor([float("nan")])
        launch(group, workspace_of(group), mark, c=c, row_stride=n, rows=rows, n=n, value=value, M=TILE_M, N=TILE_N)

    simulate(rank)
    expected = torch.zeros(3 * rows, n, dtype=torch.bool)
    expected[rows + 16 : 2 * rows, 32:] = True
    assert torch.equal(c.isnan(), expected)


@triton.jit
def take_block(context, source, row, column, rows, columns, row_stride, column_stride, out):
    block = masked_block(Block(source, row_stride, column_stride), row, column, rows, columns, ROWS=8, COLUMNS=8)
    place = tl.arange(0, 8)
    tl.store(out + place[:, None] * 8 + place[None, :], block)


@pytest.mark.parametrize(("row", "column"), [(0, 0), (3, 2), (8, 0), (0, 16), (9, 9), (24, 24)])
def test_masked_block_is_zero_outside(row, column):
    source = torch.arange(1, 11 * 19 + 1, dtype=torch.float32).view(11, 19)
    out = torch.full((8, 8), CANARY)

    def rank(group):
        launch(group, workspace_of(group), take_block, source=source, row=row, column=column, rows=11, columns=19,
               row_stride=19, column_stride=1, out=out)  # fmt: skip

    simulate(rank)
    expected = torch.zeros(32 + 8, 32 + 8)
    expected[:11, :19] = source
    assert torch.equal(out, expected[row : row + 8, column : column + 8])
