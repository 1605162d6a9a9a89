"""The simulator's language beside Triton's own interpreter: the same values in the same types, or both refuse.

Where Triton's interpreter differs from a GPU it is no reference: it computes bf16 on raw bits and truncates, and its
numpy has no arithmetic of truth values. There torch is.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
import triton.runtime.interpreter as base
from hypothesis import given, settings
from hypothesis import strategies as st
from triton.language.semantic import TritonSemantic
from triton.runtime.jit import JITFunction

from mkernel.sim.dtypes import (
    BFLOAT16,
    INT1,
    TRITON_3_9,
    KernelError,
    bf16_bits,
    bf16_values,
    constant,
    info,
    same_dtype,
)
from mkernel.sim.interpreter import python_function, run
from mkernel.sim.tensors import Tensor

SIGNED = [tl.int8, tl.int16, tl.int32, tl.int64]
UNSIGNED = [tl.uint8, tl.uint16, tl.uint32, tl.uint64]
FLOATS = [tl.float16, tl.bfloat16, tl.float32, tl.float64]
DTYPES = [tl.int1, *SIGNED, *UNSIGNED, *FLOATS]
NUMBERS = [0, 1, 3, -2, 200, 70_000, 2**40, True, 0.5, -3.0, 1e300, float("inf")]
TORCH = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}

CTA = SimpleNamespace(program_id=3, num_programs=8, on_dot=lambda products: None)


def ours(function: Any, *values: Any, **constants: Any) -> Any:
    return run(CTA, python_function(function), *values, **constants)


# -- Triton's interpreter


class Builder(base.InterpreterBuilder):
    """With constants that it lacks."""

    def get_bf16(self, value: float) -> base.TensorHandle:
        return base.TensorHandle(bf16_bits(constant(value, BFLOAT16).reshape(1)), tl.bfloat16)

    def get_all_ones_value(self, type: Any) -> base.TensorHandle:
        dtype = base._get_np_dtype(type)
        return base.TensorHandle(~np.zeros(1, dtype=dtype), type.scalar)


BUILDER = Builder()
BUILDER.options = base.InterpreterOptions(sanitize_overflow=False)
SEMANTIC = TritonSemantic(BUILDER)


def _calling(member: Any) -> Any:
    return lambda *args, **kwargs: member(*args, **{**kwargs, "_semantic": SEMANTIC})


class _Patches(base._LangPatchScope):
    """Triton's own patches of its language, which can be made again and again."""

    def __init__(self) -> None:
        super().__init__()
        for owner in (tl, tl.core, tl.tensor, tl.math):
            for name, member in inspect.getmembers(owner):
                if tl.core.is_builtin(member):
                    self.set_attr(owner, name, _calling(member))
        for module in (tl, tl.core):
            base._patch_lang_core(module, self)
        base._patch_lang_tensor(tl.tensor, self)
        self.set_attr(tl.tensor, "__bool__", lambda self: bool(self.handle.data.reshape(-1)[0]))
        for kind in (JITFunction, base.InterpretedFunction):
            self.set_attr(kind, "__call__", lambda self, *args, **kwargs: self.fn(*args, **kwargs))
        self.made = [(owner, name, getattr(owner, name)) for owner, name, _ in self._changes]
        self.restore()


PATCHES = _Patches()


@contextmanager
def patched() -> Iterator[None]:
    for owner, name, value in PATCHES.made:
        PATCHES.set_attr(owner, name, value)
    try:
        with np.errstate(all="ignore"):
            yield
    finally:
        PATCHES.restore()


def for_triton(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    data = bf16_bits(value._data) if value.dtype is BFLOAT16 else value._data
    handle = base.TensorHandle(np.array(data, ndmin=1), value.dtype)
    return tl.tensor(handle, tl.block_type(value.dtype, list(value.shape)) if value.shape else value.dtype)


def from_triton(value: Any) -> Any:
    if isinstance(value, (tuple, list, tl.tuple)):
        return tuple(from_triton(part) for part in value)
    value = SEMANTIC.to_tensor(value)
    dtype = same_dtype(value.dtype)
    data = np.asarray(value.handle.data)
    data = bf16_values(data) if dtype is BFLOAT16 else data.astype(info(dtype).data)
    return Tensor(data.reshape([int(size) for size in value.shape])[()], dtype)


def theirs(function: Any, *values: Any, **constants: Any) -> Any:
    with patched():
        result = function.fn(*map(for_triton, values), **constants)
        return from_triton(result)


# -- comparing


def same(found: Any, expected: Any) -> bool:
    if isinstance(expected, tuple):
        return len(found) == len(expected) and all(map(same, found, expected))
    return (
        found.dtype is expected.dtype
        and found.shape == expected.shape
        and found._data.dtype == expected._data.dtype == info(found.dtype).data
        and isinstance(found._data, np.ndarray) == bool(found.shape)
        and np.array_equal(found._data, expected._data, equal_nan=expected._data.dtype.kind == "f")
    )


def check(function: Any, *values: Any, expected: Any = None, **constants: Any) -> None:
    """Both give the same, or both refuse."""
    shown = f"{function.fn.__name__}({', '.join(map(str, values))})"
    try:
        reference = theirs(function, *values, **constants)
    except Exception as refusal:
        try:
            ours(function, *values, **constants)
        except KernelError:
            return
        pytest.fail(f"{shown}: Triton refuses, {refusal!r}")
    found = ours(function, *values, **constants)
    if expected is not None:
        reference = expected(reference)
    assert same(found, reference), (
        f"{shown}: {found}, {found._data!r} instead of {reference}, {getattr(reference, '_data', reference)!r}"
    )


def block(dtype: Any, shape: tuple[int, ...], seed: int = 0, nonzero: bool = False) -> Tensor:
    """Numbers all over the range of a type, small ones more often; floats that a sum or product of bf16 rounds."""
    generator = np.random.default_rng([seed, *shape])
    kind = info(dtype)
    if dtype is INT1:
        data = generator.integers(0, 2, shape).astype(bool) | nonzero
    elif dtype in FLOATS:
        data = (generator.standard_normal(shape) * 2.0 ** generator.integers(-3, 4, shape)).astype(kind.data)
        if dtype is BFLOAT16:
            data = torch.tensor(data).bfloat16().float().numpy()
        data = np.where(data == 0, np.ones_like(data), data)
    else:
        limits = np.iinfo(kind.data)
        large = generator.integers(limits.min, limits.max, shape, dtype=kind.data, endpoint=True)
        small = generator.integers(-9 if kind.signed else 0, 10, shape).astype(kind.data)
        data = np.where(generator.random(shape) < 0.5, large, small)
        if nonzero:  # nor -1, by which the least integer cannot be divided
            data = np.where((data == 0) | (data == ~np.zeros_like(data)), data.dtype.type(3), data)
    return Tensor(np.asarray(data, dtype=kind.data)[()], dtype)


# -- operators


@triton.jit
def plus(x, y):
    return x + y


@triton.jit
def minus(x, y):
    return x - y


@triton.jit
def times(x, y):
    return x * y


@triton.jit
def divided(x, y):
    return x / y


@triton.jit
def quotient(x, y):
    return x // y


@triton.jit
def remainder(x, y):
    return x % y


@triton.jit
def both(x, y):
    return x & y


@triton.jit
def either(x, y):
    return x | y


@triton.jit
def differing(x, y):
    return x ^ y


@triton.jit
def left(x, y):
    return x << y


@triton.jit
def right(x, y):
    return x >> y


@triton.jit
def less(x, y):
    return x < y


@triton.jit
def at_most(x, y):
    return x <= y


@triton.jit
def more(x, y):
    return x > y


@triton.jit
def at_least(x, y):
    return x >= y


@triton.jit
def equal(x, y):
    return x == y


@triton.jit
def unequal(x, y):
    return x != y


@triton.jit
def smaller(x, y):
    return tl.minimum(x, y)


@triton.jit
def larger(x, y):
    return tl.maximum(x, y)


@triton.jit
def selected(x, y):
    return tl.where(tl.arange(0, 4) % 2 == 0, x, y)


@triton.jit
def stacked(x, y):
    return tl.join(x, y)


ARITHMETIC = [plus, minus, times, divided, quotient, remainder]
BITS = [both, either, differing]
SHIFTS = [left, right]
COMPARISONS = [less, at_most, more, at_least, equal, unequal]
BINARY = [*ARITHMETIC, *BITS, *SHIFTS, *COMPARISONS, smaller, larger, selected]
BY_BF16 = {
    plus: torch.add, minus: torch.sub, times: torch.mul, less: torch.lt, at_most: torch.le, more: torch.gt,
    at_least: torch.ge, equal: torch.eq, unequal: torch.ne,
}  # fmt: skip
if TRITON_3_9:  # before, these are computed in fp32
    BY_BF16 |= {smaller: torch.minimum, larger: torch.maximum}


def check_binary(function: Any, x: Any, y: Any) -> None:
    types = [value.dtype if isinstance(value, Tensor) else None for value in (x, y)]
    truth_values = all(dtype is INT1 or isinstance(value, bool) for value, dtype in zip((x, y), types, strict=True))
    if truth_values and function in (*ARITHMETIC, *SHIFTS):
        return  # see test_arithmetic_of_truth_values
    # numbers are of the tensor's type in arithmetic, and before Triton 3.9 of their own in comparisons
    adapts = TRITON_3_9 or function not in COMPARISONS
    in_bf16 = types == [BFLOAT16] * 2 or (adapts and set(types) == {BFLOAT16, None})
    if in_bf16 and function in BY_BF16:
        operands = [value._data if isinstance(value, Tensor) else float(value) for value in (x, y)]
        result = BY_BF16[function](*(torch.tensor(operand).bfloat16() for operand in operands))
        data = (result if result.dtype is torch.bool else result.float()).numpy()[()]
        check(function, x, y, expected=lambda wrong: Tensor(data, wrong.dtype))
    else:
        check(function, x, y)


def second_operand(function: Any, dtype: Any, shape: tuple[int, ...]) -> Tensor:
    value = block(dtype, shape, seed=1, nonzero=function in (quotient, remainder))
    if function in SHIFTS and dtype not in (INT1, *FLOATS):
        return Tensor(np.abs(value._data % value._data.dtype.type(7)).astype(value._data.dtype)[()], dtype)
    return value


@pytest.mark.parametrize("function", BINARY, ids=lambda function: function.fn.__name__)
@pytest.mark.thorough
def test_operators_of_two_tensors(function):
    for first, second in itertools.product(DTYPES, DTYPES):
        more = (((), (4,)), ((8, 4), (4,)), ((8, 1), (1, 4))) if first is second else ()
        for a, b in (((), ()), ((4,), ()), *more):
            check_binary(function, block(first, a), second_operand(function, second, b))


@pytest.mark.parametrize("function", BINARY, ids=lambda function: function.fn.__name__)
def test_operators_of_a_tensor_and_a_number(function):
    for dtype, number, shape in itertools.product(DTYPES, NUMBERS, ((), (4,))):
        if not (function in SHIFTS and not 0 <= number < 7) and not (function in (quotient, remainder) and number == 0):
            check_binary(function, block(dtype, shape), number)
        if not (dtype is INT1 and function in (quotient, remainder)):
            check_binary(function, number, second_operand(function, dtype, shape))


def test_arithmetic_of_truth_values():
    """i1 counts modulo 2; numpy does not."""
    for a, b in itertools.product((False, True), repeat=2):
        x, y = (Tensor(np.bool_(value), INT1) for value in (a, b))
        for function, result in ((plus, a ^ b), (minus, a ^ b), (times, a and b)):
            found = ours(function, x, y)
            assert found.dtype is INT1
            assert bool(found._data) == result


def test_integers_wrap_and_divide_towards_zero():
    for dtype in (*SIGNED, *UNSIGNED):
        limits = np.iinfo(info(dtype).data)
        last, one = Tensor(info(dtype).data.type(limits.max), dtype), Tensor(info(dtype).data.type(1), dtype)
        assert ours(plus, last, one)._data == limits.min
        assert ours(minus, Tensor(info(dtype).data.type(limits.min), dtype), one)._data == limits.max
    for a, b, result, rest in ((-7, 2, -3, -1), (7, -2, -3, 1), (-7, -2, 3, -1), (7, 2, 3, 1)):
        for shape in ((), (4,)):
            x, y = (Tensor(np.full(shape, value, np.int32)[()], tl.int32) for value in (a, b))
            assert (ours(quotient, x, y)._data == result).all()
            assert (ours(remainder, x, y)._data == rest).all()


# -- one operand


@triton.jit
def negative(x):
    return -x


@triton.jit
def inverted(x):
    return ~x


@triton.jit
def absolute(x):
    return tl.abs(x)


@pytest.mark.parametrize("function", [negative, inverted, absolute], ids=lambda function: function.fn.__name__)
def test_operators_of_one_tensor(function):
    for dtype, shape in itertools.product(DTYPES, ((), (8,), (4, 2))):
        if dtype is INT1 and function is not inverted:
            continue
        value = block(dtype, shape)
        if dtype is BFLOAT16 and function is not inverted:
            data = -value._data if function is negative else np.abs(value._data)
            assert same(ours(function, value), Tensor(data, BFLOAT16))
        else:
            check(function, value)


@triton.jit
def cast(x, DTYPE: tl.constexpr):
    return x.to(DTYPE)


@triton.jit
def bits(x, DTYPE: tl.constexpr):
    return x.to(DTYPE, bitcast=True)


@pytest.mark.parametrize("source", DTYPES, ids=str)
def test_casts(source):
    for target, shape in itertools.product(DTYPES, ((), (16,))):
        value = block(source, shape)
        if source in FLOATS and target not in FLOATS:  # what does not fit, nothing defines
            value = Tensor(np.abs(np.clip(value._data, -100, 100)), source)
        if target is BFLOAT16:
            data = torch.tensor(value._data.astype(np.float32)).bfloat16().float().numpy()[()]
            check(cast, value, DTYPE=target, expected=lambda wrong, data=data: Tensor(data, wrong.dtype))
        else:
            check(cast, value, DTYPE=target)
        if (source is INT1) == (target is INT1):
            check(bits, value, DTYPE=target)


def test_rounding_towards_zero():
    @triton.jit
    def narrowed(x, DTYPE: tl.constexpr):
        return x.to(DTYPE, fp_downcast_rounding="rtz")

    numbers = Tensor(np.array([1 + 1 / 300, -1 - 1 / 300, 3.14159, 70000.0], dtype=np.float32), tl.float32)
    for dtype in (tl.float16, tl.bfloat16):
        found = ours(narrowed, numbers, DTYPE=dtype)._data.astype(np.float64)
        step = 2.0 ** (-10 if dtype is tl.float16 else -7)
        assert (np.abs(found) <= np.abs(numbers._data)).all()
        assert (np.abs(found)[:2] == np.floor((1 + 1 / 300) / step) * step).all()
    with pytest.raises(KernelError, match="narrowing"):
        ours(narrowed, numbers, DTYPE=tl.float64)


def test_pointers():
    @triton.jit
    def move(pointer, offset, DTYPE: tl.constexpr):
        return (pointer + offset - 1).to(tl.pointer_type(DTYPE)).to(tl.int64)

    for element, size in ((tl.int1, 1), (tl.int8, 1), (tl.bfloat16, 2), (tl.float32, 4), (tl.int64, 8)):
        pointer = Tensor(np.uint64(1 << 40), same_dtype(tl.pointer_type(element)))
        for dtype, shape in itertools.product((*SIGNED, *UNSIGNED[:3]), ((), (8,))):
            offset = Tensor((block(dtype, shape)._data.astype(np.int64) >> 33).astype(info(dtype).data), dtype)
            found = ours(move, pointer, offset, DTYPE=tl.int8)
            assert found.dtype is tl.int64
            assert (found._data == (1 << 40) + (offset._data.astype(np.int64) - 1) * size).all()
        assert ours(move, pointer, -5, DTYPE=tl.int8)._data == (1 << 40) - 6 * size
    for wrong in (0.5, pointer, Tensor(np.float32(1), tl.float32)):
        with pytest.raises(KernelError):
            ours(move, pointer, wrong, DTYPE=tl.int8)
    for function in (times, divided, quotient, both, less, equal):
        with pytest.raises(KernelError, match="pointer"):
            ours(function, pointer, 1)


# -- functions of one argument, with constants


@triton.jit
def exponential(x):
    return tl.exp(x) + tl.exp2(x) + tl.math.exp(x)


@triton.jit
def logarithms(x):
    return tl.log(tl.abs(x)) + tl.log2(tl.abs(x))


@triton.jit
def roots(x):
    return tl.sqrt(tl.abs(x)) + tl.rsqrt(tl.abs(x))


@triton.jit
def waves(x):
    return tl.sin(x) + tl.cos(x)


@triton.jit
def steps(x):
    return tl.floor(x) - tl.ceil(x)


@triton.jit
def error_function(x):
    return tl.erf(x)


@triton.jit
def sigmoid(x):
    return tl.sigmoid(x)


MATH = [exponential, logarithms, roots, waves, steps, error_function, sigmoid]


@pytest.mark.parametrize("function", MATH, ids=lambda function: function.fn.__name__)
def test_functions_of_floats(function):
    for dtype, shape in itertools.product((tl.float32, tl.float64, tl.float16, tl.int32), ((), (16,), (4, 8))):
        check(function, block(dtype, shape))


@triton.jit
def softmax(x):
    return tl.softmax(x)


@triton.jit
def sort(x):
    return tl.sort(x, descending=False)  # Triton 3.9's own interpreter cannot do without the argument


@triton.jit
def sort_down(x):
    return tl.sort(x, descending=True)


@triton.jit
def flip(x):
    return tl.flip(x, 0)


@triton.jit
def greatest(x):
    return tl.topk(x, 4)


@triton.jit
def woven(x):
    return tl.interleave(x, x + 1)


@triton.jit
def flat(x):
    return tl.ravel(x)


@triton.jit
def turned(x):
    return tl.trans(tl.expand_dims(x, 0)), tl.expand_dims(x, (0, -1)).permute(2, 1, 0)


@triton.jit
def shaped(x):
    return (
        x.reshape(2, 8),
        tl.reshape(x, (4, 4)).T,
        x[None, :].broadcast_to(4, 16),
        tl.broadcast_to(x[:, None], [16, 2]),
    )


@triton.jit
def halves(x):
    return tl.reshape(x, [8, 2]).split()


@triton.jit
def total(x):
    return tl.sum(x), tl.sum(x.reshape(4, 4), 1), tl.sum(x.reshape(4, 4), axis=0, keep_dims=True)


@triton.jit
def extremes(x):
    return tl.max(x), tl.min(x, 0), tl.max(x.reshape(4, 4), 1), tl.min(x.reshape(2, 8), axis=0, keep_dims=True)


@triton.jit
def places(x):
    return tl.argmax(x, 0), tl.argmin(x.reshape(4, 4), 1), tl.max(x, 0, return_indices=True)


@triton.jit
def running_sum(x):
    return tl.cumsum(x), tl.cumsum(x.reshape(4, 4), 1, reverse=True)


@triton.jit
def running_product(x):
    return tl.cumprod(x.reshape(8, 2), axis=1)


@triton.jit
def parities(x):
    return tl.xor_sum(x, 0), tl.reduce_or(x.reshape(4, 4), 1)


@triton.jit
def counts(x):
    return tl.histogram(x & 7, 8)


@triton.jit
def glued(x):
    return tl.cat(x, x, can_reorder=True)


@triton.jit
def picked(x):
    return tl.gather(x, tl.arange(0, 16) ^ 5, 0)


@triton.jit
def high_half(x):
    return tl.umulhi(x, x)


@triton.jit
def new_blocks(x):
    return tl.zeros((4, 2), x.dtype), tl.full([8], 3, x.dtype), tl.zeros_like(x), tl.arange(4, 8)


@triton.jit
def rounded_up(x):
    return tl.cdiv(x, 3), tl.cdiv(7, 2), tl.cdiv(x, x | 1)


@triton.jit
def identity(x):
    return tl.multiple_of(tl.max_contiguous(x, 4), 4)


@triton.jit
def bounded(x):
    return tl.clamp(x, -1.0, 1.0)


@triton.jit
def fast_quotient(x):
    return tl.fdiv(x, x + 2)


OF_ANY = [flat, turned, shaped, halves, total, extremes, places, running_sum, new_blocks, identity, picked, flip, sort,
          sort_down, greatest, woven, running_product, glued]  # fmt: skip
OF_INTEGERS = [parities, counts, rounded_up, high_half]
OF_FLOATS = [softmax, bounded, fast_quotient]
INEXACT_IN_BF16 = [total, extremes, places, running_sum, running_product, sort, sort_down, greatest, woven, new_blocks,
                   bounded, fast_quotient]  # fmt: skip


@pytest.mark.parametrize("function", [*OF_ANY, *OF_INTEGERS, *OF_FLOATS], ids=lambda function: function.fn.__name__)
def test_functions_of_blocks(function):
    types = (
        SIGNED + UNSIGNED + FLOATS if function in OF_ANY else SIGNED + UNSIGNED if function in OF_INTEGERS else FLOATS
    )
    for dtype in types:
        if function is counts and dtype not in (tl.int32, tl.int64, tl.uint32):
            continue
        value = block(dtype, (16,))
        if function is total and dtype not in FLOATS:  # Triton's interpreter does not wrap sums
            value = Tensor(value._data // value._data.dtype.type(100), dtype)
        if not (dtype is BFLOAT16 and function in INEXACT_IN_BF16):
            check(function, value)


def in_bf16(value):
    """Results in fp32, rounded; others as they are."""
    if isinstance(value, tuple):
        return tuple(map(in_bf16, value))
    if value.dtype is not tl.float32:
        return value
    return Tensor(torch.tensor(value._data.copy()).bfloat16().float().numpy()[()], BFLOAT16)


def test_functions_of_bf16_blocks():
    value = block(BFLOAT16, (16,))
    as_float = Tensor(value._data, tl.float32)
    assert same(ours(total, value)[0], Tensor(torch.tensor(value._data).sum().bfloat16().float().numpy()[()], BFLOAT16))
    for function in (extremes, places, running_sum, running_product, bounded):
        expected = ours(function, as_float)
        assert same(ours(function, value), in_bf16(expected) if TRITON_3_9 and function is not extremes else expected)
    for function in (sort, sort_down, flip):
        found = ours(function, value)
        assert found.dtype is BFLOAT16
        assert (found._data == ours(function, as_float)._data).all()


@pytest.mark.parametrize("function", [total, extremes, parities, flat, halves], ids=lambda each: each.fn.__name__)
def test_functions_of_truth_values(function):
    check(function, block(INT1, (16,)))


@pytest.mark.parametrize("eight", [tl.float8e5, tl.float8e4nv], ids=str)
def test_fp8_is_cast(eight):
    for dtype in (tl.float32, tl.float16):
        value = Tensor(np.array([0.0, 1.0, -1.5, 0.25, 2.0, -4.0, 96.0, 0.75], info(dtype).data), dtype)
        narrow = ours(cast, value, DTYPE=eight)
        assert narrow.dtype is eight
        assert same(ours(cast, narrow, DTYPE=dtype), value)
        assert same(ours(bits, narrow, DTYPE=tl.uint8), Tensor(narrow._data, tl.uint8))
        with pytest.raises(KernelError, match="cast them first"):
            ours(plus, narrow, narrow)


@triton.jit
def compose(a, b, c, d):
    return a * c, b * c + d


@triton.jit
def scan(x, y):
    return tl.associative_scan((x, y), 0, compose), tl.associative_scan(x, 0, larger, reverse=True)


@triton.jit
def branching(a, b):
    result = b
    if a > b:
        result = a
    return result


@triton.jit
def reduced(x):
    return tl.reduce(x, 0, branching), tl.reduce(x.reshape(4, 4), 1, larger), tl.reduce(x, None, plus)


def test_combining_functions():
    x, y = block(tl.int32, (16,)), block(tl.int32, (16,), seed=1)
    (products, sums), largest = ours(scan, x, y)
    (a, b), c = (x._data, y._data), np.maximum.accumulate(x._data[::-1])[::-1]
    first, second = [a[0]], [b[0]]
    with np.errstate(all="ignore"):
        for i in range(1, 16):
            first.append(first[-1] * a[i])
            second.append(second[-1] * a[i] + b[i])
    assert products._data.tolist() == first
    assert sums._data.tolist() == second
    assert largest._data.tolist() == c.tolist()
    top, rows, everything = ours(reduced, x)
    assert top._data == x._data.max()
    assert rows._data.tolist() == x._data.reshape(4, 4).max(1).tolist()
    assert everything._data == x._data.sum(dtype=np.int32)


def test_functions_are_methods_too():
    @triton.jit
    def functions(x, y):
        return tl.sigmoid(x), tl.sum(x, 0), tl.cdiv(y, 3), tl.sin(x), tl.softmax(x), tl.abs(x), tl.max(y), tl.sort(y)

    @triton.jit
    def methods(x, y):
        return x.sigmoid(), x.sum(0), y.cdiv(3), x.sin(), x.softmax(), x.abs(), y.max(), y.sort()

    x, y = block(tl.float32, (16,)), block(tl.int32, (16,))
    assert same(ours(methods, x, y), ours(functions, x, y))


def test_elements_one_by_one():
    @triton.jit
    def leaky(x, slope):
        if x > 0:
            return x
        else:
            return x * slope

    @triton.jit
    def mapped(x):
        return tl.map_elementwise(leaky, x, 0.25)

    x = block(tl.float32, (8,))
    assert same(ours(mapped, x), Tensor(np.where(x._data > 0, x._data, x._data * np.float32(0.25)), tl.float32))


def test_multiplied_and_added():
    @triton.jit
    def fused(x, y, z):
        return tl.fma(x, y, z)

    x, y, z = (block(tl.float32, (64,), seed=seed) for seed in range(3))
    wide = (each._data.astype(np.float64) for each in (x, y, z))
    exact = next(wide) * next(wide) + next(wide)
    assert (ours(fused, x, y, z)._data == exact.astype(np.float32)).all()


@triton.jit
def product(x, y):
    return tl.dot(x, y), tl.dot(x, y, tl.dot(x, y))


@pytest.mark.parametrize("dtype", [*FLOATS, tl.int8], ids=str)
def test_products(dtype):
    x, y = block(dtype, (16, 32)), block(dtype, (32, 16), seed=1)
    once, twice = ours(product, x, y)
    exact = x._data.astype(np.float64) @ y._data.astype(np.float64)
    kind = info(once.dtype).data
    assert once.dtype is {tl.int8: tl.int32, tl.float64: tl.float64}.get(dtype, tl.float32)
    assert (once._data == exact.astype(kind)).all()
    assert (twice._data == (exact + once._data).astype(kind)).all()


# -- random expressions

LEAVES = [
    block(dtype, shape, seed=7) for dtype in DTYPES if dtype not in (INT1, BFLOAT16) for shape in ((), (4,), (4, 4))
]
expressions = st.recursive(
    st.sampled_from([*LEAVES, 1, -3, 0.5]),
    lambda inner: st.tuples(
        st.sampled_from([plus, minus, times, divided, *BITS, *COMPARISONS, smaller, larger]), inner, inner
    ),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(expressions)
def test_random_expressions(expression):
    def evaluate(node: Any) -> Any:
        """What both agree on; None if both refuse, or if it is arithmetic of truth values."""
        if not isinstance(node, tuple):
            return node
        function, x, y = node[0], evaluate(node[1]), evaluate(node[2])
        if x is None or y is None or not (isinstance(x, Tensor) or isinstance(y, Tensor)):
            return None
        check_binary(function, x, y)
        try:
            result = ours(function, x, y)
        except KernelError:
            return None
        return result

    evaluate(expression)
