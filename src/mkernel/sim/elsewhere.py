"""Builtins that have no function here: they go to Triton's own interpreter, with tensors converted there and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
import triton.runtime.interpreter as base
from triton.language.semantic import TritonSemantic

from mkernel.runtime.errors import SimulatorError
from mkernel.sim.cta import running
from mkernel.sim.dtypes import BFLOAT16, KernelError, PointerType, bf16_bits, bf16_values, info, same_dtype
from mkernel.sim.tensors import Tensor

# -- Triton's own interpreter, for everything else

_BLOCK_POINTERS = getattr(base, "BlockPointerHandle", ())  # Triton 3.8 has no such class


class BlockPointer:
    """A pointer of tl.make_block_ptr, which only Triton's interpreter knows."""

    __slots__ = ("_value",)

    def __init__(self, value: tl.tensor):
        self._value = value

    def advance(self, offsets: Any) -> BlockPointer:
        return elsewhere(tl.advance, self, offsets)

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
        if isinstance(value.handle, _BLOCK_POINTERS):
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


def elsewhere(builtin: Callable, *args: Any, **kwargs: Any) -> Any:
    if builtin is tl.make_block_ptr and not _BLOCK_POINTERS:
        raise KernelError(
            "tl.make_block_ptr: the simulator has block pointers with Triton 3.6 and 3.7 only, and Triton 3.9 "
            "has none: use tl.make_tensor_descriptor"
        )
    kwargs = {name: _leave(value) for name, value in kwargs.items()}
    try:
        return _come_back(builtin(*(_leave(arg) for arg in args), **kwargs, _semantic=_SEMANTIC))
    except (AssertionError, TypeError, ValueError, NotImplementedError) as error:
        if isinstance(error, SimulatorError):
            raise
        raise KernelError(f"tl.{builtin.__name__}: {error}") from error
