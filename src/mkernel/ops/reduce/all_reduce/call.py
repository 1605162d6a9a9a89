"""The host side of matmul_all_reduce: a call on matrices, and its launch."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

import torch

from mkernel.lang.context import Ranks
from mkernel.ops.reduce import operands
from mkernel.ops.reduce.all_reduce import plan, protocol
from mkernel.ops.reduce.all_reduce.plan import OP
from mkernel.ops.reduce.call import SHARED, Plan, Scaled, Sum, call_of, group_m_of, tuned
from mkernel.ops.reduce.operands import INPUTS, RESULTS, variant_of
from mkernel.runtime.collective import collective
from mkernel.runtime.config import Config
from mkernel.runtime.group import Group
from mkernel.runtime.operands import constants
from mkernel.runtime.planning import check_flag
from mkernel.runtime.tuned import Tunable
from mkernel.runtime.world import Launch

TUNABLE = Tunable(OP, agreed=("m", "n"), own=("k",), shared=SHARED)


@collective
def matmul_all_reduce(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    reduce_dtype: torch.dtype | None = None,
    group: Any,
    out: torch.Tensor | None = None,
    fixed_order: bool = True,
    config: Config | None = None,
) -> torch.Tensor:
    """`mk.matmul_all_reduce` of matrices, without gradients."""
    passed = (a, b, out, bias, residual)
    ordered = fixed_order or torch.are_deterministic_algorithms_enabled()
    key, made = group.prepared.repeat(OP, passed, (reduce_dtype, config, fixed_order, ordered), out=2)
    if made is not None:
        return made[0] if out is None else out
    call = sum_of(group, a, b, out, bias, residual, reduce_dtype, config, fixed_order)
    agree(group, OP, call)
    launch(group, call, key, passed, out)
    return call.out


def agree(group: Group, op: str, call: Sum, **more: Hashable) -> None:
    """Raise on all ranks unless their calls go together. more: what else must be the same."""
    m, n = call.out.shape
    tile_m, tile_n, ctas = plan.cut(group, call)
    group.agree(
        op, m=m, n=n, dtype=call.a.dtype, reduce_dtype=call.wire_dtype, bias=call.bias is not None,
        residual=call.residual is not None, tile_m=tile_m, tile_n=tile_n, group_m=group_m_of(group, call), ctas=ctas,
        fixed_order=call.fixed_order, **more,
    )  # fmt: skip


def launch(group: Group, call: Sum, key: Hashable | None, passed: Sequence[Any], out: torch.Tensor | None) -> None:
    """Launch a call on which the ranks have agreed; key, passed: see `PreparedCalls`."""
    if call.out.numel():
        group.launch(prepare(group, call), key, passed, [call.out] * (out is None))
    else:
        group.confirm()


def repeat(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    group: Group,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    reduce_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    fixed_order: bool = True,
    config: Config | None = None,
) -> torch.Tensor | None:
    """The result of a prepared call of `mk.matmul_all_reduce`; None for others."""
    passed = (a, b, out, bias, residual)
    ordered = fixed_order or torch.are_deterministic_algorithms_enabled()
    _, made = group.prepared.repeat(OP, passed, (reduce_dtype, config, fixed_order, ordered), out=2)
    return None if made is None else made[0] if out is None else out


def sum_of(
    group: Group, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, bias: torch.Tensor | None,
    residual: torch.Tensor | None, reduce_dtype: torch.dtype | None, config: Config | None, fixed_order: bool,
    scaled: Scaled | None = None,
) -> Sum:  # fmt: skip
    """Check the arguments and make a `Sum` of them."""
    check_flag("fixed_order", fixed_order)
    call = call_of(
        TUNABLE, group, a, b, out=out, bias=bias, residual=residual, reduce_dtype=reduce_dtype, config=config,
        scatter=False, scaled=scaled,
    )  # fmt: skip
    return replace(call, fixed_order=fixed_order or torch.are_deterministic_algorithms_enabled())


def _kernel(decided: Plan) -> Any:
    # imported on demand: most programs need only one of them
    if decided.sliced:
        from mkernel.ops.reduce.all_reduce.sliced import sliced_kernel

        return sliced_kernel
    if decided.multicast:
        from mkernel.ops.reduce.all_reduce.multicast import multicast_kernel

        return multicast_kernel
    from mkernel.ops.reduce.all_reduce.two_level import two_level_kernel

    return two_level_kernel


def prepare(group: Group, call: Sum) -> Launch:
    """The launch of a call whose arguments have been checked. Collective if the workspace must grow."""
    call = tuned(TUNABLE, group, call)
    decided = group.planned((OP, call.key), lambda: plan.decide(group, call))
    if decided.few_rows:
        from mkernel.ops.reduce import few_rows

        return few_rows.launch(group, decided, OP, call)
    if decided.hopper and group.size == 1:  # nothing is exchanged
        from mkernel.ops.reduce.reduce_scatter import hopper as scatter
        from mkernel.ops.reduce.reduce_scatter import protocol as of_scatter

        return replace(scatter.launch(group, decided, of_scatter.layout(group, decided, call.wire_dtype), call), op=OP)
    memory = protocol.layout(group, decided, call)
    workspace = memory.workspace(group)
    if decided.multicast and not workspace.segment.multicast:
        # the group supports multicast, but no multicast object was available for this segment
        decided = group.planned((OP, call.key, "no multicast"), lambda: plan.decide(group, call, try_multicast=False))
        memory = protocol.layout(group, decided, call)
        workspace = memory.workspace(group)
    if decided.hopper:
        from mkernel.ops.reduce.all_reduce import hopper  # import Gluon only where it is used

        return hopper.launch(group, decided, memory, call)
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
