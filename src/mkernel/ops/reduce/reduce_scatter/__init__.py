"""matmul_reduce_scatter: y = this rank's rows of the sum over all ranks of a @ b, in one kernel per rank.

The docstring of mkernel.ops.reduce describes what it shares with matmul_all_reduce.

What it computes. Every rank holds a slice of k: a [m, k_local] and b [k_local, n]. The sum of all ranks' products is
[m, n]. Rank r gets its rows r*m/world to (r+1)*m/world, plus `bias` and `residual`.

Who does what. Tile t of every rank's rows is computed by the same CTA on every rank. A CTA processes three kinds of
tiles, in this order:

- Rows of other nodes, tile by tile. The CTA first computes the partials whose rows belong to other local ranks, and
  pushes each to the rank of its own node with that local rank. Then it computes the partial whose rows belong to its
  own local rank, adds those that its node has pushed, stores the node's sum in a send slot, and posts a request to
  write it to the owner. So each node sends one sum per tile, once, and the network starts early.
- Rows of the other ranks of its node: the CTA pushes the partials to them, starting with the next rank, so at any time
  the ranks of a node push to different peers.
- The rank's own rows, last: the CTA adds the partials of its node and the sums of the other nodes, then bias and
  residual, and stores the result.

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
first waiting CTA in this order can always proceed, even if the CTAs of a rank run one after the other. This holds if
all ranks have the same number of CTAs. If they do not, it is enough that all CTAs are resident, which the launch
checks. The proxy drains a full request ring, and waits for no kernel. Every wait has a timeout nevertheless.

What it costs. FLOPs: 2*m*n*k_local. Each rank writes (gpus-1)*nodes*m/world*n elements over NVLink and
(nodes-1)*m/world*n over the network, and reads as many. Workspace: 2*m/world*n*(nodes*(gpus-1) + 2*(nodes-1)) elements
of reduce_dtype, with m/world and n rounded up to whole tiles.

Rejected alternatives. CTAs that only reduce, pulling from the peers (a prototype reached a floor fraction of 0.66 with
4 ranks): they are idle at the beginning, and the others at the end. Reduction by atomics: different bits on every run.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from mkernel.ops.reduce.call import Plan, Sum, call_of, tuned
from mkernel.ops.reduce.reduce_scatter import kernel, plan, protocol
from mkernel.ops.reduce.reduce_scatter.plan import OP
from mkernel.runtime.config import Config
from mkernel.runtime.group import Group, collective, current
from mkernel.runtime.tuned import Tunable
from mkernel.runtime.world import Launch

TUNABLE = Tunable(OP, agreed=("m", "n"), own=("k",), shared=("tile_m", "tile_n", "ctas"))


@collective
def matmul_reduce_scatter(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    reduce_dtype: torch.dtype | None = None,
    group: Group | None = None,
    out: torch.Tensor | None = None,
    config: Config | None = None,
) -> torch.Tensor:
    """Multiply `a` by `b` on every rank, add all ranks' products, and return this rank's rows of the sum.

    Args:
        a: [m, k_local], this rank's slice of k. m and the dtype must be the same on every rank, and m divisible by the
            number of ranks; k_local may differ. Any strides.
        b: [k_local, n]. A transposed view (`w.t()`) is read without a copy.
        bias: [n], added to every row of the sum; the same on every rank.
        residual: [m/world, n], added to this rank's rows of the sum. It may be `out` itself.
        reduce_dtype: the dtype in which partials travel between ranks: torch.float32, or the dtype of a (default).
        group: the group to reduce over; the current one by default.
        out: [m/world, n], the tensor to write the result to; must not overlap an input.
        config: tiles and CTAs; None selects defaults. tile_m and tile_n must be the same on every rank.

    Returns:
        [m/world, n]: rank r has rows r*m/world to (r+1)*m/world of the sum. bf16, fp16 or fp32, accumulated
        in fp32 in a fixed order of ranks: the same inputs give the same bits.

    Raises:
        ArgumentError: an argument is invalid; nothing has been launched.
        CommTimeout: a peer did not arrive within the group's timeout. On a GPU, where calls return before they are
            done, the next call on the group or `group.synchronize()` raises it.
    """
    assert group is not None
    call = call_of(
        TUNABLE, group, a, b, out=out, bias=bias, residual=residual, reduce_dtype=reduce_dtype, config=config,
        scatter=True,
    )  # fmt: skip
    rows, n = call.out.shape
    tile_m, tile_n = plan.tile_of(group, rows, n, a.dtype, call.config)
    group.agree(OP, m=a.shape[0], n=n, dtype=a.dtype, reduce_dtype=call.wire_dtype, tile_m=tile_m, tile_n=tile_n)
    if call.out.numel():
        group.launch(prepare(group, call))
    else:
        group.confirm()
    return call.out


def prepare(group: Group, call: Sum) -> Launch:
    """The launch of a call whose arguments have been checked. Collective if the workspace must grow."""
    call = tuned(TUNABLE, group, call)
    decided = group.planned((OP, call.key), lambda: plan.decide(group, call))
    memory = protocol.layout(group, decided, call.wire_dtype)
    if decided.hopper:
        from mkernel.ops.reduce.reduce_scatter import hopper  # import Gluon only where it is used

        return hopper.launch(group, decided, memory, call)
    return kernel.launch(group, decided, memory, call)


def explain(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    reduce_dtype: torch.dtype | None = None,
    group: Group | None = None,
    out: torch.Tensor | None = None,
    config: Config | None = None,
) -> Plan:
    """The plan of a `matmul_reduce_scatter` call with these arguments."""
    group = current(group)
    call = call_of(
        TUNABLE, group, a, b, out=out, bias=bias, residual=residual, reduce_dtype=reduce_dtype, config=config,
        scatter=True,
    )  # fmt: skip
    decided = plan.decide(group, call)
    return replace(decided, reasons=(*decided.reasons, TUNABLE.origin(config, call.config)))
