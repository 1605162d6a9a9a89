"""Multicast (NVLink SHARP): one address that means the memory of all ranks of a node.

Where symmetric memory brings a multicast object, the context holds a second address of the workspace's segment, at
which every byte is that of all ranks at once (`everywhere`). The switch between the GPUs carries out what is
asked for there: a store reaches every rank's memory (`store_everywhere`), a load comes back as the sum of what
all ranks have (`load_sum`). No other access to these addresses is allowed.

What the switch promises. A store writes the same bits everywhere. For a sum the PTX ISA promises no order, and none
was found to hold: NCCL's issues 1497 and 2360 tell of sums on Hopper that differ between calls, between hosts and with
what was allocated before. So operators whose results must not differ let the switch add only where their caller allows
it. 16-bit sums are accumulated in fp32 and rounded in the switch; to nearest even is promised by nobody.

Ordering. The two addresses of a byte are aliases, and accesses through them are of different proxies in PTX's memory
model: a release and an acquire order them only if `fence.proxy.alias` stands on the path between (PTX ISA, 8.6, and
the CUDA programming guide on virtual aliasing). Here the fence is always beside the multicast access, in the CTA that
makes it: `fence_aliases` between a store and the barrier and release that signal it, and between the acquire of what
is to be added and the load (in `load_sum`). Then signals order both as they do everything else.
"""

import triton
import triton.language as tl

from mkernel.lang.context import MULTICAST
from mkernel.ops.reduce.partials import pack, unpack


@triton.jit
def everywhere(context, offset, DTYPE: tl.constexpr):
    """Pointer to a byte of all ranks' copies of the segment; offsets are divisible by 16."""
    return (tl.load(context + MULTICAST) + offset).to(tl.pointer_type(DTYPE))


@triton.jit
def fence_aliases():
    """Orders this thread's accesses through multicast addresses and those of the same memory through its own. Returns
    0: what is made to depend on it comes after the fence."""
    return tl.inline_asm_elementwise(
        "fence.proxy.alias; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _pieces(slot, BYTES: tl.constexpr):
    """Addresses of the pieces of 16 bytes that a slot of so many bytes consists of."""
    return slot.to(tl.int64) + tl.arange(0, BYTES // 16) * 16


@triton.jit
def _pieces_behind_fence(slot, BYTES: tl.constexpr):
    """The same, after `fence_aliases`."""
    return _pieces(slot, BYTES) + fence_aliases()


@triton.jit
def _words(tile, DTYPE: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """The first, second, third and fourth words of all pieces of a slot that holds the tile."""
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
    """What `_words` took apart, as fp32."""
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
    """`store_partial` into the slot of all ranks at once: `slot` is a multicast address."""
    DTYPE: tl.constexpr = slot.dtype.element_ty
    BYTES: tl.constexpr = TILE_M * TILE_N * (DTYPE.primitive_bitwidth // 8)
    first, second, third, fourth = _words(tile, DTYPE, TILE_M, TILE_N)
    # the instruction's type does not matter: bits are stored
    tl.inline_asm_elementwise(
        "multimem.st.relaxed.sys.global.v4.f32 [$1], {$2, $3, $4, $5}; mov.u32 $0, 0;",
        "=r,l,r,r,r,r", [_pieces(slot, BYTES), first, second, third, fourth],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def load_sum(slot, like, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """The sum of the tiles in all ranks' slots, as fp32, after `fence_aliases`: `slot` is a multicast address.

    It must be loaded once: the switch may not add alike a second time. Triton copies instructions to where it wants
    their result in another layout, whether they are pure or not, and only merges copies of pure ones. So these are
    called pure, and depend on the fence, which is not: they stay behind it. And `like`, of which the values are not
    used, is a tile of this shape that the threads hold as they shall hold the sum, the accumulator of the tensor
    cores: then all copies are alike, and the sum need not go through shared memory, which has no room for it.
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
