"""What the host code of the kernels for Hopper shares: which calls they support, and their descriptors.

Gluon is only imported when such a kernel is about to run.
"""

from __future__ import annotations

import functools
from dataclasses import fields
from typing import Any

import torch

from mkernel.runtime.config import Config
from mkernel.runtime.gpus import capability
from mkernel.runtime.group import Group
from mkernel.runtime.operands import DTYPES, aligned_strides

TILE_M, TILE_N, TILE_K = 128, 256, 64
FP8_TILE_K = 128
FP8_TILE = (256, 128, FP8_TILE_K)  # likewise for fp8, of rows that are gathered; sums have that of 16-bit elements
STAGES = 4
WARPS = 4  # of one warpgroup; the kernel adds the others itself


def suits(
    group: Group, rows: int, dtype: torch.dtype, config: Config | None, free: set[str], itemsize: int = 2
) -> bool:  # fmt: skip
    """Can a kernel for Hopper run this call, judging by what is the same on all ranks? `rows`: on each rank. `free`:
    the fields of a configuration that the caller may set. itemsize: bytes of the elements that the kernel
    multiplies."""
    given = config or Config()
    return (
        group.target.type == "cuda"
        and capability(group.target)[0] == 9
        and group.nodes == 1
        and dtype.itemsize == itemsize
        and rows % (TILE_M if itemsize == 2 else FP8_TILE[0]) == 0
        and all(getattr(given, field.name) is None for field in fields(given) if field.name not in free)
    )


def tma_descriptor(base: torch.Tensor, rows: int, columns: int, stride: int, block: list[int]) -> Any:
    """A descriptor of rows x columns from `base`, whose blocks have the shared-memory layout that wgmma reads."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    shape = [rows, columns]
    strides = aligned_strides(shape, [stride, 1], base.element_size())
    return TensorDescriptor(base, shape, strides, block, _layout_of(*block, base.dtype))


@functools.cache
def _layout_of(rows: int, columns: int, dtype: torch.dtype) -> Any:
    """The layout of a block in shared memory. Cached: finding it takes longer than making a descriptor."""
    from triton.experimental.gluon import language as gl

    fp8 = {torch.float8_e4m3fn: gl.float8e4nv, torch.float8_e5m2: gl.float8e5}
    return gl.NVMMASharedLayout.get_default_for([rows, columns], fp8.get(dtype) or DTYPES[dtype])


def right_operand(b: torch.Tensor, transposed: bool, depth: int = TILE_K) -> Any:
    """A descriptor of b [k, n], or of the [n, k] matrix that it is a transposed view of. depth: of a block, in k."""
    k, n = b.shape
    if transposed:
        return tma_descriptor(b, n, k, b.stride(1), [TILE_N, depth])
    return tma_descriptor(b, k, n, b.stride(0), [depth, TILE_N])
