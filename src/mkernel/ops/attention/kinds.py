"""The kinds of signals of attention, for wait records and traces. entry.py names them."""

import triton.language as tl

FREED = tl.constexpr(18)  # the peer reads nothing of that round any more
