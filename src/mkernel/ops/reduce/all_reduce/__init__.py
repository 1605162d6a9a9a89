"""matmul_all_reduce: y = the sum over all ranks of a @ b, on every rank, in one kernel per rank.

The docstring of mkernel.ops.reduce describes what it shares with matmul_reduce_scatter.

What it computes. Every rank holds a slice of k: a [m, k_local] and b [k_local, n]. The result, on every rank, is the
sum of all ranks' products [m, n], plus `bias` and `residual`. m and n are arbitrary.

Who does what. This is a two-shot all-reduce: partials go to the owner of their tile, finished tiles come back. Every
tile has one owner in each node, with the same local rank in all nodes, and is computed by the CTA with the same
program id on every rank. A CTA processes its tiles in blocks. A block has as many tiles as the node has ranks, and
each rank owns one of them:

- Tiles that other ranks own: the CTA pushes its partial to the owner. Every rank starts with the tile of the next
  rank, so at any time the ranks of a node push to different peers.
- The tile that this rank owns: the CTA adds the partials that its node has pushed. With one node this is the final
  sum. With two, it sends the node's sum to the owner in the other node and, one block later, adds both sums. With more,
  it sends the node's sum to one of the owners, the tile's home; there the sums of all nodes are added one block later,
  and the finished tile is sent back (home.py). Whoever adds the last sum also adds bias and residual, and stores the
  finished tile both in the result and in a slot that peers read.
- The other ranks' tiles of the previous block (with two nodes, of the block before that one; with more, of the block
  before that): the CTA reads the finished tiles from their owners' memory, and stores them in the result.

So pushing, reducing and reading back are spread over the whole launch, and the links are never left to only one of
them. A rank reads a finished tile from its owner instead of having it pushed, because the tile must pass through a CTA
on its way to the result in any case: pushing it would add a store and a load.

With one rank, few rows take the kernel in mkernel/ops/reduce/few_rows.py. Small results of several ranks in one node
take the kernel in sliced.py, which splits every tile into slices. Larger results in one node
take the kernel in multicast.py where multicast is available (see below), and on Hopper GPUs otherwise the one in
hopper.py. All others take two_level.py.

Signals. `partial`: a slot holds the partial of a rank of the node. `node_sum`: a slot holds the sum of another node.
`from_home`: this owner's slot holds the finished tile that its home has sent. `finished`: the owner's slot holds a
finished tile. See `layout` in protocol.py. All hold epochs and only grow.

Accumulation and rounding. The order is fixed. Within a node, the owner starts with its own partial, which is not
rounded, and adds those of the following ranks in cyclic order. Then it adds the sums of all nodes from node 0 on, its
own node's sum being rounded like the others. So the same inputs give the same bits on every run and on every rank. In
addition to the error of one product over all of k in fp32, the error is at most u * (the sum of the absolute values of
all partials and node sums) with u = eps/2 of reduce_dtype, plus eps/2 of the result's dtype times the result.

Why it cannot deadlock. Order all steps by (program id, block, step), where the steps of a block are: push, reduce
within the node, add the sums of the nodes, receive from the home, read finished tiles. Every wait is for an earlier
step of a CTA with the same program id: reducing within the node waits for pushes of the same block; adding the sums of
the nodes, for sums of the previous block; receiving, for a tile that its home finished in the previous block; reading,
for tiles finished or received in an earlier block. So the first waiting CTA in this order can always
proceed, even if the CTAs of a rank run one after the other. All ranks have the same number of CTAs, which they agree
on before the launch. The proxy drains a full request ring, and waits for no kernel. Every wait has a timeout
nevertheless.

What it costs. FLOPs: 2*m*n*k_local. NVLink: each rank writes (gpus-1)/gpus*m*n elements of reduce_dtype and reads as
many of the result's dtype. Network: each rank sends 2*(nodes-1)/nodes/gpus*m*n elements, half of them (two nodes: all)
of reduce_dtype, the others of the result's dtype. Workspace: 2*m*n*(gpus-1 + 2)/gpus elements of reduce_dtype (the 2
only with several nodes) and 2*m*n/gpus of the result's dtype.

Multicast. Symmetric memory provides a multicast object if the ranks are processes with one GPU each, in one node with
NVSwitch. Results that are not small then take the kernel in multicast.py, from 4 ranks on: a single store through the
switch delivers a finished tile to all ranks. Partials are still pushed and reduced by the owner in the order above, so
the bits do not change. The switch could reduce them too, which would move a third less data with 8 GPUs. But it
guarantees no order, and its sums have been seen to differ from call to call (NCCL issues 1497 and 2360). So the switch
reduces only with `fixed_order=False`, and never if torch is set to deterministic algorithms. The error then has one
more term, u * |the sum| with u up to eps, because the rounding mode of the switch is not documented. The docstrings of
multicast.py and multimem.py describe the traffic and the memory ordering.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from mkernel.ops import library
from mkernel.ops.reduce import registration
from mkernel.ops.reduce.all_reduce import call, plan
from mkernel.ops.reduce.all_reduce.call import TUNABLE, prepare
from mkernel.ops.reduce.call import Plan
from mkernel.runtime.collective import traceable
from mkernel.runtime.config import Config
from mkernel.runtime.errors import ArgumentError
from mkernel.runtime.group import current

__all__ = ["TUNABLE", "explain", "matmul_all_reduce", "prepare"]

registration.define_all_reduce(call.matmul_all_reduce)


@traceable(call.repeat)
def matmul_all_reduce(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    reduce_dtype: torch.dtype | None = None,
    group: Any = None,
    out: torch.Tensor | None = None,
    fixed_order: bool = True,
    config: Config | None = None,
) -> torch.Tensor:
    """Multiply `a` by `b` on every rank, and return the sum of all ranks' products on every rank.

    Differentiable in a, b, bias and residual. The result is the same on every rank, and so must be its gradient: the
    backward pass multiplies locally and moves nothing, as Megatron's row-parallel layers do.

    Args:
        a: [..., k_local], this rank's slice of k. Its other dimensions and the dtype must be the same on every rank;
            k_local may differ. Any strides.
        b: [k_local, n]. A transposed view (`w.t()`) is read without a copy.
        bias: [n], added to every row of the sum; the same on every rank.
        residual: [..., n], added to the sum; the same on every rank. It may be `out` itself.
        reduce_dtype: the dtype in which partials travel between ranks: torch.float32, or the dtype of a (default).
        group: the group to reduce over: a mk.Group, a ProcessGroup, a DeviceMesh of one dimension, or the name of a
            group; the current group by default.
        out: [..., n], the tensor to write the result to; must not overlap an input. Not with gradients.
        fixed_order: False lets the NVLink switch reduce the partials where it can (multicast, 4 ranks or more, bf16 and
            fp16), which moves less data. The switch guarantees no order of ranks: the bits are the same on every rank,
            but may differ from run to run, and 16-bit sums are rounded once more. `torch.use_deterministic_algorithms`
            overrides it. Must be the same on every rank.
        config: tiles and CTAs; None selects defaults. tile_m, tile_n and ctas must be the same on every rank.

    Returns:
        [..., n], the same bits on every rank. bf16, fp16 or fp32, accumulated in fp32 in a fixed order of ranks
        (unless `fixed_order` is False): the same inputs give the same bits on every run.

    Raises:
        ArgumentError: an argument is invalid; nothing has been launched.
        CommTimeout: a peer did not arrive within the group's timeout. On a GPU, where calls return before they are
            done, the next call on the group or `group.synchronize()` raises it.
    """
    a, b, bias, residual = library.autocast(a, b, bias, residual)
    if not library.are_operands(a, b, bias, residual, out):
        return _run(library.rows_to_refuse(a), b, bias, residual, reduce_dtype, group, out, fixed_order, config)
    if a.dim() == 2:
        return _run(a, b, bias, residual, reduce_dtype, group, out, fixed_order, config)
    shape = shape_of(a, b)
    if residual is not None and tuple(residual.shape) != shape:
        raise ArgumentError(f"residual has shape {tuple(residual.shape)}, but the result has {shape}")
    added = None if residual is None else library.as_rows(residual)
    matrix = library.out_as_rows(out, shape, 0)
    y = _run(library.as_rows(a), b, bias, added, reduce_dtype, group, matrix, fixed_order, config)
    return out if out is not None else y.view(shape)


def shape_of(a: torch.Tensor, b: torch.Tensor) -> tuple[int, ...]:
    """The shape of the result for an a that is not a matrix."""
    if a.dim() == 0:
        raise ArgumentError("a is a scalar; it must have at least one dimension, [..., k]")
    return (*a.shape[:-1], b.shape[-1])


def _run(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None,
    reduce_dtype: torch.dtype | None, group: Any, out: torch.Tensor | None, fixed_order: bool, config: Config | None,
) -> torch.Tensor:  # fmt: skip
    """A call on matrices."""
    library.refuse_transforms(a=a, b=b, bias=bias, residual=residual)
    if not library.needs_dispatcher(a, b, bias, residual, out):
        return call.matmul_all_reduce(
            a, b, bias=bias, residual=residual, reduce_dtype=reduce_dtype, group=group, out=out,
            fixed_order=fixed_order, config=config,
        )  # fmt: skip
    library.refuse_out_with_gradients(out, a, b, bias, residual)
    arguments = (a, b, bias, residual, library.name_of(group), reduce_dtype, fixed_order, library.encoded(config))
    if out is None:
        return torch.ops.mkernel.matmul_all_reduce(*arguments)
    torch.ops.mkernel.matmul_all_reduce_out(*arguments, out)
    return out


def explain(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    reduce_dtype: torch.dtype | None = None,
    group: Any = None,
    out: torch.Tensor | None = None,
    fixed_order: bool = True,
    config: Config | None = None,
) -> Plan:
    """The plan of a `matmul_all_reduce` call with these arguments."""
    group = current(group)
    if not library.are_operands(a, b, bias, residual, out):
        a = library.rows_to_refuse(a)
    elif a.dim() != 2:
        out = library.out_as_rows(out, shape_of(a, b), 0)
        residual = None if residual is None else library.as_rows(residual)
        a = library.as_rows(a)
    asked = call.sum_of(group, a, b, out, bias, residual, reduce_dtype, config, fixed_order)
    decided = plan.decide(group, asked)
    reasons = [*decided.reasons, TUNABLE.origin(config, asked.config)]
    if asked.fixed_order and not fixed_order:
        reasons.append("torch.use_deterministic_algorithms is on: partials are added in rank order")
    return replace(decided, reasons=tuple(reasons))
