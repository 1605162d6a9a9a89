"""How a kernel may read or write a tensor: through a tensor descriptor (TMA), or through pointers."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from mkernel.runtime.errors import ArgumentError

DTYPES: dict[torch.dtype, Any] = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
BYTES = 16  # what a descriptor's base and strides must be divisible by


def check_plain(name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor that has no memory of its own, or other values there than it shows."""
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
        raise ArgumentError(f"{name} is a view of the negative of what is in memory; pass {name}.resolve_neg()")


def has_descriptors(device: torch.device) -> bool:
    """Can kernels on this device use tensor descriptors? The simulator can."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] >= 9


def describable(tensor: torch.Tensor) -> bool:
    """Rows contiguous, base and row stride aligned: a descriptor can be made of it."""
    rows, columns = tensor.shape
    size = tensor.element_size()
    return (
        rows > 0
        and columns > 0
        and tensor.stride(1) == 1
        and tensor.data_ptr() % BYTES == 0
        and (rows == 1 or tensor.stride(0) * size % BYTES == 0)
        and (rows == 1 or tensor.stride(0) >= columns)
    )


def descriptor(base: torch.Tensor, shape: list[int], strides: list[int], block: list[int]) -> TensorDescriptor:
    """A descriptor of memory that starts at `base`. Strides of dimensions of size 1 do not matter to
    the result, but must be aligned all the same."""
    unit = BYTES // base.element_size()
    fixed = [max(-(-stride // unit) * unit, unit) if size == 1 else stride for size, stride in zip(shape, strides)]
    return TensorDescriptor(base, shape, [*fixed[:-1], 1], block)


def constants(*values: Any) -> tuple[Any, ...]:
    """Values that a kernel knows when it is compiled, as fields of a structure."""
    return tuple(tl.constexpr(value) for value in values)


def named_constants(**values: Any) -> dict[str, Any]:
    """The same, by name."""
    return {name: tl.constexpr(value) for name, value in values.items()}


def matmul_precision(dtype: torch.dtype) -> str:
    """fp32 is multiplied as fp32, unless the user allowed tf32 in PyTorch."""
    return "tf32" if dtype != torch.float32 or torch.backends.cuda.matmul.allow_tf32 else "ieee"


Steps = tuple[tuple[int, int], ...]  # (stride in bytes, size) of each dimension of more than one element
TRIES = 10**6  # of numpy's search, tens of milliseconds; whoever needs more is said to overlap


class _OnPaper:
    """What numpy must know of memory to tell where it lies; nobody looks into it."""

    def __init__(self, begin: int, steps: Steps, nbytes: int):
        self.__array_interface__ = dict(
            version=3, data=(begin, True), typestr=f"|V{nbytes}",
            shape=tuple(size for _, size in steps), strides=tuple(stride for stride, _ in steps),
        )  # fmt: skip


@functools.lru_cache(maxsize=4096)
def _meet(distance: int, steps: Steps, nbytes: int, other_steps: Steps, other_nbytes: int) -> bool:
    """Do two sets of elements of so many bytes share any, if the second begins so many bytes behind the first?"""
    begin = 2**32 + max(-distance, 0)
    one, other = _OnPaper(begin, steps, nbytes), _OnPaper(begin + distance, other_steps, other_nbytes)
    try:
        return np.shares_memory(np.asarray(one), np.asarray(other), max_work=TRIES)
    except np.exceptions.TooHardError:
        return True


def _steps(tensor: torch.Tensor) -> Steps:
    item = tensor.element_size()
    return tuple((stride * item, size) for stride, size in zip(tensor.stride(), tensor.shape) if size > 1)


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Do two tensors share memory? Addresses decide, whatever types and storages they belong to. Columns of one matrix
    beside columns of the same do not."""
    if not one.numel() or not other.numel():
        return False
    begin, other_begin = one.data_ptr(), other.data_ptr()
    if begin >= other_begin + _span(other) or other_begin >= begin + _span(one):
        return False
    return _meet(other_begin - begin, _steps(one), one.element_size(), _steps(other), other.element_size())


def _span(tensor: torch.Tensor) -> int:
    """Bytes from the beginning of the first element to the end of the last one."""
    last = 0
    for size, stride in zip(tensor.shape, tensor.stride()):
        last += (size - 1) * stride
    return (last + 1) * tensor.element_size()


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Are two elements of a tensor in the same place, as in an expanded tensor?"""
    steps = tuple(sorted(_steps(tensor)))
    reach = 0
    for stride, size in steps:
        if stride <= reach or not stride:
            break
        reach += stride * (size - 1)
    else:
        return False  # every dimension steps over all that lies inside of it
    # some two elements differ in a first dimension: by one step or more there, and anyhow in those behind it
    nbytes = tensor.element_size()
    return tensor.numel() > 0 and any(
        _meet(stride, steps[i + 1 :], nbytes, ((stride, size - 1), *steps[i + 1 :]), nbytes)
        for i, (stride, size) in enumerate(steps)
    )


def same_elements(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Is each element of one tensor the same place as that of the other one with the same index?"""
    return (
        one.data_ptr() == other.data_ptr()
        and one.dtype == other.dtype
        and one.shape == other.shape
        and _steps(one) == _steps(other)
    )


def layout(tensor: torch.Tensor) -> tuple:
    """Everything about a tensor that a plan depends on."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.data_ptr() % BYTES == 0
