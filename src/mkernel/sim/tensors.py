"""The values of an interpreted kernel: `Tensor`, a numpy array or scalar with a Triton dtype.

A tensor is one object with two fields, and an operator is one numpy call: an interpreted kernel is mostly scalar
arithmetic, so what it costs is Python's overhead around numpy. Operands of the same plain type, and Python integers
beside them, take a short path; everything else goes through `operands`, which has Triton's promotion rules.

- Scalars are numpy scalars, blocks are arrays. Nothing is ever changed in place, so arrays may be shared.
- bf16 is held as fp32 that was rounded to nearest even. Loads, stores and bitcasts convert.
- fp8 is held as bits. Casts and tl.dot know which numbers they stand for; there is no arithmetic.
- Integers wrap, `//` truncates and `%` has the sign of the dividend, as on a GPU.
- numpy must not warn of overflow or NaN while a kernel runs: interpreter.py sets its error state.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl

from mkernel.runtime.errors import SimulatorError
from mkernel.sim.dtypes import (
    _ALL_BITS,
    _WHOLE,
    BFLOAT16,
    BOOLEAN,
    FLOAT,
    FLOAT16,
    FLOAT32,
    FLOAT64,
    FP8,
    INT1,
    INT32,
    INT64,
    INTEGER,
    POINTER,
    RAW,
    TRITON_3_9,
    UINT32,
    UINT64,
    KernelError,
    NoAttribute,
    PointerType,
    constant,
    describe,
    fp8_bits,
    fp8_values,
    from_memory,
    info,
    rounded_to_bf16,
    same_dtype,
    to_memory,
)


def dtype_of_number(value: Any) -> Any:
    """The dtype that Triton gives to a Python number."""
    if type(value) is int and -(2**31) <= value < 2**31:
        return INT32
    if isinstance(value, bool):
        return INT1
    if isinstance(value, int):
        for dtype, low, high in (
            (INT32, -(2**31), 2**31), (UINT32, 0, 2**32), (INT64, -(2**63), 2**63), (UINT64, 0, 2**64)
        ):  # fmt: skip
            if low <= value < high:
                return dtype
        raise KernelError(f"the integer {value} does not fit in 64 bits")
    size = abs(value)
    plain = size == 0 or size == float("inf") or value != value or 2**-126 <= size <= (2 - 2**-23) * 2**127
    return FLOAT32 if plain else FLOAT64


def to_tensor(value: Any) -> Tensor:
    if type(value) is Tensor:
        return value
    if type(value) is int and value in _small:
        return _small[value]
    if isinstance(value, (bool, int, float)):
        dtype = dtype_of_number(value)
        return Tensor(constant(value, dtype), dtype)
    raise KernelError(f"expected a tensor or a number, got {describe(value)}")


def convert(data: Any, source: Any, target: Any) -> Any:
    """The data of a tensor, cast to another dtype."""
    if source is target:
        return data
    if source.name in FP8:
        data, source = fp8_values(data, source), FLOAT32
    old, new = info(source), info(target)
    if target.name in FP8 and old.kind in (INTEGER, FLOAT):
        return fp8_bits(data, target)
    if new.kind == BOOLEAN:
        return data != 0
    if old.kind == RAW or new.kind == RAW or (old.kind == POINTER and new.kind == FLOAT):
        raise KernelError(f"cannot cast {source} to {target}")
    if old.kind == POINTER and new.kind == INTEGER and new.bits != 64:
        raise KernelError(f"cannot cast {source} to {target}: an address has 64 bits")
    if old.kind == FLOAT and new.kind == POINTER:
        raise KernelError(f"cannot cast {source} to {target}: only integers and pointers become pointers")
    if target is BFLOAT16:
        return rounded_to_bf16(data.astype(np.float32))
    return data if old.data == new.data else data.astype(new.data)


def cast(value: Tensor, target: Any, rounding: str | None = None) -> Tensor:
    source = value.dtype
    if source is target:
        return value
    if rounding is not None:
        narrower = info(source).kind == info(target).kind == FLOAT and info(target).bits < info(source).bits
        if rounding not in ("rtne", "rtz"):
            raise KernelError(f"fp_downcast_rounding must be 'rtne' or 'rtz', got {rounding!r}")
        if not narrower:
            raise KernelError(f"fp_downcast_rounding is for narrowing casts of floats, not for {source} to {target}")
        if rounding == "rtz":
            return Tensor(_towards_zero(value._data, source, target), target)
    return Tensor(convert(value._data, source, target), target)


def _towards_zero(data: Any, source: Any, target: Any) -> Any:
    if target is BFLOAT16:
        return (data.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    nearest = convert(data, source, target)
    beyond = abs(nearest.astype(np.float64)) > abs(data)
    return np.where(beyond, np.nextafter(nearest, nearest.dtype.type(0)), nearest)[()]


def bitcast(value: Tensor, target: Any) -> Tensor:
    source = value.dtype
    if source is target:
        return value
    old, new = info(source), info(target)
    if POINTER in (old.kind, new.kind):
        return cast(value, target)
    if old.bits != new.bits:
        raise KernelError(f"cannot bitcast {source}, of {old.bits} bits, to {target}, of {new.bits} bits")
    if old.kind == BOOLEAN:
        return Tensor(value._data, target)
    bits = np.ascontiguousarray(to_memory(value._data, source))
    data = from_memory(bits.view(new.memory), target)
    return Tensor(data if value.shape else data.reshape(-1)[0], target)


# -- operands


def _promoted(a: Any, b: Any) -> Any:
    """Triton's `integer_promote_impl`."""
    first, second = info(a), info(b)
    if first.signed == second.signed:
        return a if first.bits > second.bits else b
    unsigned, signed = (b, a) if first.signed else (a, b)
    return unsigned if info(unsigned).bits >= info(signed).bits else signed


def _computation_type(a: Any, a_is_number: bool, b: Any, b_is_number: bool, division: bool) -> Any:
    """Triton's `computation_type_impl`."""
    first, second = info(a), info(b)
    if a_is_number != b_is_number:
        number, tensor = (a, b) if a_is_number else (b, a)
        if info(number).kind <= info(tensor).kind:
            return FLOAT32 if division and tensor in (FLOAT16, BFLOAT16) else tensor
    for wide in (FLOAT64, FLOAT32):
        if a is wide or b is wide:
            return wide
    if a is FLOAT16 or b is FLOAT16:
        return FLOAT32 if division else FLOAT16
    if a is BFLOAT16 and b is BFLOAT16:
        return FLOAT32 if division else BFLOAT16
    if a is BFLOAT16 or b is BFLOAT16:
        return FLOAT32
    if first.kind == RAW or second.kind == RAW:
        raise KernelError(f"there is no arithmetic of {a} and {b}: cast them first")
    if division and first.signed != second.signed:
        raise KernelError(
            f"/, // and % of {a} and {b} are refused because one is signed and the other is not: cast one of them"
        )
    return _promoted(a, b)


def operands(left: Any, right: Any, division: bool = False, pointers: bool = False) -> tuple[Any, Any, Any]:
    """The data of two operands in the type in which Triton computes with them, and that type."""
    if type(left) is Tensor and type(right) is Tensor and left.dtype is right.dtype and not division:
        dtype = left.dtype
        if dtype is INT32 or dtype is INT64 or dtype is FLOAT32 or dtype is INT1:
            return left._data, right._data, dtype
    if type(left) is Tensor and type(right) is int and left.dtype is INT32 and -(2**31) <= right < 2**31:
        return left._data, np.int32(right), INT32
    if type(left) is Tensor and type(right) is float and left.dtype is FLOAT32:
        return left._data, np.float32(right), FLOAT32
    left_is_number, right_is_number = type(left) is not Tensor, type(right) is not Tensor
    a = dtype_of_number(_number(left)) if left_is_number else left.dtype
    b = dtype_of_number(_number(right)) if right_is_number else right.dtype
    if type(a) is PointerType or type(b) is PointerType:
        if pointers and a is b:
            return left._data, right._data, a
        raise KernelError(f"invalid operands of types {a} and {b}")
    dtype = _computation_type(a, left_is_number, b, right_is_number, division)
    return _operand(left, a, dtype, left_is_number), _operand(right, b, dtype, right_is_number), dtype


def _number(value: Any) -> Any:
    if isinstance(value, (bool, int, float)):
        return value
    raise KernelError(f"expected a tensor or a number as operand, got {describe(value)}")


def _operand(value: Any, source: Any, dtype: Any, is_number: bool) -> Any:
    if not is_number:
        return convert(value._data, source, dtype)
    try:
        return constant(value, dtype)
    except OverflowError:
        fix = " (cast the tensor to a signed type)" if value < 0 and not info(dtype).signed else ""
        raise KernelError(f"the number {value} is out of range for {dtype}{fix}") from None


def _shapes(left: Any, right: Any) -> KernelError:
    a, b = (list(value.shape) if type(value) is Tensor else [] for value in (left, right))
    return KernelError(f"the shapes {a} and {b} do not broadcast: sizes must be equal, or one of them 1")


def _refuse_floats(left: Any, right: Any, dtype: Any, sign: str) -> None:
    if info(dtype).kind == FLOAT:
        raise KernelError(f"{sign} is for integers, got {describe(left)} and {describe(right)}")


def _add(left: Any, right: Any) -> Tensor:
    a, b, dtype = operands(left, right)
    if dtype is INT1:  # arithmetic modulo 2
        return Tensor(a ^ b, dtype)
    return Tensor(rounded_to_bf16(a + b) if dtype is BFLOAT16 else a + b, dtype)


def _subtract(left: Any, right: Any) -> Tensor:
    a, b, dtype = operands(left, right)
    if dtype is INT1:
        return Tensor(a ^ b, dtype)
    return Tensor(rounded_to_bf16(a - b) if dtype is BFLOAT16 else a - b, dtype)


def _multiply(left: Any, right: Any) -> Tensor:
    a, b, dtype = operands(left, right)
    return Tensor(rounded_to_bf16(a * b) if dtype is BFLOAT16 else a * b, dtype)


def _divide(left: Any, right: Any) -> Tensor:
    a, b, dtype = operands(left, right, division=True)
    if info(dtype).kind != FLOAT:
        a, b, dtype = convert(a, dtype, FLOAT32), convert(b, dtype, FLOAT32), FLOAT32
    return Tensor(np.divide(a, b), dtype)


def _whole_numbers(left: Tensor, right: Any) -> tuple[int, int] | None:
    """Two scalars of int32 or int64 as Python's integers, the second one positive: what kernels mostly divide."""
    dtype, dividend = left.dtype, left._data
    if (dtype is INT32 or dtype is INT64) and not isinstance(dividend, np.ndarray):
        if type(right) is Tensor:
            if right.dtype is not dtype or isinstance(right._data, np.ndarray):
                return None
            divisor = int(right._data)
        elif type(right) is int:
            divisor = right
        else:
            return None
        if 0 < divisor < 2**31:
            return int(dividend), divisor
    return None


def _divide_integers(left: Any, right: Any) -> Tensor:
    a, b, dtype = operands(left, right, division=True)
    _refuse_floats(left, right, dtype, "//")
    if dtype is INT1:
        return Tensor(a & b, dtype)
    if not isinstance(a, np.ndarray) and not isinstance(b, np.ndarray):
        x, y = int(a), int(b)
        quotient = 0 if y == 0 else abs(x) // abs(y)
        return Tensor(np.int64(quotient if (x < 0) == (y < 0) else -quotient).astype(a.dtype)
                      if dtype is not UINT64 else np.uint64(quotient), dtype)  # fmt: skip
    return Tensor((a - np.fmod(a, b)) // b if info(dtype).signed else a // b, dtype)


def _remainder(left: Any, right: Any) -> Tensor:
    a, b, dtype = operands(left, right, division=True)
    if dtype is INT1:
        return Tensor(a & ~b, dtype)
    return Tensor(np.fmod(a, b), dtype)


def _bitwise(sign: str, operate: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Tensor]:
    def general(left: Any, right: Any) -> Tensor:
        a, b, dtype = operands(left, right)
        _refuse_floats(left, right, dtype, sign)
        return Tensor(operate(a, b), dtype)

    return general


def _shift_left(left: Any, right: Any) -> Tensor:
    a, b, dtype = operands(left, right)
    _refuse_floats(left, right, dtype, "<<")
    return Tensor((a << b).astype(info(dtype).data), dtype)


def _shift_right(left: Any, right: Any, arithmetic: bool) -> Tensor:
    a, b, dtype = operands(left, right)
    _refuse_floats(left, right, dtype, ">>")
    data = info(dtype).data
    if arithmetic and not info(dtype).signed and dtype is not INT1:
        a, b = a.astype(f"i{data.itemsize}"), b.astype(f"i{data.itemsize}")
    return Tensor((a >> b).astype(data), dtype)


def _compare(operate: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Tensor]:
    """Before Triton 3.9, a number is a tensor of its own type here, unlike in arithmetic: it may widen the
    comparison."""

    def general(left: Any, right: Any) -> Tensor:
        a, b, _ = operands(left, right) if TRITON_3_9 else operands(to_tensor(left), to_tensor(right))
        return Tensor(operate(a, b), INT1)

    return general


def _in_shape(general: Callable[[Any, Any], Tensor], left: Any, right: Any) -> Tensor:
    """The long path, with an error in words for shapes that do not fit."""
    try:
        return general(left, right)
    except ValueError as error:
        if isinstance(error, SimulatorError):
            raise
        raise _shapes(left, right) from None


def _method(
    operate: Callable[[Any, Any], Any], general: Callable[[Any, Any], Tensor], result: Any = None
) -> Callable[[Tensor, Any], Any]:
    """An operator: its short path is `operate` on numpy's data; `result` is the dtype of a comparison."""

    def method(self: Tensor, other: Any) -> Tensor:
        dtype, kind = self.dtype, type(other)
        try:
            if kind is Tensor:
                theirs = other.dtype
                if dtype is theirs:
                    if dtype is INT32 or dtype is INT64 or dtype is FLOAT32:
                        return Tensor(operate(self._data, other._data), result or dtype)
                elif (dtype is INT32 or dtype is INT64) and (theirs is INT32 or theirs is INT64):
                    return Tensor(operate(self._data, other._data), result or INT64)
            elif kind is int and (dtype is INT32 or dtype is INT64) and -(2**31) <= other < 2**31:
                return Tensor(operate(self._data, other), result or dtype)
        except (ValueError, OverflowError):
            pass  # what is wrong is found, and said, on the long path
        return _in_shape(general, self, other)

    return method


def _reflected(general: Callable[[Any, Any], Tensor]) -> Callable[[Tensor, Any], Any]:
    return lambda self, other: _in_shape(general, other, self)


def offset_by(pointer: Tensor, other: Any) -> Tensor:
    """pointer + other"""
    size = pointer.dtype.element_bytes
    start = pointer._data
    if type(other) is Tensor:
        if info(other.dtype).kind > INTEGER:
            raise KernelError(f"only integers are added to pointers, got {describe(other)}")
        steps = other._data
        if isinstance(start, np.ndarray) or isinstance(steps, np.ndarray):
            try:
                return Tensor(start + steps.astype(np.uint64) * pointer.dtype.step, pointer.dtype)
            except ValueError:
                raise _shapes(pointer, other) from None
    elif isinstance(other, int):
        if not -(2**63) <= other < 2**64:
            raise KernelError(f"the offset {other} of a pointer does not fit in 64 bits")
        steps = other
        if isinstance(start, np.ndarray):
            return Tensor(start + np.uint64((steps * size) & _ALL_BITS), pointer.dtype)
    else:
        raise KernelError(f"only integers are added to pointers, got {describe(other)}")
    return Tensor(np.uint64((int(start) + int(steps) * size) & _ALL_BITS), pointer.dtype)


_add_plain = _method(operator.add, _add)
_subtract_plain = _method(operator.sub, _subtract)


ANY_LAYOUT = object()  # of the registers that hold a tensor of a Gluon kernel: it does not matter here


class Tensor:
    """What kernels see as `tl.tensor`."""

    __slots__ = ("_data", "dtype")

    def __init__(self, data: Any, dtype: Any):
        self._data = data
        self.dtype = dtype

    # what is known when a kernel is compiled

    @property
    def shape(self) -> tuple[int, ...]:
        return self._data.shape

    @property
    def numel(self) -> int:
        return self._data.size

    @property
    def type(self) -> Any:
        if not self.shape:
            return self.dtype
        block = tl.block_type(self.dtype, list(self.shape))
        block.layout = ANY_LAYOUT
        return block

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"

    __repr__ = __str__

    # what no kernel may ask for

    def __bool__(self) -> bool:
        if self._data.size != 1:
            raise KernelError(
                f"a condition must be a scalar, got {describe(self)}: reduce it (tl.max, tl.min), or use tl.where"
            )
        return bool(self._data if self._data.ndim == 0 else self._data.reshape(-1)[0])

    def _no_host_value(self, *_: Any) -> Any:
        raise KernelError(f"the value of {describe(self)} is not known when the kernel is compiled: use .to(dtype), or "
                          "pass it as tl.constexpr")  # fmt: skip

    __int__ = __float__ = __index__ = __complex__ = __iter__ = _no_host_value
    __len__ = __array__ = __contains__ = _no_host_value
    __hash__ = None  # type: ignore[assignment]

    # operators

    def __add__(self, other: Any) -> Tensor:
        if type(self.dtype) is PointerType:
            return offset_by(self, other)
        if type(other) is Tensor and type(other.dtype) is PointerType:
            return offset_by(other, self)
        return _add_plain(self, other)

    def __radd__(self, other: Any) -> Tensor:
        return self + other if type(self.dtype) is PointerType else _in_shape(_add, other, self)

    def __sub__(self, other: Any) -> Tensor:
        if type(self.dtype) is PointerType:
            return offset_by(self, -other)
        return _subtract_plain(self, other)

    __rsub__ = _reflected(_subtract)
    __mul__ = _method(operator.mul, _multiply)
    __rmul__ = _reflected(_multiply)

    def __truediv__(self, other: Any) -> Tensor:
        return _in_shape(_divide, self, other)

    __rtruediv__ = _reflected(_divide)

    def __floordiv__(self, other: Any) -> Tensor:
        numbers = _whole_numbers(self, other)
        if numbers is not None:
            x, y = numbers
            return Tensor(type(self._data)(x // y if x >= 0 else -(-x // y)), self.dtype)
        return _in_shape(_divide_integers, self, other)

    __rfloordiv__ = _reflected(_divide_integers)

    def __mod__(self, other: Any) -> Tensor:
        numbers = _whole_numbers(self, other)
        if numbers is not None:
            x, y = numbers
            return Tensor(type(self._data)(x % y if x >= 0 else -(-x % y)), self.dtype)
        return _in_shape(_remainder, self, other)

    __rmod__ = _reflected(_remainder)

    def __lshift__(self, other: Any) -> Tensor:
        return _in_shape(_shift_left, self, other)

    __rlshift__ = _reflected(_shift_left)

    def __rshift__(self, other: Any) -> Tensor:
        return _in_shape(lambda a, b: _shift_right(a, b, info(self.dtype).signed), self, other)

    def __rrshift__(self, other: Any) -> Tensor:
        return _in_shape(lambda a, b: _shift_right(a, b, info(self.dtype).signed), other, self)

    def __neg__(self) -> Tensor:
        if type(self.dtype) is PointerType:
            raise KernelError(f"a pointer cannot be negated: {describe(self)}")
        return _subtract(Tensor(constant(0, self.dtype), self.dtype), self)

    def __pos__(self) -> Tensor:
        return self

    def __invert__(self) -> Tensor:
        if info(self.dtype).kind > INTEGER:
            raise KernelError(f"~ is for integers, got {describe(self)}")
        return Tensor(~self._data, self.dtype)

    def __and__(self, other: Any) -> Tensor:
        if type(other) is Tensor and other.dtype is INT1 and self.dtype is INT1:
            try:
                return Tensor(self._data & other._data, INT1)
            except ValueError:
                raise _shapes(self, other) from None
        return _in_shape(_and, self, other)

    __rand__ = _reflected(_bitwise("&", operator.and_))

    def __or__(self, other: Any) -> Tensor:
        return _in_shape(_or, self, other)

    __ror__ = _reflected(_bitwise("|", operator.or_))

    def __xor__(self, other: Any) -> Tensor:
        return _in_shape(_xor, self, other)

    __rxor__ = _reflected(_bitwise("^", operator.xor))

    __lt__ = _method(operator.lt, _compare(operator.lt), INT1)
    __le__ = _method(operator.le, _compare(operator.le), INT1)
    __gt__ = _method(operator.gt, _compare(operator.gt), INT1)
    __ge__ = _method(operator.ge, _compare(operator.ge), INT1)
    __eq__ = _method(operator.eq, _compare(operator.eq), INT1)
    __ne__ = _method(operator.ne, _compare(operator.ne), INT1)

    def logical_and(self, other: Any) -> Tensor:
        return bitcast(self, INT1) & bitcast(to_tensor(other), INT1)

    def logical_or(self, other: Any) -> Tensor:
        return bitcast(self, INT1) | bitcast(to_tensor(other), INT1)

    # shapes and types; the other methods are functions of language.py

    def __getitem__(self, index: Any) -> Tensor:
        places = index if isinstance(index, tuple) else (index,)
        for part in places:
            if part is not None and not (isinstance(part, slice) and part == _WHOLE):
                raise KernelError(f"a tensor is indexed with `:` and None only, got {describe(part)}")
        if len(places) - places.count(None) > self._data.ndim:
            raise KernelError(f"too many indices for {describe(self)}: {len(places)}")
        return Tensor(self._data[index], self.dtype)

    def to(self, dtype: Any, fp_downcast_rounding: str | None = None, bitcast: bool = False) -> Tensor:
        if dtype is self.dtype:
            return self
        if fp_downcast_rounding is None and not bitcast:  # what kernels mostly do
            if dtype is INT64 and self.dtype is INT32:
                return Tensor(self._data.astype(np.int64), INT64)
            if type(dtype) is PointerType and self.dtype is INT64:
                return Tensor(self._data.astype(np.uint64), dtype)
        if not isinstance(dtype, tl.dtype):
            raise KernelError(f"a tensor is cast to a dtype, got {describe(dtype)}")
        target = same_dtype(dtype)
        if bitcast:
            return _bitcast(self, target)
        raw = [each for each in (self.dtype, target) if info(each).kind == RAW]
        if raw and (fp_downcast_rounding is not None or any(each.name not in FP8 for each in raw)):
            return methods["cast_fp8"](self, target, fp_downcast_rounding)
        return cast(self, target, fp_downcast_rounding)

    @property
    def T(self) -> Tensor:
        if len(self.shape) != 2:
            raise KernelError(f".T is for two dimensions, got {describe(self)}: use tl.permute")
        return Tensor(self._data.T, self.dtype)

    def __getattr__(self, name: str) -> Any:
        function = methods.get(name)
        if function is None:
            raise NoAttribute(
                f"a tensor in a kernel has no attribute `{name}`: its values and its memory belong to the GPU, and "
                "kernels use the functions of triton.language"
            )
        return lambda *args, **kwargs: function(self, *args, **kwargs)


_small = {number: Tensor(np.int32(number), INT32) for number in range(-16, 257)}
_and, _or, _xor = _bitwise("&", operator.and_), _bitwise("|", operator.or_), _bitwise("^", operator.xor)
_bitcast = bitcast
methods: dict[str, Callable[..., Any]] = {}  # functions of language.py that are methods, too
