"""Loads, stores, atomics and tensor descriptors of interpreted kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import triton.language as tl
from triton._C.libtriton import interpreter as _native_memory

from mkernel.sim import dtypes
from mkernel.sim.blocks import along, in_common_shape, shape_of, spread
from mkernel.sim.cta import running
from mkernel.sim.dtypes import (
    BFLOAT16,
    FLOAT,
    INT1,
    INT32,
    INT64,
    INTEGER,
    KernelError,
    PointerType,
    constant,
    describe,
    from_memory,
    info,
    to_memory,
)
from mkernel.sim.elsewhere import BlockPointer, elsewhere
from mkernel.sim.tensors import Tensor, convert, to_tensor

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


def mask_of(mask: Any) -> np.ndarray:
    value = to_tensor(mask)
    if value.dtype is not INT1:
        raise KernelError(f"a mask must be a condition (tl.int1), got {describe(value)}")
    return value._data


def load(
    pointer: Any, mask: Any = None, other: Any = None, boundary_check: Any = (), padding_option: str = "",
    cache_modifier: str = "", eviction_policy: str = "", volatile: bool = False,
) -> Tensor:  # fmt: skip
    if type(pointer) is BlockPointer:
        return elsewhere(tl.load, pointer, mask, other, boundary_check, padding_option)
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
    chosen = None if mask is None else mask_of(mask)
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
            addresses, chosen = in_common_shape(addresses, chosen)
        if fill.shape and fill.shape != addresses.shape:
            addresses, chosen, fill = in_common_shape(addresses, chosen, fill)
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
        elsewhere(tl.store, pointer, to_tensor(value), mask, boundary_check)
        return
    _pointer(pointer, "tl.store")
    _writable(pointer, "tl.store")
    if boundary_check:
        raise KernelError("boundary_check is for block pointers (tl.make_block_ptr)")
    dtype = pointer.dtype.element_ty
    tensor = to_tensor(value)
    values = to_memory(convert(tensor._data, tensor.dtype, dtype), dtype)
    addresses = pointer._data
    chosen = None if mask is None else mask_of(mask)
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
    chosen = _ONE[0] if mask is None else mask_of(mask)
    if not addresses.shape:
        if values.shape or chosen.shape:
            raise KernelError(f"{what} through a scalar pointer needs a scalar, got {describe(tensor)}")
        return addresses.reshape(1), values.reshape(1), chosen.reshape(1), dtype
    shape = addresses.shape
    parts = (np.ascontiguousarray(spread(part, shape)) for part in (addresses, values, chosen))
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
        self.block_shape = shape_of((tuple(block),))
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
            self._places = self._places + (np.arange(count) * step).reshape(along(axis, rank))

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
            places = np.arange(start, start + count).reshape(along(axis, rank))
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
        raise dtypes.NoAttribute(f"a tensor descriptor has no attribute `{name}` in the simulator")


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
