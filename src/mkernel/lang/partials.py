"""Partial tiles: how a contribution to a tile is laid out in memory, usually for the rank that reduces the tile.

A partial is one contiguous block, a *slot* of TILE_M * TILE_N elements, so the network needs one request for it. The
writer and the reader hold the tile in the same register layout, that of the tensor cores' accumulator: a thread has
pairs of adjacent columns of two rows that are 8 rows apart. The slot keeps the elements in thread order: 16 bytes of
one thread, then 16 bytes of the next. So a tile moves between the accumulator and memory in the widest accesses
available, without an exchange between threads through shared memory. (A row-major slot would need 64 KB of shared
memory for a 128x256 tile, and a barrier on either side.) The order is well defined for other accumulator layouts too,
those of older or newer tensor cores; Triton then moves the elements between threads.
"""

import triton
import triton.language as tl

from mkernel.lang.device import prefetch

LINE = tl.constexpr(128)  # bytes of a cache line


@triton.jit
def pack(tile, TILE_M: tl.constexpr, TILE_N: tl.constexpr, PAIRS: tl.constexpr):
    """Flatten a [TILE_M, TILE_N] tile into the order of a slot."""
    split = tile.reshape(TILE_M // 16, 2, 8, TILE_N // (8 * PAIRS), PAIRS, 4, 2)
    return split.permute(3, 1, 0, 2, 5, 4, 6).reshape(TILE_M * TILE_N)


@triton.jit
def unpack(block, TILE_M: tl.constexpr, TILE_N: tl.constexpr, PAIRS: tl.constexpr):
    """The inverse of `pack`."""
    split = block.reshape(TILE_N // (8 * PAIRS), 2, TILE_M // 16, 8, 4, PAIRS, 2)
    return split.permute(2, 1, 3, 0, 5, 4, 6).reshape(TILE_M, TILE_N)


@triton.jit
def store_partial(slot, tile, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """Round a tile to the slot's dtype and store it in the slot. Slots are aligned to 16 bytes."""
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
    """Prefetch a slot into the cache, so that a later `load_partial` is faster. The multiplication of the tile hides
    the latency; `load_partial` cannot, because the accumulator leaves too few registers to keep many loads in flight.
    The partial need not have arrived yet."""
    ELEMENTS: tl.constexpr = LINE // (slot.dtype.element_ty.primitive_bitwidth // 8)
    prefetch(slot + tl.arange(0, TILE_M * TILE_N // ELEMENTS) * ELEMENTS)
