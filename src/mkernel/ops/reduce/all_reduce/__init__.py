"""matmul_all_reduce: y = the sum over all ranks of a @ b, on every rank, in one kernel per rank.

What it has in common with matmul_reduce_scatter is in the docstring of mkernel.ops.reduce.

What it computes. Every rank holds a slice of the depth: a [m, k_local] and b [k_local, n]. The result, on
every rank, is the sum of all ranks' products [m, n], plus `bias` and `residual`. m and n are arbitrary.

Who does what. Every tile
has an owner in each node, the same local rank everywhere, and is computed by the same CTA on every rank. A
CTA takes its tiles in blocks of as many as the node has ranks, of which each rank owns one:

- tiles that others own: pushed to the owner, the rank behind itself first, so that the ranks of a node
  push to different ranks at any time;
- its own tile: it adds what the node has pushed. With one node that is the sum. With several, it sends the
  node's sum to the owners in the other nodes, and adds the sums of all nodes when they are here, one block
  later. Then bias and residual; the finished tile goes into the result, and into a slot of its own;
- the finished tiles of the block before (with several nodes: of the block before that), which the other
  ranks of the node own: it reads them from their memory, and stores them into the result.

So pushing, summing up and reading back are spread over the whole launch, and the links are never left to one
of them. A finished tile is read from its owner, rather than pushed to everybody, because it has to go
through a CTA on its way into the result anyhow: pushed, it would be written and read once more.

Results of few tiles in one node take the kernel in sliced.py, which cuts tiles into slices.
Where there is multicast, see below, larger ones in one node take another one, too.

What is signalled. `partial`: a slot holds what a rank of the node has pushed; `node_sum`: it holds the sum of another
node; `finished`: the owner has a finished tile in its slot (`layout` in protocol.py). All hold epochs and only grow.

Sums and rounding. The order is fixed: within the node the owner's own part, which
is not rounded, then those of the ranks behind it, in turn; then the nodes' sums, from node 0 on, the own
one rounded like the others. So the same inputs
give the same bits on every run, and on every rank. The error, beside that of one product with all of k in
fp32, is at most u * (the sum over all parts and node sums of their absolute values), u = eps/2 of
reduce_dtype, and eps/2 of the result's dtype times the result.

Why it cannot deadlock. Order what is waited for by (program id, block, step), the steps of a block being:
push, sum up the node, add the nodes, read what is finished. Every wait is for a step of a CTA with the
same program id that comes strictly before: the node's sum needs what was pushed in the same block; adding
the nodes, sums of the block before; reading, tiles that were finished in an earlier block. So of all
waiting CTAs the first in this order can always go on, even if a rank's CTAs run one after the other. All
ranks have the same number of CTAs (they agree on it). A full request ring is emptied by the proxy, which
waits for no kernel. Waits have a timeout all the same.

What it costs. FLOPs 2*m*n*k_local. Over NVLink each rank writes (gpus-1)/gpus*m*n elements of reduce_dtype
and reads as many of the result's. Over the network it sends
(nodes-1)/gpus*m*n. Workspace: 2*m*n*(gpus-1 + nodes)/gpus elements of reduce_dtype (nodes only if there are
several) and 2*m*n/gpus of the result's.

Multicast. Where symmetric memory has a multicast object (ranks on GPUs of their own in one node, as processes, with
NVSwitch), results that are not small take the kernel in multicast.py from 4 ranks on, by
themselves: one store through the switch hands a finished tile to all ranks. The parts are still pushed, and added by
their owner in the order above, so the bits are the same as without. The switch could add them as well, and a third
less would move with 8 GPUs; but it promises no order, and different bits were seen from call to call (NCCL's issues
1497 and 2360). So it adds only if the caller says `fixed_order=False`, and never where torch is asked for deterministic
algorithms. The error then has one more term, u * |the sum|, with u up to eps: how the switch rounds is not told.
What moves, and how accesses are ordered, is told there and in multimem.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from mkernel.lang.context import Ranks
from mkernel.ops.reduce import operands
from mkernel.ops.reduce.all_reduce import plan, protocol
from mkernel.ops.reduce.all_reduce.plan import OP
from mkernel.ops.reduce.call import Plan, Sum, call_of, tuned
from mkernel.ops.reduce.operands import INPUTS, RESULTS, variant_of
from mkernel.runtime.config import Config
from mkernel.runtime.errors import ArgumentError
from mkernel.runtime.group import Group, collective, current
from mkernel.runtime.operands import constants
from mkernel.runtime.tuned import Tunable
from mkernel.runtime.world import Launch

TUNABLE = Tunable(OP, agreed=("m", "n"), own=("k",), shared=("tile_m", "tile_n", "ctas"))


@collective
def matmul_all_reduce(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    reduce_dtype: torch.dtype | None = None,
    group: Group | None = None,
    out: torch.Tensor | None = None,
    fixed_order: bool = True,
    config: Config | None = None,
) -> torch.Tensor:
    """Multiply `a` by `b` on every rank, and add all ranks' products, on every rank.

    Args:
        a: [m, k_local], this rank's slice of the depth; m and the dtype are the same on every rank; k_local
            may differ. Any strides.
        b: [k_local, n]. A transposed view (`w.t()`) is read as it is.
        bias: [n], added to every row of the sum; the same on every rank.
        residual: [m, n], added to the sum; the same on every rank. It may be `out` itself.
        reduce_dtype: of what travels between ranks: torch.float32 or the dtype of a, which is the default.
        group: the group to reduce over; the current one by default.
        out: [m, n], where to put the result; must not overlap an input.
        fixed_order: False lets the NVLink switch add the parts where it can (multicast, 4 ranks or more, bf16 and
            fp16), which moves less. The switch promises no order of ranks: bits are the same on every rank, but may
            differ from run to run, and 16-bit sums are rounded once more. `torch.use_deterministic_algorithms`
            overrides it. The same on every rank.
        config: tiles and CTAs; None takes good defaults. tile_m, tile_n and ctas are the same on every rank.

    Returns:
        [m, n], the same bits on every rank. bf16, fp16 or fp32, accumulated in fp32 in a fixed order of ranks
        (unless `fixed_order` is False): the same inputs give the same bits on every run.

    Raises:
        ArgumentError: before anything is launched.
        CommTimeout: a peer did not come within the group's timeout. On a GPU, where calls return
            before they are done, the next call on the group or `group.synchronize()` raises it.
    """
    assert group is not None
    call = _call_of(group, a, b, out, bias, residual, reduce_dtype, config, fixed_order)
    m, n = call.out.shape
    tile_m, tile_n, ctas = plan.cut(group, m, n, a.dtype, call.config)
    group.agree(
        OP, m=m, n=n, dtype=a.dtype, reduce_dtype=call.wire_dtype, bias=bias is not None,
        residual=residual is not None, tile_m=tile_m, tile_n=tile_n, ctas=ctas, fixed_order=call.fixed_order,
    )  # fmt: skip
    if call.out.numel():
        group.launch(prepare(group, call))
    else:
        group.confirm()
    return call.out


def _call_of(
    group: Group, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, bias: torch.Tensor | None,
    residual: torch.Tensor | None, reduce_dtype: torch.dtype | None, config: Config | None, fixed_order: bool,
) -> Sum:  # fmt: skip
    """The call that these arguments make, if they are in order."""
    if not isinstance(fixed_order, bool):
        raise ArgumentError(f"fixed_order must be True or False, got {fixed_order!r}")
    call = call_of(
        TUNABLE, group, a, b, out=out, bias=bias, residual=residual, reduce_dtype=reduce_dtype, config=config,
        scatter=False,
    )  # fmt: skip
    return replace(call, fixed_order=fixed_order or torch.are_deterministic_algorithms_enabled())


def _kernel(decided: Plan) -> Any:
    # imported where it is needed: most calls need one of them
    if decided.sliced:
        from mkernel.ops.reduce.all_reduce.sliced import sliced_kernel

        return sliced_kernel
    if decided.multicast:
        from mkernel.ops.reduce.all_reduce.multicast import multicast_kernel

        return multicast_kernel
    from mkernel.ops.reduce.all_reduce.two_level import two_level_kernel

    return two_level_kernel


def prepare(group: Group, call: Sum) -> Launch:
    """The launch of a call whose arguments are in order. Collective when the workspace must grow."""
    call = tuned(TUNABLE, group, call)
    decided = group.planned((OP, call.key), lambda: plan.decide(group, call))
    memory = protocol.layout(group, decided, call)
    workspace = memory.workspace(group)
    if decided.multicast and not workspace.segment.multicast:
        # the group has multicast, but there was none left for this memory
        decided = group.planned((OP, call.key, "no multicast"), lambda: plan.decide(group, call, try_multicast=False))
        memory = protocol.layout(group, decided, call)
        workspace = memory.workspace(group)
    arguments = dict(
        context=workspace.context,
        ranks=Ranks(*constants(group.size, group.gpus_per_node)),
        call=operands.call_of(group, decided, call, 1, protocol.exchange_of(memory, workspace, decided)),
        **operands.matrices_of(decided, call, 1),
    )
    return Launch(
        op=OP,
        group=group,
        kernel=_kernel(decided),
        grid=decided.config.ctas,
        arguments=arguments,
        options=dict(num_warps=decided.config.warps, num_stages=decided.config.stages),
        variant=variant_of(decided, workspace),
        uses=memory.uses(workspace, free=protocol.free_of(group, decided, memory)),
        inputs=INPUTS,
        results=RESULTS,
    )


def explain(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    reduce_dtype: torch.dtype | None = None,
    group: Group | None = None,
    out: torch.Tensor | None = None,
    fixed_order: bool = True,
    config: Config | None = None,
) -> Plan:
    """The plan that `matmul_all_reduce` with these arguments would carry out."""
    group = current(group)
    call = _call_of(group, a, b, out, bias, residual, reduce_dtype, config, fixed_order)
    decided = plan.decide(group, call)
    reasons = [*decided.reasons, TUNABLE.origin(config, call.config)]
    if call.fixed_order and not fixed_order:
        reasons.append("torch.use_deterministic_algorithms is on: parts are added in the order of ranks")
    return replace(decided, reasons=tuple(reasons))
