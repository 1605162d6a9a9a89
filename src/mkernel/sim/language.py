"""triton.language on `Tensor`: the functions that interpreted kernels call.

`native` finds the function that stands for one of Triton's. What is used in kernels is written here, on numpy. Triton's
library functions that are kernels themselves (tl.sort, tl.softmax, ...) are interpreted from their source. Any other
builtin goes to Triton's own interpreter, with tensors converted there and back (`_Elsewhere`).

Memory, atomics, barriers and the clock belong to the running CTA: `running` holds it. It is a context variable, and
each greenlet has a context of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import lru_cache, partial
from typing import Any, Protocol

import numpy as np
import triton.language as tl
import triton.runtime.interpreter as base
from triton._C.libtriton import interpreter as _native_memory
from triton.language.semantic import TritonSemantic

from mkernel.runtime.errors import SimulatorError
from mkernel.sim import tensors
from mkernel.sim.tensors import (
    BFLOAT16,
    FLOAT,
    FLOAT16,
    FLOAT32,
    FLOAT64,
    INT1,
    INT32,
    INT64,
    INTEGER,
    UINT32,
    KernelError,
    PointerType,
    Tensor,
    bf16_bits,
    bf16_values,
    constant,
    convert,
    describe,
    from_memory,
    info,
    operands,
    pointer_type,
    rounded_to_bf16,
    same_dtype,
    to_memory,
    to_tensor,
)  # fmt: skip


class Cta(Protocol):
    """What a running CTA must provide; the simulator's tasks do."""

    program_id: int
    num_programs: int
    unused_from: dict[Any, int]  # descriptor -> the first of its rows that is not used, see lang/hints.py

    def constant(self, address: np.uint64, dtype: np.dtype) -> Any: ...
    def load(
        self, addresses: np.ndarray, mask: np.ndarray, other: np.ndarray, dtype: np.dtype, descriptor: bool,
        volatile: bool = False,
    ) -> np.ndarray: ...  # fmt: skip
    def store(self, addresses: np.ndarray, values: np.ndarray, mask: np.ndarray, descriptor: bool = False) -> None: ...
    def barrier(self) -> None: ...
    def atomic(
        self, addresses: np.ndarray, mask: np.ndarray, size: int, acquire: bool, release: bool, one_gpu: bool,
        only_looks: bool, act: Callable[[], Any],
    ) -> Any: ...  # fmt: skip
    def clock(self) -> int: ...
    def acquire_for_descriptors(self) -> None: ...
    def complete_descriptor_stores(self) -> None: ...
    def store_everywhere(self, addresses: np.ndarray, values: np.ndarray) -> None: ...
    def load_from_all(self, addresses: np.ndarray, dtype: np.dtype) -> list[np.ndarray]: ...
    def fence_aliases(self) -> None: ...
    def waited_for(self, addresses: np.ndarray, mask: np.ndarray, expected: np.ndarray) -> None: ...
    def stamp(self) -> int: ...
    def on_dot(self, products: int) -> None: ...


running: ContextVar[Cta] = ContextVar("running")


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


def _shape_of(shape: Any) -> tuple[int, ...]:
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
    sizes, target = _shape_of((shape,)), _dtype(dtype)
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
    return _reshaped(to_tensor(input), _shape_of(shape))


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


def _spread(data: Any, shape: tuple[int, ...]) -> Any:
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
    return Tensor(_spread(value._data, _shape_of(shape)), value.dtype)


def _common(*values: Any) -> list[Any]:
    """Data of several tensors in their common shape."""
    try:
        arrays = np.broadcast_arrays(*values)
    except ValueError:
        shapes = ", ".join(str(list(value.shape)) for value in values)
        raise KernelError(f"the shapes {shapes} do not broadcast: sizes must be equal, or one of them 1") from None
    return [array[()] for array in arrays] if arrays[0].ndim == 0 else list(arrays)


def broadcast(input: Any, other: Any) -> tuple[Tensor, Tensor]:
    x, y = to_tensor(input), to_tensor(other)
    first, second = _common(x._data, y._data)
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
    return Tensor(np.stack(_common(x._data, y._data), axis=-1), x.dtype)


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


def _promoted(value: Any) -> Tensor:
    tensor = to_tensor(value)
    return tensor.to(FLOAT32) if tensor.dtype is BFLOAT16 else tensor


def _extreme(name: str, scalar: Callable, plain: Callable, without_nan: Callable) -> Callable[..., Tensor]:
    """`plain` lets NaN through, `without_nan` does not."""

    def extreme(x: Any, y: Any, propagate_nan: Any = tl.PropagateNan.NONE) -> Tensor:
        first, second, dtype = operands(_promoted(x), _promoted(y))
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
        value = _promoted(input)
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
    index = _counting(0, input.shape[place]).reshape(_along(place, len(input.shape)))
    return reduce((input, Tensor(np.broadcast_to(index, input.shape), INT32)), axis, combine_fn, keep_dims)


def _scan(operation: np.ufunc, value: Tensor, axis: Any, reverse: bool) -> Tensor:
    place = _wrapped(axis, len(value.shape))
    data = np.flip(value._data, place) if reverse else value._data
    data = operation.accumulate(data, axis=place, dtype=data.dtype)
    return Tensor(np.flip(data, place) if reverse else data, value.dtype)


def cumsum(input: Tensor, axis: Any = 0, reverse: bool = False, dtype: Any = None) -> Tensor:
    value = _promoted(input)
    return _scan(np.add, value.to(_sum_dtype(value.dtype, dtype)), axis, reverse)


def cumprod(input: Tensor, axis: Any = 0, reverse: bool = False) -> Tensor:
    return _scan(np.multiply, _promoted(input), axis, reverse)


def map_elementwise(scalar_fn: Callable, *args: Any, pack: int = 1) -> Any:
    if pack != 1:
        raise KernelError(f"the simulator knows tl.map_elementwise with pack=1 only, got {pack}")
    values = [to_tensor(arg) for arg in args]
    arrays = _common(*(value._data for value in values))
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
    """Products and their sum are exact, like a tensor core's; the accumulator is rounded once."""
    a, b = input._data, other._data
    if input.dtype is not other.dtype or not any(input.dtype is each for each in _DOT_TYPES):
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
    elif input.dtype is FLOAT16:
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


# -- memory


@lru_cache(maxsize=512)
def _everything(shape: tuple[int, ...]) -> np.ndarray:
    mask = np.ones(shape, dtype=bool)
    mask.flags.writeable = False
    return mask


_ONE = _everything((1,))


def _pointer(pointer: Any, what: str) -> Tensor:
    if type(pointer) is not Tensor or type(pointer.dtype) is not PointerType:
        raise KernelError(f"{what} needs a pointer, got {describe(pointer)}")
    return pointer


def _writable(pointer: Tensor, what: str) -> None:
    if pointer.dtype.const:
        raise KernelError(f"{what} to a constant pointer")


def _mask(mask: Any) -> np.ndarray:
    value = to_tensor(mask)
    if value.dtype is not INT1:
        raise KernelError(f"a mask must be a condition (tl.int1), got {describe(value)}")
    return value._data


def load(
    pointer: Any, mask: Any = None, other: Any = None, boundary_check: Any = (), padding_option: str = "",
    cache_modifier: str = "", eviction_policy: str = "", volatile: bool = False,
) -> Tensor:  # fmt: skip
    if type(pointer) is BlockPointer:
        return _elsewhere(tl.load, pointer, mask, other, boundary_check, padding_option)
    _pointer(pointer, "tl.load")
    if boundary_check or padding_option:
        raise KernelError("boundary_check and padding_option are for block pointers (tl.make_block_ptr)")
    if other is not None and mask is None:
        raise KernelError("`other` is what is loaded where the mask is false: it needs a mask")
    dtype = pointer.dtype.element_ty
    addresses = pointer._data
    of_pointers = type(dtype) is PointerType
    memory = info(dtype).memory
    fill = _zero(memory) if other is None else to_memory(to_tensor(other).to(dtype)._data, dtype)
    chosen = None if mask is None else _mask(mask)
    if not addresses.shape:
        if (chosen is not None and chosen.shape) or fill.shape:
            raise KernelError("a mask or `other` of a scalar pointer must be a scalar")
        if chosen is None and not volatile:
            data = running.get().constant(addresses, memory)
            if data is not None:
                return Tensor(data if of_pointers else from_memory(data, dtype), dtype)
        data = running.get().load(
            addresses.reshape(1), _ONE if chosen is None else chosen.reshape(1), np.asarray(fill), memory, False,
            volatile=volatile,
        ).reshape(-1)[0]  # fmt: skip
    else:
        if chosen is None:
            chosen = _everything(addresses.shape)
        elif chosen.shape != addresses.shape:
            addresses, chosen = _common(addresses, chosen)
        if fill.shape and fill.shape != addresses.shape:
            addresses, chosen, fill = _common(addresses, chosen, fill)
        data = running.get().load(addresses, chosen, np.asarray(fill), memory, False, volatile=volatile)
    return Tensor(data if of_pointers else from_memory(data, dtype), dtype)


@lru_cache(maxsize=64)
def _zero(dtype: np.dtype) -> np.ndarray:
    return np.zeros((), dtype=dtype)


def store(
    pointer: Any, value: Any, mask: Any = None, boundary_check: Any = (), cache_modifier: str = "",
    eviction_policy: str = "",
) -> None:  # fmt: skip
    if type(pointer) is BlockPointer:
        _elsewhere(tl.store, pointer, to_tensor(value), mask, boundary_check)
        return
    _pointer(pointer, "tl.store")
    _writable(pointer, "tl.store")
    if boundary_check:
        raise KernelError("boundary_check is for block pointers (tl.make_block_ptr)")
    dtype = pointer.dtype.element_ty
    tensor = to_tensor(value)
    values = to_memory(convert(tensor._data, tensor.dtype, dtype), dtype)
    addresses = pointer._data
    chosen = None if mask is None else _mask(mask)
    if not addresses.shape:
        if values.shape or (chosen is not None and chosen.shape):
            raise KernelError(f"a block cannot be stored through a scalar pointer: {describe(tensor)}")
        running.get().store(addresses.reshape(1), values.reshape(1), _ONE if chosen is None else chosen.reshape(1))
        return
    for part in (values, chosen):
        if part is not None and part.shape and _too_large(part.shape, addresses.shape):
            raise KernelError(
                f"a value or mask of shape {list(part.shape)} does not fit pointers of shape {list(addresses.shape)}"
            )
    if chosen is None:
        chosen = _everything(addresses.shape)
    running.get().store(addresses, values, chosen)


def _too_large(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    """Would broadcasting a shape against the target give something else than the target?"""
    if shape == target:
        return False
    lead = len(target) - len(shape)
    return lead < 0 or any(size not in (1, most) for size, most in zip(shape, target[lead:], strict=True))


# -- atomics

_ORDERS = {
    None: (True, True), "acq_rel": (True, True), "acquire": (True, False), "release": (False, True),
    "relaxed": (False, False),
}  # fmt: skip
_SCOPES = (None, "gpu", "cta", "sys")
_RMW, _SEQUENTIAL = _native_memory.RMW_OP, _native_memory.MEM_SEMANTIC.ACQUIRE_RELEASE


def _order(sem: Any, scope: Any) -> tuple[bool, bool, bool]:
    """Does an atomic operation acquire, does it release, and is it for one GPU only?"""
    if sem not in _ORDERS:
        raise KernelError(f"sem must be 'acquire', 'release', 'acq_rel' or 'relaxed', got {describe(sem)}")
    if scope not in _SCOPES:
        raise KernelError(f"scope must be 'gpu', 'cta' or 'sys', got {describe(scope)}")
    return *_ORDERS[sem], scope != "sys"


def _atomic_operands(pointer: Any, value: Any, mask: Any, what: str) -> tuple[Any, Any, Any, Any]:
    """Addresses, values and mask as arrays of one shape, and the element type."""
    _pointer(pointer, what)
    _writable(pointer, what)
    dtype = pointer.dtype.element_ty
    tensor = to_tensor(value)
    values = convert(tensor._data, tensor.dtype, dtype)
    addresses = pointer._data
    chosen = _ONE[0] if mask is None else _mask(mask)
    if not addresses.shape:
        if values.shape or chosen.shape:
            raise KernelError(f"{what} through a scalar pointer needs a scalar, got {describe(tensor)}")
        return addresses.reshape(1), values.reshape(1), chosen.reshape(1), dtype
    shape = addresses.shape
    parts = (np.ascontiguousarray(_spread(part, shape)) for part in (addresses, values, chosen))
    return *parts, dtype


def _perform(
    operation: Any, pointer: Tensor, addresses: Any, values: Any, chosen: Any, dtype: Any,
    order: tuple[bool, bool, bool], only_looks: bool,
) -> Tensor:  # fmt: skip
    def act() -> Any:
        return _native_memory.atomic_rmw(operation, addresses, values, chosen, _SEQUENTIAL)

    before = running.get().atomic(addresses, chosen, values.itemsize, *order, only_looks, act)
    return Tensor(before if pointer.shape else before.reshape(-1)[0], dtype)


def _atomic(name: str, signed: Any, unsigned: Any = None, floating: Any = None) -> Callable[..., Tensor]:
    def function(pointer: Any, val: Any, mask: Any = None, sem: Any = None, scope: Any = None) -> Tensor:
        what = f"tl.atomic_{name}"
        order = _order(sem, scope)
        addresses, values, chosen, dtype = _atomic_operands(pointer, val, mask, what)
        kind = info(dtype)
        if kind.bits < 32 and not (name == "add" and kind.kind == FLOAT):
            raise KernelError(f"{what} is not supported for {dtype}: it needs 32 or 64 bits")
        if kind.kind == FLOAT:
            if name in ("max", "min") and kind.bits >= 32:
                return _float_extreme(name, pointer, addresses, values, chosen, dtype, order)
            if floating is None:
                raise KernelError(f"{what} is not supported for {dtype}")
            if dtype is BFLOAT16:
                raise KernelError(f"the simulator has no {what} for bf16: add in fp32")
            if name == "xchg":  # bits are exchanged
                bits = values.view(f"i{values.itemsize}")
                before = _perform(floating, pointer, addresses, bits, chosen, dtype, order, False)
                return Tensor(before._data.view(values.dtype), dtype)
            return _perform(floating, pointer, addresses, values, chosen, dtype, order, False)
        operation = signed if kind.signed or unsigned is None else unsigned
        # waiting CTAs read by adding nothing, and keep the newest time by a maximum
        only_looks = operation is _RMW.MAX or (name == "add" and not (values[0] if values.size == 1 else values.any()))
        return _perform(operation, pointer, addresses, values, chosen, dtype, order, only_looks)

    return function


def _float_extreme(
    name: str, pointer: Tensor, addresses: Any, values: Any, chosen: Any, dtype: Any, order: tuple[bool, bool, bool]
) -> Tensor:
    """Maxima and minima of floats are those of their bits as integers: of signed ones for positive numbers, and the
    opposite of unsigned ones for negative numbers. Two atomics, as on a GPU."""
    size = values.itemsize
    negative = np.signbit(values)
    signed, unsigned = (_RMW.MAX, _RMW.UMIN) if name == "max" else (_RMW.MIN, _RMW.UMAX)
    first = _perform(signed, pointer, addresses, values.view(f"i{size}"), chosen & ~negative, dtype, order, False)
    second = _perform(unsigned, pointer, addresses, values.view(f"u{size}"), chosen & negative, dtype, order, False)
    before = np.where(negative, np.reshape(second._data, -1).view(f"i{size}").reshape(negative.shape),
                      np.reshape(first._data, -1).reshape(negative.shape)).view(values.dtype)  # fmt: skip
    return Tensor(before if pointer.shape else before.reshape(-1)[0], dtype)


atomic_add = _atomic("add", _RMW.ADD, floating=_RMW.FADD)
atomic_max = _atomic("max", _RMW.MAX, _RMW.UMAX)
atomic_min = _atomic("min", _RMW.MIN, _RMW.UMIN)
atomic_and = _atomic("and", _RMW.AND)
atomic_or = _atomic("or", _RMW.OR)
atomic_xor = _atomic("xor", _RMW.XOR)
atomic_xchg = _atomic("xchg", _RMW.XCHG, floating=_RMW.XCHG)


def atomic_cas(pointer: Any, cmp: Any, val: Any, sem: Any = None, scope: Any = None) -> Tensor:
    order = _order(sem, scope)
    addresses, values, chosen, dtype = _atomic_operands(pointer, val, None, "tl.atomic_cas")
    _, compared, _, _ = _atomic_operands(pointer, cmp, None, "tl.atomic_cas")
    if info(dtype).bits not in (16, 32, 64):
        raise KernelError(f"tl.atomic_cas is not supported for {dtype}: it needs 16, 32 or 64 bits")
    compared, values = to_memory(compared, dtype), to_memory(values, dtype)

    def act() -> Any:
        return _native_memory.atomic_cas(addresses, compared, values, _SEQUENTIAL)

    before = from_memory(running.get().atomic(addresses, chosen, values.itemsize, *order, False, act), dtype)
    return Tensor(before if pointer.shape else before.reshape(-1)[0], dtype)


# -- tensor descriptors


class Descriptor:
    """A tensor descriptor (TMA), from the host or from tl.make_tensor_descriptor."""

    __slots__ = ("_base", "_places", "_sizes", "_steps", "block_shape", "dtype", "padding", "shape", "strides")

    def __init__(self, base: Tensor, shape: Sequence[Tensor], strides: Sequence[Tensor], block: Any, padding: str):
        self.dtype = base.dtype.element_ty
        self.block_shape = _shape_of((tuple(block),))
        self.shape, self.strides = tuple(shape), tuple(strides)
        self.padding = padding
        rank = len(self.shape)
        if not 1 <= rank <= 5 or len(self.strides) != rank or len(self.block_shape) != rank:
            raise KernelError(
                f"a tensor descriptor has 1 to 5 sizes and as many strides and block sizes, got {rank} sizes, "
                f"{len(self.strides)} strides and {len(self.block_shape)} block sizes"
            )
        size = info(self.dtype).memory.itemsize
        self._base = int(base._data)
        self._sizes = [int(each._data) for each in self.shape]
        self._steps = [int(each._data) * size for each in self.strides]
        if self._steps[-1] != size:
            raise KernelError(f"the last stride of a tensor descriptor must be 1, got {self._steps[-1] // size}")
        if self._base % 16 or any(step % 16 for step in self._steps[:-1]):
            raise KernelError("the address and all strides but the last of a tensor descriptor must be multiples of 16 "
                              f"bytes, got {self._base:#x} and {self._steps[:-1]}")  # fmt: skip
        if self.block_shape[-1] * size < 16:
            raise KernelError(f"the last block size of a tensor descriptor must be 16 bytes or more, "
                              f"got {self.block_shape[-1]} elements of {size}")  # fmt: skip
        if padding not in ("zero", "nan") or (padding == "nan" and info(self.dtype).kind != FLOAT):
            raise KernelError(f"padding must be 'zero', or 'nan' for floats, got {padding!r} for {self.dtype}")
        # where the elements of a block lie, from its first one on
        self._places = np.zeros(self.block_shape, dtype=np.int64)
        for axis, (count, step) in enumerate(zip(self.block_shape, self._steps, strict=True)):
            self._places = self._places + (np.arange(count) * step).reshape(_along(axis, rank))

    @property
    def block_type(self) -> Any:
        return tl.block_type(self.dtype, list(self.block_shape))

    def _block(self, offsets: Any) -> tuple[np.ndarray, np.ndarray]:
        """Addresses of the elements of the block at these offsets, and which of them are inside of the tensor."""
        rank = len(self._sizes)
        if not isinstance(offsets, (tuple, list)) or len(offsets) != rank:
            raise KernelError(f"a block of this descriptor is at {rank} offsets, got {describe(offsets)}")
        starts = []
        for offset in offsets:
            value = to_tensor(offset)
            if value.shape or info(value.dtype).kind > INTEGER or info(value.dtype).bits > 32:
                raise KernelError(
                    f"offsets of a descriptor are int32 scalars, got {describe(value)}: add .to(tl.int32)"
                )
            starts.append(int(value._data))
        if starts[-1] * self._steps[-1] % 16:
            raise KernelError(
                f"the last offset of a block must be a multiple of 16 bytes, got {starts[-1]} elements of "
                f"{self._steps[-1]}"
            )
        first = self._base + sum(start * step for start, step in zip(starts, self._steps, strict=True))
        addresses = (self._places + first).view(np.uint64)
        if all(start >= 0 and start + count <= size
               for start, count, size in zip(starts, self.block_shape, self._sizes, strict=True)):  # fmt: skip
            return addresses, _everything(self.block_shape)
        inside = np.ones(self.block_shape, dtype=bool)
        for axis, (start, count, size) in enumerate(zip(starts, self.block_shape, self._sizes, strict=True)):
            places = np.arange(start, start + count).reshape(_along(axis, rank))
            inside &= (places >= 0) & (places < size)
        return addresses, inside

    def load(self, offsets: Any) -> Tensor:
        addresses, inside = self._block(offsets)
        cta = running.get()
        end = cta.unused_from.get(self)
        used = None if end is None else max(end - int(to_tensor(offsets[-2])._data), 0)
        wanted = inside
        if used is not None and used < self.block_shape[-2]:
            wanted = inside.copy()
            wanted[..., used:, :] = False
        fill = constant(math.nan if self.padding == "nan" else 0, self.dtype)
        memory = info(self.dtype).memory
        data = cta.load(addresses, wanted, np.asarray(to_memory(fill, self.dtype)), memory, True, volatile=False)
        if wanted is not inside:
            data[inside & ~wanted] = np.full(1, 255, dtype=np.uint8).repeat(memory.itemsize).view(memory)[0]
        return Tensor(from_memory(data, self.dtype), self.dtype)

    def store(self, offsets: Any, value: Tensor) -> None:
        if type(value) is not Tensor or value.shape != self.block_shape:
            raise KernelError(f"this descriptor stores blocks of {list(self.block_shape)}, got {describe(value)}")
        addresses, inside = self._block(offsets)
        data = to_memory(convert(value._data, value.dtype, self.dtype), self.dtype)
        running.get().store(addresses, data, inside, True)

    def __getattr__(self, name: str) -> Any:
        raise tensors.NoAttribute(f"a tensor descriptor has no attribute `{name}` in the simulator")


def _along(axis: int, rank: int) -> list[int]:
    return [-1 if each == axis else 1 for each in range(rank)]


def make_tensor_descriptor(
    base: Any, shape: Any, strides: Any, block_shape: Any, padding_option: str = "zero"
) -> Descriptor:
    if type(strides[-1]) is Tensor:
        raise KernelError("the last stride of a tensor descriptor must be the constant 1")
    sizes = [to_tensor(size).to(INT32) for size in shape]
    steps = [to_tensor(stride).to(INT64) for stride in strides]
    return Descriptor(_pointer(base, "tl.make_tensor_descriptor"), sizes, steps, block_shape, padding_option)


def load_tensor_descriptor(desc: Descriptor, offsets: Any) -> Tensor:
    return desc.load(offsets)


def store_tensor_descriptor(desc: Descriptor, offsets: Any, value: Tensor) -> None:
    desc.store(offsets, value)


# -- instructions that Triton has no name for


def _clock() -> Tensor:
    return Tensor(np.int64(running.get().clock()), INT64)


def _stamp() -> Tensor:
    return Tensor(np.int64(running.get().stamp()), INT64)


def _nothing_after(action: str) -> Callable[[], Tensor]:
    def instruction() -> Tensor:
        getattr(running.get(), action)()
        return Tensor(np.int32(0), INT32)

    return instruction


def _prefetch(pointers: Tensor) -> Tensor:
    return Tensor(np.zeros(pointers.shape, dtype=np.int32) if pointers.shape else np.int32(0), INT32)


def _words_of(pieces: np.ndarray) -> np.ndarray:
    """The addresses of the 32-bit words of pieces of 16 bytes."""
    if (pieces % 16).any():
        raise SimulatorError("a multicast access is not aligned to 16 bytes")
    return (pieces.reshape(-1, 1) + np.arange(0, 16, 4)).reshape(-1)


def _store_everywhere(pieces: Tensor, *words: Tensor) -> Tensor:
    values = np.stack(_common(*(word._data for word in words)), axis=-1)
    running.get().store_everywhere(_words_of(pieces._data), values.reshape(-1))
    return Tensor(np.zeros(pieces.shape, dtype=np.int32), INT32)


def _sums(dtype: Any) -> Callable[..., tuple[Tensor, ...]]:
    """The four words of each piece of 16 bytes: sums over all members."""

    def instruction(pieces: Tensor, *unused: Tensor) -> tuple[Tensor, ...]:
        parts = running.get().load_from_all(_words_of(pieces._data), np.dtype(np.uint32))
        total: Any = None
        for part in parts:
            wide = from_memory(part.view(info(dtype).memory), dtype).astype(np.float32)
            total = wide if total is None else total + wide
        rounded = to_memory(convert(total, FLOAT32, dtype), dtype)
        words = rounded.view(np.int32).reshape(*pieces.shape, 4)
        return tuple(Tensor(np.ascontiguousarray(words[..., place]), INT32) for place in range(4))

    return instruction


_SUM = "multimem.ld_reduce.relaxed.sys.global.add{} {{$0, $1, $2, $3}}, [$4];"
INSTRUCTIONS: dict[str, Callable[..., Any]] = {
    "mov.u64 $0, %globaltimer;": _clock,
    "/* trace */ mov.u64 $0, %globaltimer;": _stamp,
    "fence.proxy.async.global; mov.u32 $0, 0;": _nothing_after("acquire_for_descriptors"),
    "bar.sync 0; mov.u32 $0, 0;": _nothing_after("barrier"),
    "cp.async.bulk.wait_group 0; fence.proxy.async.global; mov.u32 $0, 0;": _nothing_after(
        "complete_descriptor_stores"
    ),
    "fence.proxy.alias; mov.u32 $0, 0;": _nothing_after("fence_aliases"),
    "prefetch.global.L2 [$1]; mov.u32 $0, 0;": _prefetch,
    "multimem.st.relaxed.sys.global.v4.f32 [$1], {$2, $3, $4, $5}; mov.u32 $0, 0;": _store_everywhere,
    _SUM.format(".acc::f32.v4.bf16x2"): _sums(BFLOAT16),
    _SUM.format(".acc::f32.v4.f16x2"): _sums(FLOAT16),
    _SUM.format(".v4.f32"): _sums(FLOAT32),
}


def inline_asm_elementwise(asm: str, constraints: str, args: Any, dtype: Any, is_pure: bool, pack: int) -> Any:
    instruction = INSTRUCTIONS.get(" ".join(asm.split()))
    if instruction is None:
        raise KernelError(
            f"the simulator does not know the instruction {asm!r}: it knows those of mkernel.lang.device, .trace and "
            ".multicast"
        )
    return instruction(*(to_tensor(arg) for arg in args))


# -- hints and checks


def debug_barrier() -> None:
    running.get().barrier()


def waited_for(signals: Any, mask: Any, expected: Any) -> None:
    """See lang/hints.py."""
    addresses, chosen, wanted = (np.atleast_1d(to_tensor(each)._data) for each in (signals, mask, expected))
    running.get().waited_for(addresses, chosen, wanted)


def used_below(descriptor: Descriptor, row: Any) -> None:
    """See lang/hints.py."""
    running.get().unused_from[descriptor] = int(to_tensor(row)._data)


HINTS = {"waited_for": waited_for, "used_below": used_below}


def hint(input: Any, values: Any) -> Any:
    """tl.multiple_of and the like: promises to the compiler."""
    return input


def assume(cond: Any) -> None:
    if not to_tensor(cond)._data.all():
        raise KernelError("what tl.assume promises does not hold")


def static_assert(cond: Any, msg: str = "") -> None:
    if type(cond) is Tensor:
        raise KernelError(f"tl.static_assert needs a constant, got {describe(cond)}")
    if not cond:
        raise KernelError(f"static assertion failed{f': {msg}' if msg else ''}")


def device_assert(cond: Any, msg: Any = "", mask: Any = None) -> None:
    holds = to_tensor(cond)._data if mask is None else to_tensor(cond)._data | ~_mask(mask)
    if not np.all(holds):
        raise KernelError(f"assertion failed{f': {msg}' if msg else ''}")


def device_print(prefix: str, *args: Any, hex: bool = False) -> None:
    cta = running.get()
    for arg in args or ("",):
        data = to_tensor(arg)._data if args else ""
        print(f"CTA {cta.program_id}: {prefix} {np.vectorize('{:#x}'.format)(data) if hex and args else data}")


def static_print(*values: Any, sep: str = " ", end: str = "\n", **unused: Any) -> None:
    print(*(str(value) for value in values), sep=sep, end=end)


# -- Triton's own interpreter, for everything else


class BlockPointer:
    """A pointer of tl.make_block_ptr, which only Triton's interpreter knows."""

    __slots__ = ("_value",)

    def __init__(self, value: tl.tensor):
        self._value = value

    def advance(self, offsets: Any) -> BlockPointer:
        return _elsewhere(tl.advance, self, offsets)

    @property
    def dtype(self) -> Any:
        return self._value.dtype


class _Elsewhere(base.InterpreterBuilder):
    """Triton's interpreter, with the CTA's memory."""

    def create_masked_load(self, ptrs: Any, mask: Any, other: Any, *hints: Any, **named_hints: Any) -> Any:
        element = ptrs.get_element_ty()
        dtype = base._get_np_dtype(element)
        chosen = np.asarray(getattr(mask, "data", mask) if not isinstance(mask, np.ndarray) else mask).astype(bool)
        fill = np.zeros((), dtype=dtype) if other is None else np.asarray(other.data)
        data = running.get().load(ptrs.data, chosen, fill, dtype, False, volatile=False)
        return base.TensorHandle(data, element)

    def create_masked_store(self, ptrs: Any, value: Any, mask: Any, *hints: Any) -> None:
        element = base._get_np_dtype(ptrs.get_element_ty())
        chosen = np.asarray(mask if isinstance(mask, np.ndarray) else mask.data).astype(bool)
        running.get().store(ptrs.data, value.data.astype(element, copy=False), chosen)


_SEMANTIC: Any = TritonSemantic(_Elsewhere())


def _leave(value: Any) -> Any:
    """A value of ours as Triton's interpreter has it."""
    if type(value) is Tensor:
        data = bf16_bits(value._data) if value.dtype is BFLOAT16 else value._data
        dtype = value.dtype
        if type(dtype) is PointerType:
            dtype = tl.pointer_type(dtype.element_ty, dtype.address_space, dtype.const)
        handle = base.TensorHandle(np.array(data, ndmin=1), dtype)
        return tl.tensor(handle, tl.block_type(dtype, list(value.shape)) if value.shape else dtype)
    if type(value) is BlockPointer:
        return value._value
    if isinstance(value, (tuple, list)):
        return [_leave(each) for each in value]
    return value


def _come_back(value: Any) -> Any:
    if isinstance(value, tl.tensor):
        if isinstance(value.handle, base.BlockPointerHandle):
            return BlockPointer(value)
        if value.dtype.name == "void":
            return None
        dtype = same_dtype(value.dtype)
        data = np.asarray(value.handle.data)
        data = bf16_values(data) if dtype is BFLOAT16 else data.astype(info(dtype).data, copy=False)
        return Tensor(data if value.type.is_block() else data.reshape(-1)[0], dtype)
    if isinstance(value, tl.constexpr):
        return value.value
    if isinstance(value, (tuple, list, tl.tuple)):
        return tuple(_come_back(each) for each in value)
    return value


def _elsewhere(builtin: Callable, *args: Any, **kwargs: Any) -> Any:
    kwargs = {name: _leave(value) for name, value in kwargs.items()}
    try:
        return _come_back(builtin(*(_leave(arg) for arg in args), **kwargs, _semantic=_SEMANTIC))
    except (AssertionError, TypeError, ValueError, NotImplementedError) as error:
        if isinstance(error, SimulatorError):
            raise
        raise KernelError(f"tl.{builtin.__name__}: {error}") from error


# -- which function stands for which


class _Constants(type):
    def __instancecheck__(cls, value: Any) -> bool:
        return not isinstance(value, (Tensor, Descriptor, BlockPointer, tuple))

    def __call__(cls, value: Any) -> Any:
        return value


class Constexpr(metaclass=_Constants):
    """tl.constexpr in a kernel: constants are plain Python values."""


class _PointerTypes(type):
    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, tl.pointer_type)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return pointer_type(*args, **kwargs)


class Pointers(metaclass=_PointerTypes):
    """tl.pointer_type in a kernel."""


def _as_tuple(values: Any = ()) -> tuple[Any, ...]:
    return tuple(values)


_FUNCTIONS: dict[str, Any] = {
    "tensor": Tensor, "constexpr": Constexpr, "pointer_type": Pointers, "tuple": tuple,
    "tensor_descriptor": Descriptor, "range": tensors.counted, "static_range": tensors.unrolled,
    "condition": lambda condition, disable_licm=False: condition, "to_tensor": to_tensor,
    "abs": abs_, "sum": sum_, "max": max_, "min": min_, "view": reshape,
    "multiple_of": hint, "max_contiguous": hint, "max_constancy": hint,
    **{function.__name__: function for function in (
        program_id, num_programs, arange, full, zeros, zeros_like, reshape, expand_dims, broadcast_to, broadcast,
        permute, trans, join, split, item, cast, where, cdiv, add, sub, mul, fma, argmax, argmin, reduce,
        associative_scan, cumsum, cumprod, map_elementwise, dot, load, store, atomic_cas, make_tensor_descriptor,
        load_tensor_descriptor, store_tensor_descriptor, inline_asm_elementwise, debug_barrier, assume, static_assert,
        device_assert, device_print, static_print,
    )},
    "minimum": minimum, "maximum": maximum, "xor_sum": xor_sum, "reduce_or": reduce_or, "exp": exp, "exp2": exp2,
    "log": log, "log2": log2, "cos": cos, "sin": sin, "sqrt": sqrt, "sqrt_rn": sqrt_rn, "floor": floor, "ceil": ceil,
    "rsqrt": rsqrt, "atomic_add": atomic_add, "atomic_max": atomic_max, "atomic_min": atomic_min,
    "atomic_and": atomic_and, "atomic_or": atomic_or, "atomic_xor": atomic_xor, "atomic_xchg": atomic_xchg,
}  # fmt: skip
_PRIVATE = {"_promote_bfloat16_to_float32": _promoted, "_reduce_with_indices": reduce_with_indices,
            "builtin_min": builtin_min, "builtin_max": builtin_max}  # fmt: skip
_STANDS_FOR = {
    **{id(getattr(tl, name, None) or getattr(tl.core, name)): function for name, function in _FUNCTIONS.items()},
    **{id(getattr(tl.core, name)): function for name, function in _PRIVATE.items()},
}
# Python's builtins that Triton knows
BUILTINS: dict[str, Any] = {
    "range": tensors.counted, "min": builtin_min, "max": builtin_max, "print": device_print, "list": _as_tuple,
    "len": len, "float": float, "int": int, "isinstance": isinstance, "getattr": getattr, "hasattr": hasattr,
}  # fmt: skip
# what always gives a tensor
GIVES_TENSOR = {id(function) for name, function in _FUNCTIONS.items() if name in {
    "program_id", "num_programs", "arange", "full", "zeros", "reshape", "expand_dims", "broadcast_to", "cast", "where",
    "cdiv", "sum", "cumsum", "dot", "load", "minimum", "maximum", "exp", "exp2", "log2", "atomic_add", "atomic_xchg",
    "atomic_max", "atomic_cas", "join",
}}  # fmt: skip


def native(value: Any) -> Any:
    """What stands for a function or class of Triton's in an interpreted kernel; None if Triton's source does."""
    found = _STANDS_FOR.get(id(value))
    if found is None and tl.core.is_builtin(value):

        def call(*args: Any, **kwargs: Any) -> Any:
            return _elsewhere(value, *args, **kwargs)

        call.__name__ = value.__name__
        return call
    return found


tensors.methods["cast_fp8"] = partial(_elsewhere, tl.cast)
for _name in dir(tl.tensor):
    if _name in _FUNCTIONS and _name not in Tensor.__dict__:
        tensors.methods[_name] = _FUNCTIONS[_name]
