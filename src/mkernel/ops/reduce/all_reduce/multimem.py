"""Multicast (NVLink SHARP): one address that stands for the memory of all ranks of a node.

Where symmetric memory provides a multicast object, the context holds a second address of the workspace's segment. An
access at this address refers to all ranks' copies at once (`everywhere`), and the switch between the GPUs carries it
out: a store writes to every rank's memory (`store_everywhere`), a load returns the sum of what all ranks hold
(`load_sum`). No other access to these addresses is allowed.

What the switch guarantees. A store writes the same bits everywhere. For a sum, the PTX ISA guarantees no order, and
none holds in practice: NCCL issues 1497 and 2360 report sums on Hopper that differ between calls, between hosts, and
with earlier allocations. So operators whose results must be reproducible let the switch reduce only if the caller
allows it. The switch accumulates 16-bit sums in fp32 and rounds them; rounding to nearest even is not guaranteed.

Memory ordering. The two addresses of a byte are aliases, and accesses through them belong to different proxies in the
PTX memory model: a release and an acquire order them only with a `fence.proxy.alias` on the path between them (PTX
ISA, 8.6, and the CUDA programming guide on virtual aliasing). Here the CTA that makes the multicast access always
executes the fence next to it: `fence_aliases` between a store and the barrier and release that signal it, and between
the acquire of what is to be added and the load (in `load_sum`). Signals then order both as they order any other
access.
"""

import triton
import triton.language as tl

from mkernel.lang.context import MULTICAST
from mkernel.lang.partials import pack, unpack


@triton.jit
def everywhere(context, offset, DTYPE: tl.constexpr):
    """Multicast pointer to a byte offset in all ranks' copies of the segment. Offsets must be divisible by 16."""
    return (tl.load(context + MULTICAST) + offset).to(tl.pointer_type(DTYPE))


@triton.jit
def fence_aliases():
    """Order this thread's accesses to the same memory through multicast addresses and through ordinary ones. Returns 0:
    an instruction that depends on it is executed after the fence."""
    return tl.inline_asm_elementwise(
        "fence.proxy.alias; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _pieces(slot, BYTES: tl.constexpr):
    """Addresses of the 16-byte pieces of a slot of BYTES bytes."""
    return slot.to(tl.int64) + tl.arange(0, BYTES // 16) * 16


@triton.jit
def _pieces_behind_fence(slot, BYTES: tl.constexpr):
    """The same, after `fence_aliases`."""
    return _pieces(slot, BYTES) + fence_aliases()


@triton.jit
def _words(tile, DTYPE: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """The first, second, third and fourth 32-bit words of all pieces of a slot that holds the tile."""
    SIZE: tl.constexpr = DTYPE.primitive_bitwidth // 8
    PIECES: tl.constexpr = TILE_M * TILE_N * SIZE // 16
    width: tl.constexpr = 64 // DTYPE.primitive_bitwidth  # as in `store_partial`
    pairs: tl.constexpr = width if width <= TILE_N // 8 else TILE_N // 8
    block = pack(tile.to(DTYPE), TILE_M, TILE_N, pairs)
    if SIZE == 2:
        low, high = block.to(tl.int16, bitcast=True).reshape(PIECES * 4, 2).split()
        words = (low.to(tl.int32) & 0xFFFF) | (high.to(tl.int32) << 16)
    else:
        words = block.to(tl.int32, bitcast=True)
    even, odd = words.reshape(PIECES, 2, 2).split()
    first, third = even.split()
    second, fourth = odd.split()
    return first, second, third, fourth


@triton.jit
def _tile(first, second, third, fourth, DTYPE: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """The inverse of `_words`: the tile, as fp32."""
    ELEMENTS: tl.constexpr = TILE_M * TILE_N
    width: tl.constexpr = 64 // DTYPE.primitive_bitwidth  # as in `store_partial`
    pairs: tl.constexpr = width if width <= TILE_N // 8 else TILE_N // 8
    words = tl.join(tl.join(first, third), tl.join(second, fourth))
    if DTYPE.primitive_bitwidth == 16:
        low = words.to(tl.int16).to(DTYPE, bitcast=True)
        high = (words >> 16).to(tl.int16).to(DTYPE, bitcast=True)
        block = tl.join(low, high).reshape(ELEMENTS)
    else:
        block = words.to(DTYPE, bitcast=True).reshape(ELEMENTS)
    return unpack(block, TILE_M, TILE_N, pairs).to(tl.float32)


@triton.jit
def store_everywhere(slot, tile, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """Like `store_partial`, to the slots of all ranks at once: `slot` is a multicast address."""
    DTYPE: tl.constexpr = slot.dtype.element_ty
    BYTES: tl.constexpr = TILE_M * TILE_N * (DTYPE.primitive_bitwidth // 8)
    first, second, third, fourth = _words(tile, DTYPE, TILE_M, TILE_N)
    # f32 only because the instruction needs a type: it stores bits
    tl.inline_asm_elementwise(
        "multimem.st.relaxed.sys.global.v4.f32 [$1], {$2, $3, $4, $5}; mov.u32 $0, 0;",
        "=r,l,r,r,r,r", [_pieces(slot, BYTES), first, second, third, fourth],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def load_sum(slot, like, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """The sum of the tiles in all ranks' slots, as fp32, after `fence_aliases`: `slot` is a multicast address.

    The sum must be loaded only once, because a second load may add in another order and return other bits. Triton
    duplicates an instruction, pure or not, where its result is needed in another layout, and merges only duplicates of
    pure ones. So these instructions are marked pure. They depend on the fence, which is not pure, and thus stay after
    it. `like` is a tile of the same shape in the layout that the sum should have, that of the tensor cores'
    accumulator; its values are not used. With it, all duplicates are identical, and the sum need not go through shared
    memory, which has no room for it.
    """
    DTYPE: tl.constexpr = slot.dtype.element_ty
    BYTES: tl.constexpr = TILE_M * TILE_N * (DTYPE.primitive_bitwidth // 8)
    pieces = _pieces_behind_fence(slot, BYTES)
    held, _, _, _ = _words(like, DTYPE, TILE_M, TILE_N)
    WORDS: tl.constexpr = (tl.int32, tl.int32, tl.int32, tl.int32)
    if DTYPE == tl.bfloat16:
        first, second, third, fourth = tl.inline_asm_elementwise(
            "multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.bf16x2 {$0, $1, $2, $3}, [$4];",
            "=r,=r,=r,=r,l,r", [pieces, held], dtype=WORDS, is_pure=True, pack=1,
        )  # fmt: skip
    elif DTYPE == tl.float16:
        first, second, third, fourth = tl.inline_asm_elementwise(
            "multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.f16x2 {$0, $1, $2, $3}, [$4];",
            "=r,=r,=r,=r,l,r", [pieces, held], dtype=WORDS, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        first, second, third, fourth = tl.inline_asm_elementwise(
            "multimem.ld_reduce.relaxed.sys.global.add.v4.f32 {$0, $1, $2, $3}, [$4];",
            "=r,=r,=r,=r,l,r", [pieces, held], dtype=WORDS, is_pure=True, pack=1,
        )  # fmt: skip
    return _tile(first, second, third, fourth, DTYPE, TILE_M, TILE_N)
