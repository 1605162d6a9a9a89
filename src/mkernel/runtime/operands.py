"""How a kernel may read or write a tensor: through a tensor descriptor (TMA), or through pointers."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from mkernel.runtime.errors import ArgumentError

DTYPES: dict[torch.dtype, Any] = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
BYTES = 16  # what a descriptor's base and strides must be divisible by


def check_plain(name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor that has no memory of its own, or other values there than it shows."""
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


def matmul_precision(dtype: torch.dtype) -> str:
    """fp32 is multiplied as fp32, unless the user allowed tf32 in PyTorch."""
    return "tf32" if dtype != torch.float32 or torch.backends.cuda.matmul.allow_tf32 else "ieee"


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Do two matrices share memory? Columns of one matrix beside columns of the same do not."""
    if not one.numel() or not other.numel() or one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr():
        return False

    def span(tensor: torch.Tensor) -> tuple[int, int]:
        first = int(tensor.storage_offset())
        return first, first + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride())) + 1

    (start, end), (other_start, other_end) = span(one), span(other)
    if end <= other_start or other_end <= start:
        return False
    stride = one.stride(0)
    if stride == other.stride(0) and stride > 0 and one.stride(1) == other.stride(1) == 1:
        left, right = start % stride, other_start % stride
        beside = left + one.shape[1] <= right or right + other.shape[1] <= left
        whole = left + one.shape[1] <= stride and right + other.shape[1] <= stride
        return not (beside and whole)
    return True


def layout(tensor: torch.Tensor) -> tuple:
    """Everything about a tensor that a plan depends on."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.data_ptr() % BYTES == 0
