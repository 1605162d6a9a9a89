"""Blocks and numbers: the part of triton.language that needs no memory, on numpy."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import triton.language as tl
import triton.runtime.interpreter as base

from mkernel.sim import tensors
from mkernel.sim.cta import running
from mkernel.sim.dtypes import (
    BFLOAT16,
    FLOAT,
    FLOAT16,
    FLOAT32,
    FLOAT64,
    FP8,
    INT1,
    INT32,
    INT64,
    INTEGER,
    TRITON_3_9,
    UINT32,
    KernelError,
    PointerType,
    constant,
    describe,
    factors_of_fp8,
    info,
    rounded_to_bf16,
    same_dtype,
)
from mkernel.sim.tensors import Tensor, convert, operands, to_tensor

# -- the launch


def program_id(axis: int) -> Tensor:
    return Tensor(np.int32(running.get().program_id if _axis(axis) == 0 else 0), INT32)


def num_programs(axis: int) -> Tensor:
    return Tensor(np.int32(running.get().num_programs if _axis(axis) == 0 else 1), INT32)


def _axis(axis: Any) -> int:
    if axis not in (0, 1, 2):
        raise KernelError(f"the axis of a grid is 0, 1 or 2, got {describe(axis)}")
    return axis


# -- new blocks


@lru_cache(maxsize=512)
def _counting(start: int, end: int) -> np.ndarray:
    numbers = np.arange(start, end, dtype=np.int32)
    numbers.flags.writeable = False
    return numbers


def arange(start: Any, end: Any) -> Tensor:
    if type(start) is not int or type(end) is not int:
        raise KernelError(f"tl.arange needs constants, got {describe(start)} and {describe(end)}")
    size = end - start
    if size <= 0 or size & (size - 1):
        raise KernelError(f"the size of tl.arange({start}, {end}) must be a power of two, it is {size}")
    if not -(2**31) <= start < end <= 2**31:
        raise KernelError(f"tl.arange({start}, {end}) does not fit in int32")
    return Tensor(_counting(start, end), INT32)


def shape_of(shape: Any) -> tuple[int, ...]:
    """A shape that was given as a tuple, or as single numbers."""
    if len(shape) == 1 and isinstance(shape[0], (tuple, list)):
        shape = shape[0]
    sizes = tuple(shape)
    for size in sizes:
        if type(size) is not int:
            raise KernelError(f"the sizes of a block must be constants, got {describe(size)}")
        if size <= 0 or size & (size - 1):
            raise KernelError(f"the sizes of a block must be powers of two, got {size} in {list(sizes)}")
    if math.prod(sizes) > tl.TRITON_MAX_TENSOR_NUMEL:
        raise KernelError(f"a block has at most {tl.TRITON_MAX_TENSOR_NUMEL} elements, {list(sizes)} has more")
    return sizes


def full(shape: Any, value: Any, dtype: Any) -> Tensor:
    sizes, target = shape_of((shape,)), _dtype(dtype)
    if type(value) is Tensor:
        if value.numel != 1:
            raise KernelError(f"tl.full needs a scalar, got {describe(value)}")
        data = convert(value._data.reshape(-1)[0], value.dtype, target)
    else:
        data = tensors._operand(tensors._number(value), None, target, True)
    return Tensor(np.full(sizes, data) if sizes else data, target)


def zeros(shape: Any, dtype: Any) -> Tensor:
    return full(shape, 0, dtype)


def zeros_like(input: Tensor) -> Tensor:
    return zeros(input.shape, input.dtype)


def _dtype(dtype: Any) -> Any:
    if not isinstance(dtype, tl.dtype):
        raise KernelError(f"expected a dtype, got {describe(dtype)}")
    return same_dtype(dtype)


# -- shapes


def _reshaped(value: Tensor, shape: tuple[int, ...]) -> Tensor:
    if math.prod(shape) != value.numel:
        raise KernelError(f"{describe(value)} has {value.numel} elements: it cannot become {list(shape)}")
    return Tensor(value._data.reshape(shape) if shape else value._data.reshape(-1)[0], value.dtype)


def reshape(input: Any, *shape: Any, can_reorder: bool = False) -> Tensor:
    return _reshaped(to_tensor(input), shape_of(shape))


def expand_dims(input: Any, axis: Any) -> Tensor:
    value = to_tensor(input)
    axes = axis if isinstance(axis, (tuple, list)) else (axis,)
    rank = len(value.shape) + len(axes)
    wrapped = sorted(_wrapped(each, rank) for each in axes)
    if len(set(wrapped)) != len(wrapped):
        raise KernelError(f"tl.expand_dims was given an axis twice: {list(axes)}")
    return Tensor(np.expand_dims(value._data, tuple(wrapped)), value.dtype)


def _wrapped(axis: Any, rank: int) -> int:
    if type(axis) is not int or not -rank <= axis < rank:
        raise KernelError(f"the axis must be a constant from {-rank} to {rank - 1}, got {describe(axis)}")
    return axis % rank


def spread(data: Any, shape: tuple[int, ...]) -> Any:
    """Data broadcast to a shape of the same rank, or a scalar to any shape."""
    if data.shape == shape:
        return data
    if data.shape and len(data.shape) != len(shape):
        raise KernelError(f"{list(data.shape)} does not broadcast to {list(shape)}: the ranks differ")
    try:
        return np.broadcast_to(data, shape)
    except ValueError:
        raise KernelError(f"{list(data.shape)} does not broadcast to {list(shape)}") from None


def broadcast_to(input: Any, *shape: Any) -> Tensor:
    value = to_tensor(input)
    return Tensor(spread(value._data, shape_of(shape)), value.dtype)


def along(axis: int, rank: int) -> list[int]:
    return [-1 if each == axis else 1 for each in range(rank)]


def in_common_shape(*values: Any) -> list[Any]:
    """Data of several tensors in their common shape."""
    try:
        arrays = np.broadcast_arrays(*values)
    except ValueError:
        shapes = ", ".join(str(list(value.shape)) for value in values)
        raise KernelError(f"the shapes {shapes} do not broadcast: sizes must be equal, or one of them 1") from None
    return [array[()] for array in arrays] if arrays[0].ndim == 0 else list(arrays)


def broadcast(input: Any, other: Any) -> tuple[Tensor, Tensor]:
    x, y = to_tensor(input), to_tensor(other)
    first, second = in_common_shape(x._data, y._data)
    return Tensor(first, x.dtype), Tensor(second, y.dtype)


def permute(input: Tensor, *dims: Any) -> Tensor:
    order = tuple(dims[0]) if len(dims) == 1 and isinstance(dims[0], (tuple, list)) else dims
    if sorted(order) != list(range(len(input.shape))):
        raise KernelError(
            f"dims must be a permutation of the {len(input.shape)} axes of {describe(input)}, got {order}"
        )
    return Tensor(np.transpose(input._data, order), input.dtype)


def trans(input: Tensor, *dims: Any) -> Tensor:
    if dims:
        return permute(input, *dims)
    rank = len(input.shape)
    if rank < 2:
        raise KernelError(f"tl.trans needs two dimensions, got {describe(input)}")
    return permute(input, *range(rank - 2), rank - 1, rank - 2)


def join(a: Any, b: Any) -> Tensor:
    x, y = to_tensor(a), to_tensor(b)
    if x.dtype is not y.dtype:
        raise KernelError(f"tl.join needs two tensors of one dtype, got {describe(x)} and {describe(y)}")
    return Tensor(np.stack(in_common_shape(x._data, y._data), axis=-1), x.dtype)


def split(a: Tensor) -> tuple[Tensor, Tensor]:
    if not a.shape or a.shape[-1] != 2:
        raise KernelError(f"tl.split needs a last dimension of 2, got {describe(a)}")
    if len(a.shape) == 1:
        return Tensor(a._data[0], a.dtype), Tensor(a._data[1], a.dtype)
    return Tensor(a._data[..., 0], a.dtype), Tensor(a._data[..., 1], a.dtype)


def item(input: Tensor) -> Tensor:
    """A block of one element as a scalar tensor: no number of the host."""
    if input.numel != 1:
        raise KernelError(f".item() needs a tensor of one element, got {describe(input)}")
    return _reshaped(input, ())


# -- types


def cast(input: Any, dtype: Any, fp_downcast_rounding: str | None = None, bitcast: bool = False) -> Tensor:
    return to_tensor(input).to(dtype, fp_downcast_rounding, bitcast)


# -- elementwise


def where(condition: Any, x: Any, y: Any) -> Tensor:
    choice = to_tensor(condition)
    first, second, dtype = operands(x, y, pointers=True)
    data = choice._data if choice.dtype is INT1 else choice._data != 0
    if not (data.shape or first.shape or second.shape):
        return Tensor(first if data else second, dtype)
    try:
        return Tensor(np.where(data, first, second), dtype)
    except ValueError:
        shapes = ", ".join(str(list(part.shape)) for part in (data, first, second))
        raise KernelError(f"the shapes {shapes} of tl.where do not broadcast") from None


def promoted(value: Any) -> Tensor:
    """Triton's `_promote_bfloat16_to_float32`, which Triton 3.9 has not."""
    tensor = to_tensor(value)
    return tensor.to(FLOAT32) if tensor.dtype is BFLOAT16 and not TRITON_3_9 else tensor


def _extreme(name: str, scalar: Callable, plain: Callable, without_nan: Callable) -> Callable[..., Tensor]:
    """`plain` lets NaN through, `without_nan` does not."""

    def extreme(x: Any, y: Any, propagate_nan: Any = tl.PropagateNan.NONE) -> Tensor:
        first, second, dtype = operands(x, y) if TRITON_3_9 else operands(promoted(x), promoted(y))
        if (dtype is INT32 or dtype is INT64) and not (first.shape or second.shape):
            return Tensor(scalar(first, second), dtype)
        if info(dtype).kind == FLOAT:
            operate = plain if propagate_nan == tl.PropagateNan.ALL else without_nan
        else:
            operate = plain
        try:
            return Tensor(operate(first, second), dtype)
        except ValueError:
            shapes = f"{list(first.shape)} and {list(second.shape)}"
            raise KernelError(f"the shapes {shapes} of tl.{name} do not broadcast") from None

    return extreme


minimum = _extreme("minimum", min, np.minimum, np.fmin)
maximum = _extreme("maximum", max, np.maximum, np.fmax)


def clamp(x: Any, min: Any, max: Any, propagate_nan: Any = tl.PropagateNan.NONE) -> Tensor:
    result = minimum(maximum(x, min, propagate_nan), max, propagate_nan)
    if info(result.dtype).kind != FLOAT and not TRITON_3_9:
        raise KernelError(f"before Triton 3.9, tl.clamp is for floats, got {describe(to_tensor(x))}")
    return result


def _builtin_extreme(of_constants: Callable, of_tensors: Callable) -> Callable[..., Any]:
    """Python's min and max in a kernel."""

    def extreme(*values: Any) -> Any:
        if not any(type(value) is Tensor for value in values):
            return of_constants(values)
        result = values[0]
        for value in values[1:]:
            result = of_tensors(result, value)
        return result

    return extreme


builtin_min = _builtin_extreme(min, minimum)
builtin_max = _builtin_extreme(max, maximum)


def cdiv(x: Any, div: Any) -> Tensor:
    return to_tensor((x + (div - 1)) // div)


def add(x: Any, y: Any, sanitize_overflow: bool = True) -> Tensor:
    return to_tensor(x) + y if type(x) is not Tensor and type(y) is not Tensor else x + y


def sub(x: Any, y: Any, sanitize_overflow: bool = True) -> Tensor:
    return to_tensor(x) - y if type(x) is not Tensor and type(y) is not Tensor else x - y


def mul(x: Any, y: Any, sanitize_overflow: bool = True) -> Tensor:
    return to_tensor(x) * y if type(x) is not Tensor and type(y) is not Tensor else x * y


def _of_floats(name: str, operate: Callable) -> Callable[[Any], Tensor]:
    def function(x: Any) -> Tensor:
        value = to_tensor(x)
        if value.dtype is not FLOAT32 and value.dtype is not FLOAT64:
            raise KernelError(f"tl.{name} is for fp32 and fp64, got {describe(value)}: cast it with .to(tl.float32)")
        return Tensor(operate(value._data), value.dtype)

    return function


def _inverse_root(data: Any) -> Any:
    return (1 / np.sqrt(data)).astype(data.dtype)


exp, exp2, log, log2, cos, sin, sqrt, sqrt_rn, floor, ceil = (
    _of_floats(name, getattr(np, name.removesuffix("_rn")))
    for name in ("exp", "exp2", "log", "log2", "cos", "sin", "sqrt", "sqrt_rn", "floor", "ceil")
)
rsqrt = _of_floats("rsqrt", _inverse_root)


def abs_(x: Any) -> Tensor:
    value = to_tensor(x)
    if type(value.dtype) is PointerType:
        raise KernelError(f"tl.abs is for numbers, got {describe(value)}")
    return Tensor(np.abs(value._data), value.dtype)


def fma(x: Any, y: Any, z: Any) -> Tensor:
    """x * y + z, rounded once: products of all types but fp64 are exact in fp64."""
    x, y, z = to_tensor(x), to_tensor(y), to_tensor(z)
    _, _, product = operands(x, y)
    _, _, dtype = operands(z, Tensor(constant(0, product), product))
    if info(dtype).kind != FLOAT:
        return x * y + z
    first, second, third = (convert(each._data, each.dtype, dtype).astype(np.float64) for each in (x, y, z))
    return Tensor(convert(first * second + third, FLOAT64, dtype), dtype)


# -- reductions and scans


def _axis_of(value: Tensor, axis: Any) -> int | None:
    return None if axis is None else _wrapped(axis, len(value.shape))


def _of_one_axis(name: str, operate: Callable[..., Any], value: Tensor, axis: Any, keep_dims: bool) -> Tensor:
    if not value.shape:
        raise KernelError(f"tl.{name} needs a block, got {describe(value)}")
    data = operate(value._data, axis=_axis_of(value, axis), keepdims=bool(keep_dims))
    if value.dtype is BFLOAT16:
        data = rounded_to_bf16(data)
    return Tensor(data, value.dtype)


def _sum_dtype(dtype: Any, wanted: Any) -> Any:
    """Triton's `_pick_sum_dtype`."""
    if wanted is not None:
        return _dtype(wanted)
    if info(dtype).kind > INTEGER or info(dtype).bits >= 32:
        return dtype
    return INT32 if info(dtype).signed else UINT32


def _added(data: Any, axis: Any, keepdims: bool) -> Any:
    return np.add.reduce(data, axis=axis, keepdims=keepdims, dtype=data.dtype)


def sum_(input: Tensor, axis: Any = None, keep_dims: bool = False, dtype: Any = None) -> Tensor:
    value = to_tensor(input)
    return _of_one_axis("sum", _added, value.to(_sum_dtype(value.dtype, dtype)), axis, keep_dims)


def _largest(name: str, plain: Any, without_nan: Any, place: Callable) -> Callable[..., Any]:
    def largest(
        input: Tensor, axis: Any = None, return_indices: bool = False, return_indices_tie_break_left: bool = True,
        keep_dims: bool = False,
    ) -> Any:  # fmt: skip
        value = promoted(input)
        if return_indices:
            if axis is None:
                raise KernelError(f"tl.{name} with return_indices needs an axis")
            values = _of_one_axis(name, plain, value, axis, keep_dims)
            places = place(value._data, axis=_axis_of(value, axis), keepdims=bool(keep_dims))
            return values, Tensor(places.astype(np.int32), INT32)
        if info(value.dtype).bits < 32:
            value = value.to(FLOAT32 if info(value.dtype).kind == FLOAT else INT32)
        return _of_one_axis(name, without_nan if info(value.dtype).kind == FLOAT else plain, value, axis, keep_dims)

    return largest


max_ = _largest("max", np.maximum.reduce, np.fmax.reduce, np.argmax)
min_ = _largest("min", np.minimum.reduce, np.fmin.reduce, np.argmin)


def argmax(input: Tensor, axis: Any, tie_break_left: bool = True, keep_dims: bool = False) -> Tensor:
    return max_(input, axis, return_indices=True, keep_dims=keep_dims)[1]


def argmin(input: Tensor, axis: Any, tie_break_left: bool = True, keep_dims: bool = False) -> Tensor:
    return min_(input, axis, return_indices=True, keep_dims=keep_dims)[1]


def _of_integers(name: str, operation: np.ufunc) -> Callable[..., Tensor]:
    def reduction(input: Tensor, axis: Any = None, keep_dims: bool = False) -> Tensor:
        if info(input.dtype).kind > INTEGER:
            raise KernelError(f"tl.{name} is for integers, got {describe(input)}")
        return _of_one_axis(name, operation.reduce, input, axis, keep_dims)

    return reduction


xor_sum = _of_integers("xor_sum", np.bitwise_xor)
reduce_or = _of_integers("reduce_or", np.bitwise_or)


def _tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _slices(inputs: Sequence[Tensor], axis: int) -> list[list[Tensor]]:
    """The tensors at each place of an axis."""
    moved = [np.moveaxis(each._data, axis, 0) for each in inputs]
    return [[Tensor(data[place], each.dtype) for data, each in zip(moved, inputs, strict=True)]
            for place in range(moved[0].shape[0])]  # fmt: skip


def _combined(combine_fn: Callable, left: Sequence[Tensor], right: Sequence[Tensor]) -> list[Tensor]:
    """Each element of two groups, combined, in the types that the groups have. The function is one of scalars: where it
    branches on them, it is called for each element."""
    try:
        results = _tuple(combine_fn(*left, *right))
    except KernelError:
        if not left[0].shape:
            raise
        flat = [each._data.reshape(-1) for each in (*left, *right)]
        types = [each.dtype for each in (*left, *right)]
        each = [_tuple(combine_fn(*(Tensor(data[i], dtype) for data, dtype in zip(flat, types, strict=True))))
                for i in range(flat[0].size)]  # fmt: skip
        results = tuple(
            Tensor(
                np.array([to_tensor(part[i])._data for part in each]).reshape(left[0].shape),
                to_tensor(each[0][i]).dtype,
            )
            for i in range(len(left))
        )
    return [to_tensor(new).to(old.dtype) for new, old in zip(results, left, strict=True)]


def reduce(input: Any, axis: Any, combine_fn: Callable, keep_dims: bool = False) -> Any:
    inputs = _tuple(input)
    shape = inputs[0].shape
    if not shape or any(each.shape != shape for each in inputs):
        raise KernelError(f"tl.reduce needs blocks of one shape, got {', '.join(map(describe, inputs))}")
    flat = axis is None
    if flat:
        inputs = tuple(_reshaped(each, (each.numel,)) for each in inputs)
    place = 0 if flat else _wrapped(axis, len(shape))
    first, *others = _slices(inputs, place)
    for other in others:
        first = _combined(combine_fn, first, other)
    if keep_dims:
        kept = (1,) * len(shape) if flat else (*shape[:place], 1, *shape[place + 1 :])
        first = [Tensor(np.reshape(each._data, kept), each.dtype) for each in first]
    return tuple(first) if isinstance(input, tuple) else first[0]


def associative_scan(input: Any, axis: Any, combine_fn: Callable, reverse: bool = False) -> Any:
    inputs = _tuple(input)
    shape = inputs[0].shape
    if not shape or any(each.shape != shape for each in inputs):
        raise KernelError(f"tl.associative_scan needs blocks of one shape, got {', '.join(map(describe, inputs))}")
    place = _wrapped(axis, len(shape))
    parts = _slices(inputs, place)
    if reverse:
        parts.reverse()
    results = [parts[0]]
    for part in parts[1:]:
        results.append(_combined(combine_fn, results[-1], part))
    if reverse:
        results.reverse()
    whole = tuple(
        Tensor(np.stack([result[i]._data for result in results], axis=place), inputs[i].dtype)
        for i in range(len(inputs))
    )
    return whole if isinstance(input, tuple) else whole[0]


def reduce_with_indices(input: Tensor, axis: Any, combine_fn: Callable, keep_dims: bool = False) -> Any:
    place = _wrapped(axis, len(input.shape))
    index = _counting(0, input.shape[place]).reshape(along(place, len(input.shape)))
    return reduce((input, Tensor(np.broadcast_to(index, input.shape), INT32)), axis, combine_fn, keep_dims)


def _scan(operation: np.ufunc, value: Tensor, axis: Any, reverse: bool) -> Tensor:
    place = _wrapped(axis, len(value.shape))
    data = np.flip(value._data, place) if reverse else value._data
    data = operation.accumulate(data, axis=place, dtype=data.dtype)
    if value.dtype is BFLOAT16:
        data = rounded_to_bf16(data)
    return Tensor(np.flip(data, place) if reverse else data, value.dtype)


def cumsum(input: Tensor, axis: Any = 0, reverse: bool = False, dtype: Any = None) -> Tensor:
    value = promoted(input)
    return _scan(np.add, value.to(_sum_dtype(value.dtype, dtype)), axis, reverse)


def cumprod(input: Tensor, axis: Any = 0, reverse: bool = False, dtype: Any = None) -> Tensor:
    value = promoted(input)
    return _scan(np.multiply, value.to(_sum_dtype(value.dtype, dtype)) if TRITON_3_9 else value, axis, reverse)


def map_elementwise(scalar_fn: Callable, *args: Any, pack: int = 1) -> Any:
    if pack != 1:
        raise KernelError(f"the simulator knows tl.map_elementwise with pack=1 only, got {pack}")
    values = [to_tensor(arg) for arg in args]
    arrays = in_common_shape(*(value._data for value in values))
    shape = np.shape(arrays[0])
    flat = [np.reshape(array, -1) for array in arrays]
    results = [
        scalar_fn(*(Tensor(data[i], value.dtype) for data, value in zip(flat, values, strict=True)))
        for i in range(flat[0].size)
    ]
    columns = list(zip(*(_tuple(result) for result in results), strict=True))
    mapped = []
    for column in columns:
        kinds = {to_tensor(each).dtype for each in column}
        if len(kinds) > 1:
            raise KernelError(f"the function of tl.map_elementwise returns several types: {', '.join(map(str, kinds))}")
        data = np.array([to_tensor(each)._data for each in column]).reshape(shape)
        mapped.append(Tensor(data if shape else data[()], kinds.pop()))
    return tuple(mapped) if isinstance(results[0], tuple) else mapped[0]


# -- matrices

_DOT_TYPES = (tl.int8, tl.uint8, FLOAT16, BFLOAT16, FLOAT32, FLOAT64)
_PRECISIONS = base.InterpreterOptions().allowed_dot_input_precisions


def dot(
    input: Tensor, other: Tensor, acc: Any = None, input_precision: str | None = None, allow_tf32: Any = None,
    max_num_imprecise_acc: Any = None, out_dtype: Any = FLOAT32,
) -> Tensor:  # fmt: skip
    """Products and their sum are exact, like a tensor core's; the accumulator is rounded once. (Hopper's tensor cores
    keep fewer bits of sums of fp8 products, unless max_num_imprecise_acc says how many: not modelled.)"""
    a, b = input._data, other._data
    if input.dtype.name in FP8 and other.dtype.name in FP8:
        a, b = factors_of_fp8(input, other, max_num_imprecise_acc)
    elif input.dtype is not other.dtype or not any(input.dtype is each for each in _DOT_TYPES):
        raise KernelError(f"tl.dot needs two blocks of one 8-bit integer or float type, got {input} and {other}")
    if a.ndim < 2 or a.ndim != b.ndim or a.shape[:-2] != b.shape[:-2] or a.shape[-1] != b.shape[-2]:
        raise KernelError(f"the shapes {list(a.shape)} and {list(b.shape)} are not those of a product of matrices")
    if input_precision is not None and input_precision.lower() not in _PRECISIONS:
        raise KernelError(f"input_precision must be one of {', '.join(_PRECISIONS)}, got {input_precision!r}")
    shape = (*a.shape[:-1], b.shape[-1])
    wanted = _dtype(out_dtype)
    if wanted is BFLOAT16:
        raise KernelError("out_dtype=tl.bfloat16 is not supported: use tl.float32 and cast the result")
    if info(input.dtype).kind == INTEGER:
        dtype = INT32
    elif input.dtype is FLOAT16 or input.dtype.name in FP8:
        dtype = wanted
    else:
        dtype = FLOAT64 if input.dtype is FLOAT64 else FLOAT32
    if acc is not None and (acc.shape != shape or acc.dtype is not dtype):
        raise KernelError(f"the accumulator of tl.dot must be a block of {dtype}{list(shape)}, got {describe(acc)}")
    running.get().on_dot(a.size * b.shape[-1])
    total = np.matmul(a.astype(np.float64), b.astype(np.float64))
    if acc is not None:
        total = total + acc._data
    return Tensor(total.astype(info(dtype).data), dtype)
