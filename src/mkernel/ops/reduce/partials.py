"""Partial tiles: one rank's part of a tile whose sum is wanted, on its way to the rank that adds.

A partial tile travels as one contiguous block, a *slot* of TILE_M * TILE_N elements, so it is one
request to the network. Who writes it and who adds it hold the tile alike, as the accumulator of the
tensor cores: a thread has pairs of neighbouring columns of two rows, 8 rows apart. The slot keeps
the elements in the order of threads, 16 bytes of a thread beside 16 bytes of the next one. So a tile
goes from the accumulator to memory and back in the widest accesses there are, with no exchange
between threads through shared memory. (Rows in a slot would need 64 KB of it for a 128x256 tile, and a
barrier on either side.) On other layouts of the accumulator, those of older or newer tensor cores,
the order means the same; Triton then moves the elements between threads.
"""

import triton
import triton.language as tl

from mkernel.lang.device import prefetch

LINE = tl.constexpr(128)  # bytes of a line of the cache


@triton.jit
def pack(tile, TILE_M: tl.constexpr, TILE_N: tl.constexpr, PAIRS: tl.constexpr):
    """A [TILE_M, TILE_N] tile as a flat block in the slot's order."""
    split = tile.reshape(TILE_M // 16, 2, 8, TILE_N // (8 * PAIRS), PAIRS, 4, 2)
    return split.permute(3, 1, 0, 2, 5, 4, 6).reshape(TILE_M * TILE_N)


@triton.jit
def unpack(block, TILE_M: tl.constexpr, TILE_N: tl.constexpr, PAIRS: tl.constexpr):
    """What `pack` made a block of."""
    split = block.reshape(TILE_N // (8 * PAIRS), 2, TILE_M // 16, 8, 4, PAIRS, 2)
    return split.permute(2, 1, 3, 0, 5, 4, 6).reshape(TILE_M, TILE_N)


@triton.jit
def store_partial(slot, tile, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """Round a tile to the slot's dtype, and store it there. Slots are aligned to 16 bytes."""
    width: tl.constexpr = 64 // slot.dtype.element_ty.primitive_bitwidth  # pairs of columns in 16 bytes
    pairs: tl.constexpr = width if width <= TILE_N // 8 else TILE_N // 8
    slot = tl.multiple_of(slot, 16)
    tl.store(slot + tl.arange(0, TILE_M * TILE_N), pack(tile.to(slot.dtype.element_ty), TILE_M, TILE_N, pairs))


@triton.jit
def load_partial(slot, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """The tile in a slot, as fp32."""
    width: tl.constexpr = 64 // slot.dtype.element_ty.primitive_bitwidth
    pairs: tl.constexpr = width if width <= TILE_N // 8 else TILE_N // 8
    slot = tl.multiple_of(slot, 16)
    return unpack(tl.load(slot + tl.arange(0, TILE_M * TILE_N)), TILE_M, TILE_N, pairs).to(tl.float32)


@triton.jit
def prefetch_partial(slot, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """Bring a slot into the cache, so that `load_partial` is faster later on. The tile's own
    multiplication takes long enough for it; the registers, full of its sum, have no room for many loads
    at a time. It does not matter whether the part is there yet."""
    ELEMENTS: tl.constexpr = LINE // (slot.dtype.element_ty.primitive_bitwidth // 8)
    prefetch(slot + tl.arange(0, TILE_M * TILE_N // ELEMENTS) * ELEMENTS)
