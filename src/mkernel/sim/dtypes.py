"""Triton's dtypes for numpy: what a dtype is in a tensor and in memory, bf16 as fp32, fp8 as bits; errors."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from mkernel.runtime.errors import SimulatorError

# Is this Triton 3.9 or newer? There, comparisons, tl.minimum and tl.maximum give a number the type of the tensor beside
# it, as arithmetic always has, and no function widens bf16 to fp32 beforehand.
TRITON_3_9 = tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 9)

# in the order of promotion; RAW is fp8: bits, which are moved, cast and multiplied by tl.dot, and nothing else
BOOLEAN, INTEGER, FLOAT, POINTER, RAW = range(5)


class KernelError(SimulatorError):
    """A kernel did something that Triton's compiler would refuse. Where it did is added when it leaves the kernel."""


class NoAttribute(KernelError, AttributeError):
    """For `hasattr` and `getattr` with a default."""


class Info:
    """What a dtype is to numpy."""

    __slots__ = ("bits", "data", "kind", "memory", "signed")

    def __init__(self, kind: int, bits: int, data: Any, memory: Any = None, signed: bool = False):
        self.kind = kind
        self.bits = bits
        self.data = np.dtype(data)  # of a tensor's data
        self.memory = np.dtype(memory or data)  # of an element in memory
        self.signed = signed


_INFOS = {
    "int1": Info(BOOLEAN, 1, np.bool_, np.int8),
    "int8": Info(INTEGER, 8, np.int8, signed=True),
    "int16": Info(INTEGER, 16, np.int16, signed=True),
    "int32": Info(INTEGER, 32, np.int32, signed=True),
    "int64": Info(INTEGER, 64, np.int64, signed=True),
    "uint8": Info(INTEGER, 8, np.uint8),
    "uint16": Info(INTEGER, 16, np.uint16),
    "uint32": Info(INTEGER, 32, np.uint32),
    "uint64": Info(INTEGER, 64, np.uint64),
    "fp16": Info(FLOAT, 16, np.float16),
    "bf16": Info(FLOAT, 16, np.float32, np.uint16),
    "fp32": Info(FLOAT, 32, np.float32),
    "fp64": Info(FLOAT, 64, np.float64),
    **{name: Info(RAW, 8, np.uint8) for name in ("fp8e5", "fp8e5b16", "fp8e4nv", "fp8e4b8", "fp8e4b15")},
}
_ADDRESS = Info(POINTER, 64, np.uint64)

INT1, INT32, INT64, UINT32, UINT64 = tl.int1, tl.int32, tl.int64, tl.uint32, tl.uint64
FLOAT16, BFLOAT16, FLOAT32, FLOAT64 = tl.float16, tl.bfloat16, tl.float32, tl.float64
_SAME = {dtype.name: dtype for dtype in vars(tl).values() if isinstance(dtype, tl.dtype) and dtype.name in _INFOS}
_ALL_BITS = (1 << 64) - 1
_WHOLE = slice(None)


class PointerType(tl.pointer_type):
    """A pointer type that knows the size of an element. There is one object for each type."""

    def __init__(self, element: tl.dtype, address_space: int, const: bool):
        super().__init__(element, address_space, const)
        self.element_bytes = _ADDRESS.memory.itemsize if element.is_ptr() else max(1, element.primitive_bitwidth // 8)
        self.step = np.uint64(self.element_bytes)


_pointers: dict[tuple[str, int, bool], PointerType] = {}


def pointer_type(element: tl.dtype, address_space: int = 1, const: bool = False) -> PointerType:
    if not isinstance(element, tl.dtype):
        raise KernelError(f"tl.pointer_type needs a dtype, got {describe(element)}")
    key = (str(element) if element.is_ptr() else element.name, address_space, const)
    found = _pointers.get(key)
    if found is None:
        found = _pointers[key] = PointerType(same_dtype(element), address_space, const)
    return found


def same_dtype(dtype: Any) -> Any:
    """The one object that stands for this dtype here."""
    if type(dtype) is PointerType:
        return dtype
    if isinstance(dtype, tl.pointer_type):
        return pointer_type(dtype.element_ty, dtype.address_space, dtype.const)
    return _SAME.get(dtype.name, dtype)


def info(dtype: Any) -> Info:
    return _ADDRESS if type(dtype) is PointerType else _INFOS[dtype.name]


def describe(value: Any) -> str:
    """A value as an error message shows it: the type of a tensor, and a constant itself."""
    return f"a tensor of {value}" if hasattr(value, "_data") else repr(value)


# -- bf16


def rounded_to_bf16(values: Any) -> Any:
    """fp32 numbers rounded to the nearest bf16, ties to even; still fp32."""
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
    nan = np.isnan(values)
    if nan.any():
        rounded = np.where(nan, np.uint32(0x7FC00000), rounded)[()]
    return rounded.view(np.float32)


def bf16_bits(values: Any) -> Any:
    return (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)


def bf16_values(bits: Any) -> Any:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


# -- fp8

FP8 = {"fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}  # those of NVIDIA's GPUs, as PyTorch has them


@functools.cache
def _all_of_fp8(name: str) -> np.ndarray:
    """The number that each of the 256 bit patterns stands for, in fp32."""
    return torch.arange(256, dtype=torch.uint8, device="cpu").view(FP8[name]).float().numpy()


def fp8_values(bits: Any, dtype: Any) -> Any:
    """What bits of an fp8 dtype stand for, in fp32."""
    return _all_of_fp8(dtype.name)[bits]


def fp8_bits(values: Any, dtype: Any) -> Any:
    """Numbers rounded to the nearest of an fp8 dtype. Like a GPU's, the conversion saturates: what is too large, and
    infinity, becomes the largest finite number."""
    kind = FP8[dtype.name]
    plain = torch.from_numpy(np.array(values, dtype=np.float32, ndmin=1))
    most = torch.finfo(kind).max
    bits = plain.clamp(-most, most).to(kind).view(torch.uint8).numpy()
    return bits.reshape(np.shape(values))[()]


def factors_of_fp8(input: Any, other: Any, max_num_imprecise_acc: Any) -> tuple[Any, Any]:
    """The numbers of two blocks of fp8, of either kind, for tl.dot."""
    depth = input.shape[-1] if input.shape else 0
    if 0 < depth < 32:
        raise KernelError(f"tl.dot of fp8 needs blocks of 32 columns or more, got {input} and {other}")
    if max_num_imprecise_acc is not None and max_num_imprecise_acc > depth:
        raise KernelError(f"max_num_imprecise_acc ({max_num_imprecise_acc}) must be at most the depth, {depth}")
    return fp8_values(input._data, input.dtype), fp8_values(other._data, other.dtype)


def from_memory(data: Any, dtype: Any) -> Any:
    """What was loaded, as a tensor of this dtype holds it."""
    if dtype is BFLOAT16:
        return bf16_values(data)
    if dtype is INT1:
        return data != 0
    return data


def to_memory(data: Any, dtype: Any) -> Any:
    if dtype is BFLOAT16:
        return bf16_bits(data)
    if dtype is INT1:
        return data.astype(np.int8)
    return data


# -- conversions


def constant(value: Any, dtype: Any) -> Any:
    """A Python number as the data of a scalar."""
    if dtype.name in FP8:
        return fp8_bits(float(value), dtype)
    data = info(dtype).data.type(value)
    return rounded_to_bf16(data) if dtype is BFLOAT16 else data
