"""Expert parallelism: dispatch tokens to the ranks of their experts, run the experts, combine the results.

Six operators, each one persistent kernel per rank:

- `moe_dispatch_matmul` (dispatch_matmul.py) sends tokens to the ranks of their experts and multiplies them there with a
  grouped GEMM.
- `moe_dispatch_scaled_matmul` (scaled.py) does so in fp8.
- `moe_dispatch` (dispatch_rows.py) only sends them.
- `moe_combine` (combine.py) returns the experts' rows to the ranks of their tokens, as weighted sums.
- `moe_ffn` (ffn.py) runs the whole layer in one launch: dispatch, both GEMMs of a SwiGLU FFN, combine.
- `scaled_moe_ffn` (scaled_ffn.py) does so in fp8.

The docstring of each of these modules is its design record: what it computes, which CTA does what, why buffers can be
reused, why it cannot deadlock, and what it costs. backward.py is that of the gradients, with scaled_registration.py for
operators in fp8. The operators share the modules below, listed in the order in which a call uses them:

- sizes.py: numbers of tokens, experts and rows, and what the ranks agree on before they launch.
- arguments.py: checks of arguments. plan.py: tiles, chunks and CTAs of each role.
- handle.py: what a dispatch returns beside the rows, and a combine and the gradients need.
- protocol.py: the arrays in the workspace, the signals (kinds.py has their numbers), and when a rank may write to a
  buffer.
- routing.py: every rank publishes which token goes to which expert. Inside the launch, every rank counts the rows it
  receives and stores what it derives in `Tables`.
- schedule.py: the order in which blocks of rows are computed. tile_order.py: the order of their tiles.
- dispatch.py: stages tokens, sends them, and places them as rows, grouped by expert.
- packing.py: tokens in fp8 with their scales, as one row of words.
- grouped.py: a tile of the grouped GEMM.
- reduction.py: the three steps of a combine. pieces.py: the combine of moe_ffn.

Only backward passes use these: redispatch.py, which moves rows with the routing of an earlier dispatch;
grouped_matmul.py, a grouped GEMM of rows in place; weight_grad.py, one that reduces over the rows of an expert;
bias_grad.py, sums of them; and gradient_rows.py, what is done row by row. training.py has the forward passes that keep
what backward passes need; layer.py and halves.py have the public functions, and registration.py and
scaled_registration.py have the operators of torch.library.

Kernels take structures. `Routing`, `Dispatch`, `Gemm` (or `Gemms`) and `Combine` say what a kernel reads and writes;
`Batch` holds the numbers that vary with the batch. Three limitations of Triton 3.6 shape them:

- Tensor descriptors are parameters of their own. Triton compiles a descriptor inside a structure, but cannot launch the
  kernel.
- A structure must end in a constant of its own (such as `Gemms.HALF`) if structures nested in it contain constants, or
  strides of 1, which Triton turns into constants. Otherwise Triton loses the nested constants: inside loops they are
  None.
- A device function cannot return such a structure. So every kernel builds its `Comm`, and decodes its `Batch`, itself.

Terms. A *row* is a token on its way through one of its experts. A token with k experts has k *slots*, the columns of
topk_ids, and makes one row per slot. A *chunk* is a number of consecutive tokens of one rank that are transferred and
signalled together. A *block* is up to a tile's height of rows of one expert. The *counterpart* of a rank is the rank
with the same local rank in another node. `away` says which other node: the one that many nodes further on, modulo the
number of nodes. Buffers with an area per other node are in that order. The *capacity* of a rank is the number of rows
it can receive. The *status* says whether the routing of a call can be carried out; all ranks compute the same status.
"""

from mkernel.ops.moe.halves import moe_combine, moe_dispatch, moe_dispatch_matmul
from mkernel.ops.moe.handle import Handle
from mkernel.ops.moe.layer import moe_ffn
from mkernel.ops.moe.scaled import moe_dispatch_scaled_matmul
from mkernel.ops.moe.scaled_ffn import scaled_moe_ffn

__all__ = [
    "Handle",
    "moe_combine",
    "moe_dispatch",
    "moe_dispatch_matmul",
    "moe_dispatch_scaled_matmul",
    "moe_ffn",
    "scaled_moe_ffn",
]
