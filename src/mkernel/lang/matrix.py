"""Matrices and their tiles, as kernels pass them on.

A structure is a named tuple. Triton takes it apart where it is passed: what is constant in it (fields in capitals) is
constant in the function that gets it. But a structure that is assigned to a name, or returned, loses its constants:
they become numbers. So structures with constants come from the host, or are built where they are passed.

Triton 3.6 can compile a tensor descriptor inside of a structure, but not launch it. So a descriptor is a parameter of
the kernel by itself, and the kernel's entry puts it into a `Matrix`.
"""

from typing import Any, NamedTuple


class Block(NamedTuple):
    """Elements in rows: where the first one is (a pointer or, in a segment, an offset in elements), and how many
    elements rows and columns are apart."""

    data: Any
    row_stride: Any
    column_stride: Any


class Strides(NamedTuple):
    """How to read a matrix: the distances of its parts, rows and columns, in elements. USES_TMA: through a tensor
    descriptor instead. TRANSPOSED: the descriptor is one of the [n, k] tensor that the [k, n] matrix is a view of."""

    part: Any
    row: Any
    column: Any
    USES_TMA: Any
    TRANSPOSED: Any


class Matrix(NamedTuple):
    """A matrix in global memory. data: a tensor descriptor if strides.USES_TMA, else a pointer."""

    data: Any
    strides: Any


class Tile(NamedTuple):
    """A tile of part `part` of a product: it begins at (row, column), and the part ends at (rows, columns)."""

    part: Any
    row: Any
    rows: Any
    column: Any
    columns: Any


class Tiling(NamedTuple):
    """How a product is cut into tiles, all constants. GROUP: row blocks that are computed together (`swizzle_tile`)."""

    M: Any
    N: Any
    K: Any
    GROUP: Any
    PRECISION: Any
