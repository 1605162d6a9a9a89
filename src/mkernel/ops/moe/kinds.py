"""The kinds of signals of the mixture of experts, for wait records and traces. entry.py names them."""

import triton.language as tl

ROUTED = tl.constexpr(20)  # the routing table of the peer has arrived
COUNTED = tl.constexpr(21)  # the CTAs of this rank have counted the rows
SCHEDULED = tl.constexpr(22)  # the blocks of this rank have an order
HELD = tl.constexpr(23)  # a chunk of the peer's rows can be fetched
PLACED = tl.constexpr(24)  # the rows of a block are in place for the GEMM
SETTLED = tl.constexpr(25)  # the tables of this rank say where the rows of a chunk are
COMPUTED = tl.constexpr(26)  # the tiles of a block are computed
NUMBERED = tl.constexpr(27)  # the tokens of this rank that go to other nodes have numbers
RETURNED = tl.constexpr(30)  # the peer has summed the results of its experts for a chunk of tokens
BACK = tl.constexpr(31)  # the sums of the peer's node for a chunk of my tokens have arrived
