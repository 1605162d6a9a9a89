"""matmul_reduce_scatter: y = this rank's rows of the sum over all ranks of a @ b, in one kernel per rank.

The docstring of mkernel.ops.reduce describes what it shares with matmul_all_reduce.

What it computes. Every rank holds a slice of k: a [m, k_local] and b [k_local, n]. The sum of all ranks' products is
[m, n]. Rank r gets its rows r*m/world to (r+1)*m/world, plus `bias` and `residual`.

Who does what. Tile t of every rank's rows is computed by the same CTA on every rank. A CTA processes three kinds of
tiles, in this order:

- Rows of other nodes, tile by tile. The CTA first computes the partials whose rows belong to other local ranks, and
  pushes each to the rank of its own node with that local rank. Then it computes the partial whose rows belong to its
  own local rank, adds those that its node has pushed, stores the node's sum in a send slot, and posts a request to
  write it to the owner. So each node sends one sum per tile, once, and the network starts early. With four or more
  nodes, it takes the nodes one by one, and reduces for a node behind the pushes for the next one: otherwise the sums
  for all nodes would come in one burst, and the network would idle until then.
- Rows of the other ranks of its node: the CTA pushes the partials to them, starting with the next rank, so at any time
  the ranks of a node push to different peers.
- The rank's own rows, last: the CTA adds the partials of its node and the sums of the other nodes, then bias and
  residual, and stores the result.

Few rows in one node take the kernel in mkernel/ops/reduce/few_rows.py, whose tiles cover the rows of all ranks.

How tiles are assigned to CTAs. The tiles of each rank's rows are assigned round robin. If they do not divide evenly,
the last round is incomplete. Its tiles go to different CTAs for each rank's rows if there are enough CTAs
(`deal_tiles`); otherwise the first CTAs get one more tile for each rank.

Signals. `partial`: a slot holds the partial of a rank of the node. `node_sum`: a slot holds the sum of another node.
See `layout` in protocol.py. There is one signal per tile and source; it holds the epoch and only grows.

Accumulation and rounding. The order is fixed: the rank's own partial, which is never rounded; then those of the
following ranks of its node, in cyclic order; then the sums of the following nodes, in cyclic order. So the same inputs
give the same bits on every run. In addition to the error of one product over all of k in fp32, the error is at most u
* (the sum of the absolute values of all partials and node sums that travel) with u = eps/2 of reduce_dtype, plus eps/2
of the result's dtype times the result.

Why it cannot deadlock. Pushing waits for nothing. Order all steps by (program id, position in the CTA's sequence). A
node's sum needs partials from CTAs with the same or a lower program id; those with the same id push them earlier in
their sequence. The rank's own rows need such partials, and node sums, which also come earlier in the sequence. So the
first waiting CTA in this order can always proceed, even if the CTAs of a rank run one after the other. This holds
because all ranks have the same number of CTAs. With other numbers, a CTA could wait for a leftover tile, which it takes
first, from a CTA that waits for a later tile of its own. The proxy drains a full request ring, and waits for no kernel.
Every wait has a timeout nevertheless.

What it costs. FLOPs: 2*m*n*k_local. Each rank writes (gpus-1)*nodes*m/world*n elements over NVLink and
(nodes-1)*m/world*n over the network, and reads as many. Workspace: 2*m/world*n*(nodes*(gpus-1) + 2*(nodes-1)) elements
of reduce_dtype, with m/world and n rounded up to whole tiles.

Rejected alternatives. CTAs that only reduce, pulling from the peers (a prototype reached a floor fraction of 0.66 with
4 ranks): they are idle at the beginning, and the others at the end. Reduction by atomics: different bits on every run.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from mkernel.ops import library
from mkernel.ops.reduce import registration
from mkernel.ops.reduce.call import Plan, call_of
from mkernel.ops.reduce.reduce_scatter import call, plan
from mkernel.ops.reduce.reduce_scatter.call import TUNABLE, prepare
from mkernel.runtime.collective import traceable
from mkernel.runtime.config import Config
from mkernel.runtime.errors import ArgumentError
from mkernel.runtime.group import current

__all__ = ["TUNABLE", "explain", "matmul_reduce_scatter", "prepare"]

registration.define_reduce_scatter(call.matmul_reduce_scatter)


@traceable(call.repeat)
def matmul_reduce_scatter(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    reduce_dtype: torch.dtype | None = None,
    group: Any = None,
    out: torch.Tensor | None = None,
    scatter_dim: int = 0,
    config: Config | None = None,
) -> torch.Tensor:
    """Multiply `a` by `b` on every rank, add all ranks' products, and return this rank's rows of the sum.

    Differentiable in a, b, bias and residual: one fused all-gather + GEMM gathers the gradient of the result for all
    of them.

    Args:
        a: [..., k_local], this rank's slice of k. Its other dimensions and the dtype must be the same on every rank;
            k_local may differ. Any strides.
        b: [k_local, n]. A transposed view (`w.t()`) is read without a copy.
        bias: [n], added to every row of the sum; the same on every rank. Its gradient is that of all ranks' rows, so
            it is the same on every rank, too.
        residual: added to this rank's rows of the sum, in the shape of the result. It may be `out` itself.
        reduce_dtype: the dtype in which partials travel between ranks: torch.float32, or the dtype of a (default).
        group: the group to reduce over: a mk.Group, a ProcessGroup, a DeviceMesh of one dimension, or the name of a
            group; the current group by default.
        out: the tensor to write the result to; must not overlap an input. Not with gradients.
        scatter_dim: the dimension of the sum that is divided among the ranks; not the last one. Its size must be
            divisible by the number of ranks.
        config: tiles and CTAs; None selects defaults. tile_m, tile_n and ctas must be the same on every rank.

    Returns:
        [..., n], where scatter_dim is divided by the number of ranks: rank r has the r-th part of the sum. bf16, fp16
        or fp32, accumulated in fp32 in a fixed order of ranks: the same inputs give the same bits.

    Raises:
        ArgumentError: an argument is invalid; nothing has been launched.
        CommTimeout: a peer did not arrive within the group's timeout. On a GPU, where calls return before they are
            done, the next call on the group or `group.synchronize()` raises it.
    """
    a, b, bias, residual = library.autocast(a, b, bias, residual)
    if not library.are_operands(a, b, bias, residual, out):
        return _run(library.rows_to_refuse(a), b, bias, residual, reduce_dtype, group, out, config)
    if a.dim() == 2 and scatter_dim == 0:
        return _run(a, b, bias, residual, reduce_dtype, group, out, config)
    dim, shape = check_scatter(a, b, scatter_dim, group)
    if residual is not None and tuple(residual.shape) != shape:
        raise ArgumentError(f"residual has shape {tuple(residual.shape)}, but the result has {shape}")
    added = None if residual is None else library.as_rows(residual, dim)
    matrix = library.out_as_rows(out, shape, dim)
    y = _run(library.as_rows(a, dim), b, bias, added, reduce_dtype, group, matrix, config)
    return out if out is not None else library.from_rows(y, a.shape[:-1], dim, shape[dim])


def check_scatter(a: torch.Tensor, b: torch.Tensor, scatter_dim: int, group: Any) -> tuple[int, tuple[int, ...]]:
    """The dimension that is divided, counted from 0, and the shape of the result."""
    dim = library.check_dim("scatter_dim", scatter_dim, a, "a")
    size = library.size_of(group)
    if a.shape[dim] % size:
        raise ArgumentError(
            f"a has shape {tuple(a.shape)}, whose dimension {dim} cannot be divided evenly among {size} ranks: pad it "
            f"to {-(-a.shape[dim] // size) * size}, or use matmul_all_reduce"
        )
    return dim, (*a.shape[:dim], a.shape[dim] // size, *a.shape[dim + 1 : -1], b.shape[-1])


def _run(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None,
    reduce_dtype: torch.dtype | None, group: Any, out: torch.Tensor | None, config: Config | None,
) -> torch.Tensor:  # fmt: skip
    """A call on matrices."""
    library.refuse_transforms(a=a, b=b, bias=bias, residual=residual)
    if not library.needs_dispatcher(a, b, bias, residual, out):
        return call.matmul_reduce_scatter(
            a, b, bias=bias, residual=residual, reduce_dtype=reduce_dtype, group=group, out=out, config=config
        )
    library.refuse_out_with_gradients(out, a, b, bias, residual)
    arguments = (a, b, bias, residual, library.name_of(group), reduce_dtype, library.encoded(config))
    if out is None:
        return torch.ops.mkernel.matmul_reduce_scatter(*arguments)
    torch.ops.mkernel.matmul_reduce_scatter_out(*arguments, out)
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
    scatter_dim: int = 0,
    config: Config | None = None,
) -> Plan:
    """The plan of a `matmul_reduce_scatter` call with these arguments."""
    group = current(group)
    if not library.are_operands(a, b, bias, residual, out):
        a = library.rows_to_refuse(a)
    elif a.dim() != 2 or scatter_dim != 0:
        dim, shape = check_scatter(a, b, scatter_dim, group)
        a, out = library.as_rows(a, dim), library.out_as_rows(out, shape, dim)
        residual = None if residual is None else library.as_rows(residual, dim)
    asked = call_of(
        TUNABLE, group, a, b, out=out, bias=bias, residual=residual, reduce_dtype=reduce_dtype, config=config,
        scatter=True,
    )  # fmt: skip
    decided = plan.decide(group, asked)
    return replace(decided, reasons=(*decided.reasons, TUNABLE.origin(config, asked.config)))
