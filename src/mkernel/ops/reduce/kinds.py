"""The kinds of signals of partial sums, for wait records and traces. entry.py names them."""

import triton.language as tl

PARTIAL = tl.constexpr(16)  # the peer's partial of a tile has arrived
FINISHED_TILE = tl.constexpr(17)  # a tile that the peer has reduced can be read
