"""Mixture of experts: tokens go to the ranks of their experts, are multiplied there, and results come back.

Three operators, each one persistent kernel per rank:

- `moe_dispatch_matmul` (dispatch_matmul.py) brings tokens to their experts and multiplies them: a grouped GEMM.
- `moe_combine` (combine.py) brings the experts' rows back: a weighted sum at the rank of the token.
- `moe_ffn` (ffn.py) is the whole layer in one launch: dispatch, both GEMMs of a SwiGLU FFN, combine.

The docstring of each says what it computes, who does what, why buffers are safe and why it cannot deadlock. What they
share, in the order in which a call comes by it; read it from top to bottom:

- sizes.py: how many tokens, experts and rows there are, and what the ranks agree on before they launch.
- arguments.py: what is refused. plan.py: tiles, chunks and CTAs of each role.
- protocol.py: what lies in the workspace, what is signalled, and who may write when.
- routing.py: ranks publish which token goes to which expert; each counts what it gets, inside the launch. `Tables` are
  what it finds out.
- schedule.py: the order in which blocks of rows are computed.
- dispatch.py: tokens are staged, sent and placed, one expert behind the other.
- grouped.py: the tile of the grouped GEMM.
- reduction.py: the three steps of a combine.

What a kernel is told comes in structures: `Routing`, `Dispatch`, `Gemm` (or `Gemms`) and `Combine` say what it reads
and writes, `Batch` has the numbers that follow the batch. Tensor descriptors are parameters of their own: Triton 3.6
compiles a descriptor inside of a structure, but can not launch it. And a structure with structures in it that have
constants, or strides of 1, which Triton makes constants of, must end in a constant of its own (`Gemms.HALF`): Triton
3.6 forgets the inner ones else, and they are None inside of loops.

Words. A *row* is a token on its way through one of its experts: a token with k experts makes k rows, in the order of
its *slots*. A *chunk* is a number of tokens of one rank that travel together. A *block* is a number of rows of one
expert, a tile high. The *counterpart* of a rank is the rank of the same place in another node. `away` is how many nodes
further on another node is: what a rank keeps for each of the others is in that order. The *capacity* of a rank is how
many rows it can take. The *status* says whether the routing of a call can be carried out; all ranks find the same.
"""

from mkernel.ops.moe.combine import moe_combine
from mkernel.ops.moe.dispatch_matmul import moe_dispatch_matmul
from mkernel.ops.moe.ffn import moe_ffn
from mkernel.ops.moe.handle import Handle

__all__ = ["Handle", "moe_combine", "moe_dispatch_matmul", "moe_ffn"]
