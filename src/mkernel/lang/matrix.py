"""Matrices and tiles, as kernels pass them to device functions.

A structure is a named tuple, which Triton flattens at each call. Fields in capitals are constants and stay constants in
the callee. But a structure that is assigned to a name or returned loses its constants: they become run-time values. So
structures with constants come from the host, or are built inside the call that takes them.

Triton 3.6 can compile a tensor descriptor inside a structure, but cannot launch such a kernel. So a descriptor is a
parameter of the kernel itself, and the kernel's entry point puts it into a `Matrix`.
"""

from typing import Any, NamedTuple

import triton.language as tl


class Block(NamedTuple):
    """A strided block of elements.

    Attributes:
        data: pointer to the first element or, for the target of `push_rows`, its offset in a segment in elements.
        row_stride: elements from one row to the next.
        column_stride: elements from one column to the next.
    """

    data: Any
    row_stride: Any
    column_stride: Any


class Strides(NamedTuple):
    """How to read a matrix [parts, rows, columns].

    Attributes:
        part: elements from one part to the next.
        row: elements from one row to the next.
        column: elements from one column to the next.
        USES_TMA: the matrix is read through a tensor descriptor, and the strides above are unused; a constant.
        TRANSPOSED: the descriptor describes the [n, k] tensor that the [k, n] matrix is a view of; a constant.
        scales: the `Scales` of an fp8 matrix (lang/scaling.py); None unless SCALED.
        SCALED: the matrix has scales; a constant.
    """

    part: Any
    row: Any
    column: Any
    USES_TMA: Any
    TRANSPOSED: Any
    scales: Any = None
    SCALED: Any = tl.constexpr(False)


class Matrix(NamedTuple):
    """A matrix in global memory.

    Attributes:
        data: a tensor descriptor if `strides.USES_TMA`, else a pointer.
        strides: a `Strides`.
    """

    data: Any
    strides: Any


class Tile(NamedTuple):
    """Which tile of a product to compute. The product may consist of parts, such as the rows of each rank.

    Attributes:
        part: the part that the tile lies in.
        row: the tile's first row in the part.
        rows: rows of the part. What reaches beyond them is masked.
        column: the tile's first column.
        columns: columns of the part. What reaches beyond them is masked.
    """

    part: Any
    row: Any
    rows: Any
    column: Any
    columns: Any


class Tiling(NamedTuple):
    """The tile shape of a GEMM; all fields are constants.

    Attributes:
        M: rows of a tile.
        N: columns of a tile.
        K: depth of a step.
        GROUP: row blocks that are computed together for locality in L2, see `swizzle_tile`.
        PRECISION: the `input_precision` of `tl.dot`.
    """

    M: Any
    N: Any
    K: Any
    GROUP: Any
    PRECISION: Any
