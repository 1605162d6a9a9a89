"""Products that are summed over ranks: matmul_reduce_scatter (reduce_scatter/) and matmul_all_reduce (all_reduce/).

What they compute. Every rank holds a slice of the depth: a [m, k_local] and b [k_local, n]. Its product is a *partial*
of the sum over all ranks, [m, n], to which `bias` and `residual` are added.

Who does what. One persistent launch per rank, in which all CTAs do the same (role `compute`): none only adds or copies.
A CTA multiplies a tile. Then it pushes the tile to the rank that adds it, or adds what others have pushed. A tile has
the same CTA on every rank, so a CTA waits only for CTAs of its own number. Between nodes only the node's sum of a
tile crosses, once.

The loop (loop.py). Tiles and steps through k are one loop, so that Triton loads the first steps of a tile while the
tile before is pushed or added. The signal of a pushed tile is sent after the next multiplication: the release has to
wait until the stores have reached the peer, and by then they have. (Kernels for small results, with a tile or two for
each CTA, are written one step after the other.)

Sums and rounding. Accumulation is in fp32, in a fixed order of ranks, so the same inputs give the same bits on every
run. What travels is rounded to `reduce_dtype` (by default the dtype of a): a partial once, a node's sum once more.

Why buffers are safe. Slots and signals have two halves, used in turn by the epoch's parity. A rank's result needs a
partial of every rank. So a rank that begins epoch e knows that every rank has entered e-1, and has left e-2, the last
epoch that used this half: its slots have been read, what was sent from its memory has arrived, and nothing of that
parity is in flight. No entry signal is needed.

Where to read on: call.py (the host's side of a call), operands.py (what kernels are told), protocol.py (partials within
a node), partials.py (how a tile lies in a slot), epilogue.py (bias and residual); then an operator's package: its
docstring, order.py (who takes which tile), protocol.py (its workspace and signals), and its kernels.
"""

from mkernel.ops.reduce.all_reduce import matmul_all_reduce
from mkernel.ops.reduce.reduce_scatter import matmul_reduce_scatter

__all__ = ["matmul_all_reduce", "matmul_reduce_scatter"]
