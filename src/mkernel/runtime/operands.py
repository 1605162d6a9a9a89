"""Operands of kernels: which tensors are refused, which TMA can access, and which share memory."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch.autograd import forward_ad
from triton.tools.tensor_descriptor import TensorDescriptor

from mkernel.runtime.errors import ArgumentError
from mkernel.runtime.gpus import Target, capability

DTYPES: dict[torch.dtype, Any] = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
BYTES = 16  # alignment of a descriptor's base and strides


def check_device(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    """Refuse a tensor that is not on the device of this rank."""
    if tensor.device != device:
        raise ArgumentError(
            f"{name} is on {tensor.device}, but this rank's device is {device}: pass {name}.to(group.device)"
        )


def check_plain(name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor without memory of its own, or whose memory holds other values than it shows."""
    refuse_dual(name, tensor)
    if tensor.is_nested:
        raise ArgumentError(f"{name} is a nested tensor; pass a plain one: {name}.to_padded_tensor(0)")
    if tensor.layout is not torch.strided:
        raise ArgumentError(f"{name} has the layout {tensor.layout}; pass a dense tensor: {name}.to_dense()")
    if tensor.numel() and not tensor.data_ptr():
        raise ArgumentError(
            f"{name} is a {type(tensor).__name__}, which has no memory of its own; pass a plain tensor, of a DTensor "
            f"{name}.to_local()"
        )
    if tensor.is_neg():
        raise ArgumentError(f"{name} is a lazily negated view; pass {name}.resolve_neg()")


def refuse_dual(name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor with a tangent, which forward-mode differentiation would have to propagate."""
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None:
        raise ArgumentError(
            f"{name} is a dual tensor, but there is no forward-mode differentiation here: differentiate with "
            f"backward(), or pass torch.autograd.forward_ad.unpack_dual({name}).primal"
        )


def has_descriptors(device: Target) -> bool:
    """Can kernels on this device use tensor descriptors? The simulator can."""
    return device.type != "cuda" or capability(device)[0] >= 9


def describable(tensor: torch.Tensor) -> bool:
    """Can TMA access a tensor, through a descriptor? Its last dimension must be contiguous, its base and its other
    strides aligned, and its rows must not overlap."""
    *outer, columns = tensor.shape
    size = tensor.element_size()
    return (
        tensor.numel() > 0
        and tensor.stride(-1) == 1
        and tensor.data_ptr() % BYTES == 0
        and all(n == 1 or (s >= columns and s * size % BYTES == 0) for n, s in zip(outer, tensor.stride()))
    )


def aligned_strides(shape: list[int], strides: list[int], element_size: int) -> list[int]:
    """Strides for a descriptor, in elements, the last of which is 1. TMA wants even the strides of dimensions of size 1
    aligned, although nothing depends on them."""
    unit = BYTES // element_size
    fixed = [max(-(-stride // unit) * unit, unit) if size == 1 else stride for size, stride in zip(shape, strides)]
    return [*fixed[:-1], 1]


def descriptor(base: torch.Tensor, shape: list[int], strides: list[int], block: list[int]) -> TensorDescriptor:
    """A descriptor of the memory that starts at `base`."""
    return TensorDescriptor(base, shape, aligned_strides(shape, strides, base.element_size()), block)


def constants(*values: Any) -> tuple[Any, ...]:
    """Compile-time constants, as fields of a structure."""
    return tuple(tl.constexpr(value) for value in values)


def named_constants(**values: Any) -> dict[str, Any]:
    """The same, by name."""
    return {name: tl.constexpr(value) for name, value in values.items()}


def matmul_precision(dtype: torch.dtype) -> str:
    """The precision of tl.dot. fp32 is multiplied as fp32 unless the user has allowed tf32 in PyTorch, by any of its
    settings: `allow_tf32` raises an error if it was allowed by `fp32_precision`."""
    return "tf32" if dtype != torch.float32 or torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


Steps = tuple[tuple[int, int], ...]  # (stride in bytes, size) of each dimension of more than one element
MAX_WORK = 10**6  # of numpy's search, tens of milliseconds; tensors that need more are taken to overlap


class _Extent:
    """Describes memory to numpy, which never accesses it."""

    def __init__(self, begin: int, steps: Steps, nbytes: int):
        self.__array_interface__ = dict(
            version=3, data=(begin, True), typestr=f"|V{nbytes}",
            shape=tuple(size for _, size in steps), strides=tuple(stride for stride, _ in steps),
        )  # fmt: skip


@functools.lru_cache(maxsize=4096)
def _share_bytes(distance: int, steps: Steps, nbytes: int, other_steps: Steps, other_nbytes: int) -> bool:
    """Do two sets of elements of `nbytes` and `other_nbytes` share a byte, if the second begins `distance` bytes after
    the first?"""
    begin = 2**32 + max(-distance, 0)
    one, other = _Extent(begin, steps, nbytes), _Extent(begin + distance, other_steps, other_nbytes)
    try:
        return np.shares_memory(np.asarray(one), np.asarray(other), max_work=MAX_WORK)
    except np.exceptions.TooHardError:
        return True


def _steps(tensor: torch.Tensor) -> Steps:
    item = tensor.element_size()
    return tuple((stride * item, size) for stride, size in zip(tensor.stride(), tensor.shape) if size > 1)


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Do two tensors share memory? Only addresses count, not dtypes or storages. Different columns of one matrix do not
    overlap."""
    if not one.numel() or not other.numel():
        return False
    begin, other_begin = one.data_ptr(), other.data_ptr()
    if begin >= other_begin + span(other) or other_begin >= begin + span(one):
        return False
    return _share_bytes(other_begin - begin, _steps(one), one.element_size(), _steps(other), other.element_size())


def span(tensor: torch.Tensor) -> int:
    """Bytes from the start of the first element to the end of the last one."""
    last = 0
    for size, stride in zip(tensor.shape, tensor.stride()):
        last += (size - 1) * stride
    return (last + 1) * tensor.element_size()


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Do two elements of a tensor share memory, as in an expanded tensor?"""
    steps = tuple(sorted(_steps(tensor)))
    reach = 0
    for stride, size in steps:
        if stride <= reach or not stride:
            break
        reach += stride * (size - 1)
    else:
        return False  # every dimension steps over the whole extent of the inner ones
    # Two different elements differ first in some dimension i: by one step or more there, and arbitrarily in later ones.
    nbytes = tensor.element_size()
    return tensor.numel() > 0 and any(
        _share_bytes(stride, steps[i + 1 :], nbytes, ((stride, size - 1), *steps[i + 1 :]), nbytes)
        for i, (stride, size) in enumerate(steps)
    )


def same_elements(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Do equal indices refer to the same memory in both tensors?"""
    return (
        one.data_ptr() == other.data_ptr()
        and one.dtype == other.dtype
        and one.shape == other.shape
        and _steps(one) == _steps(other)
    )


def layout(tensor: torch.Tensor) -> tuple:
    """Everything about a tensor that a plan depends on."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.data_ptr() % BYTES == 0
