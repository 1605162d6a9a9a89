"""A block of a matrix, read through masked pointers. Kernels that pass matrices as structures use lang/gemm.py."""

import triton
import triton.language as tl


@triton.jit
def masked_block(
    tensor, row, column, rows, columns, row_stride, column_stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """ROWS x COLUMNS elements from (row, column); zeros outside of rows x columns."""
    i = row + tl.arange(0, ROWS)[:, None]
    j = column + tl.arange(0, COLUMNS)[None, :]
    pointers = tensor + i.to(tl.int64) * row_stride + j.to(tl.int64) * column_stride
    return tl.load(pointers, mask=(i < rows) & (j < columns), other=0.0)
