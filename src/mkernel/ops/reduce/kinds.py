"""The kinds of signals of partial sums, for wait records and traces. entry.py names them."""

import triton.language as tl

PARTIAL = tl.constexpr(16)  # the peer's part of a tile's sum is here
FINISHED_TILE = tl.constexpr(17)  # a tile that the peer has summed up is here
