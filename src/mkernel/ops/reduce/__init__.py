"""Matrix products summed over ranks: matmul_reduce_scatter (reduce_scatter/) and matmul_all_reduce (all_reduce/).

What they compute. Every rank holds a slice of k: a [m, k_local] and b [k_local, n]. Its product is a *partial* of the
sum over all ranks, [m, n]. `bias` and `residual` are added to the sum.

Who does what. Each rank launches one persistent kernel, in which all CTAs have the same role, `compute`; no CTA is
reserved for reducing or copying. A CTA multiplies a tile. Then it either pushes the tile to the rank that reduces it,
or reduces what the other ranks have pushed. A tile is assigned to the same CTA on every rank, so a CTA waits only for
CTAs with its own program id. Partials stay within a node; sums of whole nodes cross to other nodes, and so do the
finished tiles of matmul_all_reduce on three and more.

The main loop (loop.py). The loops over tiles and over k are fused into one, so Triton's pipeliner loads the first
k-steps of a tile while the previous tile is pushed or reduced. The signal of a pushed tile is sent after the next
tile's multiplication: a release waits until the stores have reached the peer, and by then they have. (The kernel for
small results, where each CTA has one tile, has no such loop.)

Accumulation and rounding. Sums are accumulated in fp32, in a fixed order of ranks, so the same inputs give the same
bits on every run. What travels is rounded to `reduce_dtype` (by default the dtype of a): a partial once, a node's sum
once more.

fp8. scaled_matmul_reduce_scatter and scaled_matmul_all_reduce run the same kernels: a partial is multiplied by its
scales before it travels (lang/scaling.py), so the other ranks need none of them.

Why buffers can be reused. Slots and signals are double buffered; the parity of the epoch selects the half. A rank's
result needs a partial from every rank. So a rank that begins epoch e knows that every rank has entered e-1, and thus
has left e-2, the last epoch to use this half: its slots have been read, everything that was sent from it has arrived,
and nothing of that parity is in flight. No entry signal is needed.

Where to read on: call.py (the host side of a call), operands.py (the kernel arguments), protocol.py (partials within a
node), lang/partials.py (how a tile is laid out in a slot), epilogue.py (bias and residual). Then an operator's package:
its docstring, order.py (which CTA computes which tile, and when), protocol.py (its workspace and signals), and its
kernels.
"""

from mkernel.ops.reduce.all_reduce import matmul_all_reduce
from mkernel.ops.reduce.all_reduce.scaled import scaled_matmul_all_reduce
from mkernel.ops.reduce.reduce_scatter import matmul_reduce_scatter
from mkernel.ops.reduce.reduce_scatter.scaled import scaled_matmul_reduce_scatter

__all__ = [
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "scaled_matmul_all_reduce",
    "scaled_matmul_reduce_scatter",
]
