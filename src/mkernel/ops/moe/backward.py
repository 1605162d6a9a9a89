"""The backward passes of the mixture-of-experts operators, made of their forward passes with roles swapped.

What they compute. For row i, which is token t in slot s at expert e, the forward pass of the layer is

    gate, up = x[t] @ w_gate_up[e];  inner = silu(gate) * up;  y[i] = inner @ w_down[e];  out[t] += p[t, s] * y[i]

or another activation in the place of silu. With d for gradients, and D = dout[t] @ w_down[e].T, the backward pass is

    dp[t, s] = <D, inner>            dinner = p[t, s] * D            dw_down[e] = sum of (p * inner).T @ dout[t]
    dgate = dinner * up * silu'(gate)                  dup = dinner * silu(gate)
    dw_gate_up[e] = sum of x[t].T @ [dgate, dup]       dx[t] = sum of [dgate, dup] @ w_gate_up[e].T

The gradient of a weight thus needs no row of y: nobody keeps y, or computes it again. With biases b, which are added
to gate, up and y[i], dp[t, s] = <D, inner> + <dout[t], b_down[e]>, and the gradients of the biases are the sums of the
rows that the gradients of the matrices are made of: of p * dout[t], and of [dgate, dup].

Who does what. A short sequence of launches, each made by every rank. The launches that communicate are dispatches or
combines:

1. `redispatch`: sends dout and the weights p to the ranks of the experts, where blocks are multiplied by w_down.T as
   they arrive. The result is D (redispatch.py). The routing is that of the forward pass: no token is routed again.
2. Unless the forward pass has kept its activations: `redispatch` of x, multiplied by w_gate_up: gate and up again.
3. `moe_gated_backward`, local: dgate, dup, p * inner, and dp as a row [k] for every row (gradient_rows.py).
4. `moe_weight_grad`, local, twice: dw_down and dw_gate_up (weight_grad.py). `moe_bias_grad`, local, for each bias
   (bias_grad.py).
5. `moe_grouped_matmul`, local: [dgate, dup] @ w_gate_up.T (grouped_matmul.py).
6. `moe_combine` of these rows without weights: dx. And of the rows of dp: the gradient of topk_weights.

The other operators use some of these steps. moe_combine: a `redispatch` without a GEMM sends the rows of dout,
`moe_combine_backward` computes dy = p * dout and dp = <dout, y>, and the rows of dp are combined. moe_dispatch_matmul:
dx is a grouped GEMM and a combine, the gradient of the bias a `moe_bias_grad`, and dw a `moe_weight_grad` over the rows
of x. The forward pass has kept these rows, or a `redispatch` sends them again. moe_dispatch: dx is a combine without
weights.

What is signalled, why buffers are safe, and why it cannot deadlock. Each launch is complete in itself: it waits only
for launches of its own kind on other ranks, by the rules of dispatch_matmul.py and combine.py. Local launches wait for
nothing. Every rank makes the same launches in the same order, whichever gradients it needs, because ranks may have
frozen different matrices: in the place of those for gradients that it does not need, it launches empty kernels.
Launches of a rank run one after the other on its stream, so a launch reads what an earlier one wrote to the rank's own
memory without a signal. Workspaces are those of moe_dispatch_matmul and moe_combine.

What the forward pass keeps (`save`):

- "inputs": the tables of the routing, and what the caller has anyway: x, the weights, the matrices. The backward pass
  dispatches x again. In moe_ffn, this costs the traffic of another dispatch and 4*rows*hidden*inter FLOPs; in
  moe_dispatch_matmul, only the traffic.
- "activations": also the rows of x (capacity*hidden elements) and, in moe_ffn, gate and up (2*capacity*inter).

What it costs. 12*rows*hidden*inter FLOPs in moe_ffn, twice those of the forward pass, and 4 more if x was not kept. The
traffic of one dispatch (two if x was not kept) and of one combine, and that of one combine of rows of k fp32 numbers
(64 bytes or more). A token crosses to a node once in each direction, as in the forward pass. Local traffic that fused
kernels would not have: rows*inter elements of D and of p * inner, and 2*rows*inter of dgate and dup, are written and
read again, and dx's rows*hidden.

Accuracy. Products and sums over columns are in fp32. gate, up, D, dgate, dup, p * inner and rows of dx are rounded to
the type of x. The gradient of topk_weights is an fp32 sum that is not rounded before it arrives. The order of all sums
follows from the routing and the plan: the same inputs give the same bits.

What a single launch would gain. The transfers of step 1 overlap with its GEMM only, and those of step 6 with nothing;
steps 3 to 5 could hide them, as moe_ffn hides its combine under the second GEMM. A single launch would also save the
tails of six launches, where CTAs idle, and the local traffic of D. It needs the tiles of four GEMMs in one sequence,
and a combine that waits for tiles. Two of the GEMMs reduce over the rows of an expert, and can only start when all of
these have arrived. The result would be moe_ffn's kernel with another order of tiles. None of this has been measured.
"""

from __future__ import annotations

import torch

from mkernel.ops.moe import bias_grad, combine, gradient_rows, grouped_matmul, protocol, weight_grad
from mkernel.ops.moe.ffn import NO_BIASES
from mkernel.ops.moe.grouped import ROWS_BEFORE, Biases, empty_rows
from mkernel.ops.moe.handle import Handle
from mkernel.ops.moe.redispatch import redispatch
from mkernel.ops.moe.sizes import row_stride_of
from mkernel.runtime.collective import collective
from mkernel.runtime.group import Group

Needed = tuple[bool, ...]  # which gradients of matrices and biases this rank needs
Gradient = torch.Tensor | None


@collective
def moe_ffn_backward(
    dout: torch.Tensor,
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    handle: Handle,
    *,
    group: Group,
    activation: str = "silu",
    biases: Biases = NO_BIASES,
    kept: tuple[torch.Tensor, torch.Tensor] | None = None,
    needed: Needed = (True, True, False, False),
) -> tuple[torch.Tensor, torch.Tensor, Gradient, Gradient, Gradient, Gradient]:
    """The gradients of moe_ffn: of x, topk_weights, w_gate_up, w_down and the biases.

    Args:
        dout: the gradient of its result.
        handle: its routing.
        activation: of gate.
        kept: the rows of x, and gate and up, [capacity, ...], if the forward pass has kept its activations.
        needed: whether this rank needs the gradients of w_gate_up, w_down and the biases. Those of x and topk_weights
            are computed on all ranks.
    """
    biased = dict(b_gate_up=biases.gate_up is not None, b_down=biases.down is not None)
    _agree(group, "moe_ffn_backward", handle, x, inputs=kept is None, **biased)
    moved = redispatch(group, handle, dout, w=w_down.transpose(1, 2), weights=topk_weights)
    assert moved.y is not None
    assert moved.weights is not None
    if kept is None:
        again = redispatch(group, handle, x, w=w_gate_up, bias=biases.gate_up)
        assert again.y is not None
        rows, pre, dpre = again.rows, again.y, again.y
    else:
        rows, pre = kept
        dpre = empty_rows(group, pre.shape[0], pre.shape[1], pre.dtype, ROWS_BEFORE)
    context = _context(group, handle, x)
    launch, weight_rows = gradient_rows.gated_backward(
        group, context, handle, moved.weights, pre, moved.y, dpre, activation,
        None if biases.down is None else (biases.down, moved.rows),
    )  # fmt: skip
    group.launch(launch)
    gate_up = _weight_gradient(group, context, handle, rows, dpre, w_gate_up, needed[0])
    down = _weight_gradient(group, context, handle, moved.y, moved.rows, w_down, needed[1])
    b_gate_up = b_down = None
    if biases.gate_up is not None:
        b_gate_up = _bias_gradient(group, context, handle, dpre, None, needed[2])
    if biases.down is not None:
        b_down = _bias_gradient(group, context, handle, moved.rows, moved.weights, needed[3])
    dx = _token_gradient(group, context, handle, moved.placed, dpre, w_gate_up)
    return dx, _sum(group, handle, weight_rows).to(topk_weights.dtype), gate_up, down, b_gate_up, b_down


@collective
def moe_dispatch_matmul_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    w: torch.Tensor,
    handle: Handle,
    *,
    group: Group,
    kept: torch.Tensor | None = None,
    needed: Needed = (True, False),
    biased: bool = False,
    frozen: bool = False,
) -> tuple[torch.Tensor, Gradient, Gradient]:
    """The gradients of moe_dispatch_matmul: of x, w and the bias. dy: the gradient of its rows; what is beyond the sum
    of their counts is not used. kept: the rows of x, if the forward pass has kept them. needed: whether this rank needs
    the gradients of w and of the bias. biased: there is a bias. frozen: no rank needs the gradient of w, and so nobody
    the rows of x."""
    _agree(
        group, "moe_dispatch_matmul_backward", handle, x, inputs=kept is None, bias=biased or needed[1], frozen=frozen
    )
    rows = redispatch(group, handle, x).rows if kept is None and not frozen else kept
    # where descriptors can read it, for both products
    stride = row_stride_of(dy.shape[1], dy.dtype)
    gradient = dy.new_empty(ROWS_BEFORE + max(handle.capacity, 1), stride)[ROWS_BEFORE:, : dy.shape[1]]
    gradient[: len(dy)].copy_(dy)
    context = _context(group, handle, x)
    dw = None if rows is None else _weight_gradient(group, context, handle, rows, gradient, w, needed[0])
    dbias = _bias_gradient(group, context, handle, gradient, None, needed[1]) if biased or needed[1] else None
    return _token_gradient(group, context, handle, handle.tables.placed, gradient, w), dw, dbias


@collective
def moe_combine_backward(
    dout: torch.Tensor, y: torch.Tensor, topk_weights: torch.Tensor, handle: Handle, *, group: Group
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of moe_combine: of y and topk_weights. That of what is not a row is zero."""
    _agree(group, "moe_combine_backward", handle, y)
    moved = redispatch(group, handle, dout, weights=topk_weights)
    assert moved.weights is not None
    context = _context(group, handle, y)
    launch, dy, weight_rows = gradient_rows.combine_backward(group, context, handle, moved.weights, y, moved.rows)
    group.launch(launch)
    return dy, _sum(group, handle, weight_rows).to(topk_weights.dtype)


@collective
def moe_dispatch_backward(dy: torch.Tensor, handle: Handle, *, group: Group) -> torch.Tensor:
    """The gradient of moe_dispatch: of each token, the sum of the gradients of its rows."""
    return _sum(group, handle, dy)


def is_transposed(w: torch.Tensor) -> bool:
    """Whether matrices are laid out by columns, as a transposed view is. So is their gradient then."""
    return w.stride(1) == 1 and w.shape[2] > 1


def _agree(group: Group, what: str, handle: Handle, rows: torch.Tensor, **more: bool) -> None:
    sizes = handle.sizes
    group.agree(
        what, columns=rows.shape[1], dtype=rows.dtype, k=sizes.k, max_tokens=sizes.max_tokens,
        chunk_rows=sizes.chunk_rows, **more,
    )  # fmt: skip


def _context(group: Group, handle: Handle, rows: torch.Tensor) -> torch.Tensor:
    """A context for local kernels: that of the combine to come. Collective if its workspace must grow."""
    stride = row_stride_of(rows.shape[1], rows.dtype)
    return protocol.layout(combine.OP, handle.sizes, rows.dtype, stride, combines=True).workspace(group).context


def _weight_gradient(
    group: Group, context: torch.Tensor, handle: Handle, left: torch.Tensor, right: torch.Tensor, w: torch.Tensor,
    needed: bool,
) -> Gradient:  # fmt: skip
    """left.T @ right over the rows of each expert, laid out as w is; None if this rank does not need it."""
    if not needed:
        group.launch(gradient_rows.nothing(group, context, weight_grad.OP))
        return None
    transposed = is_transposed(w)
    if transposed:
        left, right = right, left
    launch, dw = weight_grad.prepare(group, context, handle, left, right)
    group.launch(launch)
    return dw.transpose(1, 2) if transposed else dw


def _bias_gradient(
    group: Group, context: torch.Tensor, handle: Handle, rows: torch.Tensor, weights: torch.Tensor | None,
    needed: bool,
) -> Gradient:  # fmt: skip
    """The sums of the rows of each expert, times their weights if there are any; None if this rank does not need it."""
    if not needed:
        group.launch(gradient_rows.nothing(group, context, bias_grad.OP))
        return None
    launch, sums = bias_grad.prepare(group, context, handle, rows, weights)
    group.launch(launch)
    return sums


def _token_gradient(
    group: Group, context: torch.Tensor, handle: Handle, placed: torch.Tensor, rows: torch.Tensor, w: torch.Tensor
) -> torch.Tensor:
    """rows @ w.T, summed over the rows of each token, on the ranks of the tokens."""
    launch, products = grouped_matmul.prepare(group, context, handle, placed, rows, w.transpose(1, 2))
    group.launch(launch)
    return _sum(group, handle, products)


def _sum(group: Group, handle: Handle, rows: torch.Tensor) -> torch.Tensor:
    """The sum of the rows of each token, on the ranks of the tokens."""
    ones = rows.new_ones(handle.sizes.tokens, handle.sizes.k, dtype=torch.float32)
    return combine.moe_combine(rows[: handle.capacity], handle, ones, group=group)
