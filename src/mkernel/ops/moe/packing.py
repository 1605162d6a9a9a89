"""Tokens in fp8 with scales, as they travel: packed.

A packed token is one row of 32-bit words: its elements, zeros up to a multiple of 16 bytes (`AT`), its scales in fp32,
and zeros up to the next such multiple. So a dispatch moves elements and scales together, announces them with the same
signal, and copies 16 bytes at a time. The delivered rows are packed, too. The GEMM reads their elements through a
descriptor, and their scales through a pointer.

Each token is packed once, when it is staged: a CTA copies it from the caller's tensors or quantizes it, to the bits of
`mkernel.quantize` (`quantize_rows`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from mkernel.lang.context import rank_of, segment_of
from mkernel.lang.copy import Peers, push_rows
from mkernel.lang.layout import row_of
from mkernel.lang.matrix import Block, Matrix, Strides
from mkernel.lang.scaling import Scales, quantize_rows
from mkernel.ops.moe.grouped import ExpertScales
from mkernel.ops.moe.sizes import power_above, round_up
from mkernel.runtime.operands import BYTES, constants, layout
from mkernel.runtime.scaling import SIDE, blocks_of, with_scales

NARROW = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}
WORD = torch.int32


class Packing(NamedTuple):
    """How tokens are packed; see the module's docstring."""

    scales: Any  # Block: the scales of this rank's tokens; None if QUANTIZES
    hidden: Any  # elements of a token
    DTYPE: Any  # their type in fp8
    AT: Any  # bytes before the scales
    COUNT: Any  # scales of a token
    WORDS: Any  # words of a packed token
    SCALE_COLUMNS: Any  # scales of a token that are copied at once: at least as many as it takes
    QUANTIZES: Any  # the caller's tokens are in a wider type


@dataclass(frozen=True)
class Packed:
    """The packed tokens of a call, for the host.

    dtype: that of their elements. scale_x: None if the kernel quantizes tokens. scale_w: [experts, k/128, n/128] if
    `blockwise`, otherwise [experts, 1, n].
    """

    hidden: int
    dtype: torch.dtype
    scale_x: torch.Tensor | None
    scale_w: torch.Tensor
    blockwise: bool
    fast: bool
    out_dtype: torch.dtype

    @property
    def count(self) -> int:
        return blocks_of(self.hidden) if self.blockwise else 1

    @property
    def at(self) -> int:
        return round_up(self.hidden, BYTES)

    @property
    def words(self) -> int:
        return (self.at + round_up(4 * self.count, BYTES)) // 4

    @property
    def key(self) -> tuple:
        """Everything that a plan depends on."""
        of_x = None if self.scale_x is None else layout(self.scale_x)
        return self.dtype, of_x, layout(self.scale_w), self.blockwise, self.fast, self.out_dtype

    def packing(self) -> Packing:
        """For the kernel."""
        scales, quantizes = self.scale_x, self.scale_x is None
        return Packing(
            None if scales is None else Block(scales, scales.stride(0), scales.stride(1)),
            self.hidden,
            *constants(NARROW[self.dtype], self.at, self.count, self.words, power_above(self.count), quantizes),
        )

    def rows(self, rows: torch.Tensor) -> torch.Tensor:
        """The elements of packed rows."""
        return rows.view(torch.uint8).view(self.dtype)[:, : self.hidden]

    def expert_scales(self, rows: torch.Tensor) -> ExpertScales:
        """The scales of packed rows and of the matrices, for the kernel."""
        return expert_scales(rows.view(torch.float32)[:, self.at // 4 :], self.scale_w, self.blockwise, self.fast)

    def __str__(self) -> str:
        kind = "fp8" if self.scale_x is not None else "fp8, to which the kernel quantizes them"
        if self.blockwise:
            how = "blocks of 1x128 of a token and 128x128 of w have scales, and are added up in fp32"
        else:
            sums = "with fast accumulation" if self.fast else f"added up in fp32 every {SIDE} of k"
            how = f"a scale for each token and each column of w; sums are {sums}"
        return f"tokens travel in {kind}, {4 * self.words} bytes with their scales; {how}"


@dataclass(frozen=True)
class PackedLayer:
    """The operands in fp8 of a whole layer. x: its tokens, and the scales of gate and up. scale_down: [experts,
    inter/128, hidden/128]."""

    x: Packed
    scale_down: torch.Tensor

    def down_scales(self, inner_scales: torch.Tensor | None) -> ExpertScales:
        """The scales of inner activations and of the second matrices, for the kernel."""
        assert inner_scales is not None
        return expert_scales(inner_scales, self.scale_down, True, False)


def expert_scales(rows: torch.Tensor, w: torch.Tensor, blockwise: bool, fast: bool) -> ExpertScales:
    """Scales of rows [rows, ...] and of matrices [experts, ...], for the kernel."""
    one, fixed = constants(0)[0], constants(blockwise, fast)
    of_rows = Scales(rows, one, rows.stride(0), 1, *constants(1), *fixed)
    of_w = Scales(w, w.stride(0), w.stride(2), w.stride(1), *constants(SIDE if blockwise else 1), *fixed)
    return ExpertScales(_without_data(of_rows), _without_data(of_w), *constants(True))


def _without_data(scales: Scales) -> Matrix:
    return Matrix(None, with_scales(Strides(0, 0, 0, *constants(False, False)), scales))


@triton.jit
def _fill(start, row_stride, rows, first, end, WIDTH: tl.constexpr):
    """Store zeros to bytes first..end-1 of some rows."""
    j = first + tl.arange(0, WIDTH)[None, :]
    for row in range(0, rows, 4):
        i = row + tl.arange(0, 4)[:, None]
        zeros = tl.zeros([4, WIDTH], tl.int8)
        tl.store(start + i.to(tl.int64) * row_stride + j, zeros, mask=(i < rows) & (j < end))


@triton.jit
def pack_tokens(comm, dispatch, token, end):
    """Pack tokens token..end-1 of this rank where they are staged."""
    NARROW_TYPE: tl.constexpr = dispatch.packing.DTYPE
    AT: tl.constexpr = dispatch.packing.AT
    COUNT: tl.constexpr = dispatch.packing.COUNT
    WORDS: tl.constexpr = dispatch.packing.WORDS
    rank = rank_of(comm.context)
    rows = end - token
    offset = row_of(dispatch.staged, comm.epoch, token)  # in words
    pitch = tl.cast(dispatch.staged.row_stride, tl.int64)
    x = dispatch.x.data + token.to(tl.int64) * dispatch.x.row_stride
    if dispatch.packing.QUANTIZES:
        quantize_rows(
            Block(x, dispatch.x.row_stride, dispatch.x.column_stride),
            Block(segment_of(comm.context, rank, NARROW_TYPE) + offset * 4, pitch * 4, 1),
            Block(segment_of(comm.context, rank, tl.float32) + offset + AT // 4, pitch, 1),
            rows, dispatch.packing.hidden, COUNT == 1,
        )  # fmt: skip
    else:
        push_rows(
            comm.context, Block(x, dispatch.x.row_stride, dispatch.x.column_stride), Block(offset * 4, pitch * 4, 1),
            rows, dispatch.packing.hidden, Peers(rank, 0, 1, 1), dispatch.ROWS, dispatch.COLUMNS * 4,
        )  # fmt: skip
        scales = dispatch.packing.scales.data + token.to(tl.int64) * dispatch.packing.scales.row_stride
        push_rows(
            comm.context, Block(scales, dispatch.packing.scales.row_stride, dispatch.packing.scales.column_stride),
            Block(offset + AT // 4, pitch, 1), rows, COUNT, Peers(rank, 0, 1, 1), 4, dispatch.packing.SCALE_COLUMNS,
        )  # fmt: skip
    start = segment_of(comm.context, rank, tl.int8) + offset * 4
    if dispatch.packing.hidden < AT:
        _fill(start, pitch * 4, rows, dispatch.packing.hidden, AT, 16)
    if AT + COUNT * 4 < WORDS * 4:
        _fill(start, pitch * 4, rows, AT + COUNT * 4, WORDS * 4, 16)
