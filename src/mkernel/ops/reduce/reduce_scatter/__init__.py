"""matmul_reduce_scatter: y = the sum over all ranks of a @ b, each rank keeping its rows, in one kernel per rank.

What it has in common with matmul_all_reduce is in the docstring of mkernel.ops.reduce.

What it computes. Every rank holds a slice of the depth: a [m, k_local] and b [k_local, n]. The sum of
all ranks' products is [m, n]; rank r gets rows r*m/world ... (r+1)*m/world of it, plus `bias` and
`residual`.

Who does what. Tile t of every rank's rows is computed by the same CTA on every rank. A CTA has three kinds of
tiles, taken in this order:

- rows of other nodes, tile after tile: first the parts of the rows whose local index is another rank of
  the node: pushed to that rank. Then the part of the rows with its own local index: it adds what the
  other ranks of its node pushed, stores the node's sum in a send slot, and asks the network to write it
  to the owner. So one sum of a node crosses the network, once, and the network starts early.
- rows of the other ranks of its node: pushed to them, beginning with the rank after itself, so that at
  any time the ranks of a node push to different ranks.
- its own rows, last: it adds what the ranks of its node pushed and what the other nodes sent, then bias
  and residual, and stores the result.

How tiles are dealt. The tiles of one rank's rows go round the CTAs. What is left for the last round is
dealt to other CTAs for every kind of tile, if there are enough (`deal_tiles`); else the CTAs at the front
would get one tile more for each rank.

What is signalled. `partial`: a slot holds what a rank of the node has pushed; `node_sum`: it holds the sum of another
node (`layout` in protocol.py). One signal a tile and source; it holds the epoch and only grows.

Sums and rounding. The owner's own part is never rounded. The order is
fixed: first the rank's own part, then those of the ranks behind it in its node, in turn, then the nodes
behind its own, in turn. So the same inputs give the same bits on every run. The error, beside that of
one product with all of k in fp32, is at most u * (the sum over all parts and node sums that travelled of
their absolute values), u = eps/2 of reduce_dtype, and eps/2 of the result's dtype times the result.

Why it cannot deadlock. Pushing waits for nothing. Order what waits by (program id, place in the CTA's
sequence): a sum of the network's needs parts that CTAs of the same or a lower program id push, those of
the same id earlier in the same sequence; own rows need such parts, and node sums, which come earlier in
the sequence, too. So of all waiting CTAs the first in this order can always go on, even if a rank's CTAs
run one after the other. That is so if all ranks have the same number of CTAs; if not, it is enough that
all are resident, which the launch checks. A full request ring is emptied by the proxy, which waits for no
kernel. Waits have a timeout all the same.

What it costs. FLOPs 2*m*n*k_local. Each rank writes (gpus-1)*nodes*m/world*n elements over NVLink and
(nodes-1)*m/world*n over the network, and reads as many. Workspace: 2*m/world*n*(nodes*(gpus-1) +
2*(nodes-1)) elements of reduce_dtype, m/world and n rounded up to whole tiles.

Ways that lost. CTAs that only reduce, pulling from the peers (a prototype: floor fraction 0.66 with 4
ranks): they are idle at first, the others at the end. Adding with atomics: other bits on every run.
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
    """Multiply `a` by `b` on every rank, add all ranks' products, and keep this rank's rows of the sum.

    Args:
        a: [m, k_local], this rank's slice of the depth; m and the dtype are the same on every rank and m is
            divisible by their number; k_local may differ. Any strides.
        b: [k_local, n]. A transposed view (`w.t()`) is read as it is.
        bias: [n], added to every row of the sum; the same on every rank.
        residual: [m/world, n], added to this rank's rows of the sum. It may be `out` itself.
        reduce_dtype: of what travels between ranks: torch.float32 or the dtype of a, which is the default.
        group: the group to reduce over; the current one by default.
        out: [m/world, n], where to put the result; must not overlap an input.
        config: tiles and CTAs; None takes good defaults. tile_m and tile_n are the same on every rank.

    Returns:
        [m/world, n]: rank r has rows r*m/world to (r+1)*m/world of the sum. bf16, fp16 or fp32, accumulated
        in fp32 in a fixed order of ranks: the same inputs give the same bits.

    Raises:
        ArgumentError: before anything is launched.
        CommTimeout: a peer did not come within the group's timeout. On a GPU, where calls return
            before they are done, the next call on the group or `group.synchronize()` raises it.
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
    """The launch of a call whose arguments are in order. Collective when the workspace must grow."""
    call = tuned(TUNABLE, group, call)
    decided = group.planned((OP, call.key), lambda: plan.decide(group, call))
    memory = protocol.layout(group, decided, call.wire_dtype)
    if decided.hopper:
        from mkernel.ops.reduce.reduce_scatter import hopper  # Gluon is imported only where it runs

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
    """The plan that `matmul_reduce_scatter` with these arguments would carry out."""
    group = current(group)
    call = call_of(
        TUNABLE, group, a, b, out=out, bias=bias, residual=residual, reduce_dtype=reduce_dtype, config=config,
        scatter=True,
    )  # fmt: skip
    decided = plan.decide(group, call)
    return replace(decided, reasons=(*decided.reasons, TUNABLE.origin(config, call.config)))
