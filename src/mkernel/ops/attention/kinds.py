"""The kinds of signals of attention, for wait records and traces. entry.py names them."""

import triton.language as tl

FREED = tl.constexpr(18)  # the peer no longer reads that round
# of the backward pass
ADDED = tl.constexpr(32)  # the peer has added up the partials of that round
PARTIAL_GRADIENTS = tl.constexpr(33)  # the peer's partial of a block of keys has arrived
NODE_SUM = tl.constexpr(34)  # the sum of the partials of the peer's node has arrived
PREPARED = tl.constexpr(35)  # the CTAs of this rank have computed delta
