"""The host side of matmul_reduce_scatter: a call on matrices, and its launch."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch

from mkernel.ops.reduce.call import SHARED, Sum, call_of, group_m_of, tuned
from mkernel.ops.reduce.reduce_scatter import kernel, plan, protocol
from mkernel.ops.reduce.reduce_scatter.plan import OP
from mkernel.runtime.collective import collective
from mkernel.runtime.config import Config
from mkernel.runtime.group import Group
from mkernel.runtime.tuned import Tunable
from mkernel.runtime.world import Launch

TUNABLE = Tunable(OP, agreed=("m", "n"), own=("k",), shared=SHARED)


@collective
def matmul_reduce_scatter(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    reduce_dtype: torch.dtype | None = None,
    group: Any,
    out: torch.Tensor | None = None,
    config: Config | None = None,
) -> torch.Tensor:
    """`mk.matmul_reduce_scatter` of matrices, without gradients."""
    passed = (a, b, out, bias, residual)
    key, made = group.prepared.repeat(OP, passed, (reduce_dtype, config), out=2)
    if made is not None:
        return made[0] if out is None else out
    call = call_of(
        TUNABLE, group, a, b, out=out, bias=bias, residual=residual, reduce_dtype=reduce_dtype, config=config,
        scatter=True,
    )  # fmt: skip
    agree(group, OP, call)
    launch(group, call, key, passed, out)
    return call.out


def agree(group: Group, op: str, call: Sum, **more: Hashable) -> None:
    """Raise on all ranks unless their calls go together. more: what else must be the same."""
    rows, n = call.out.shape
    tile_m, tile_n, team = plan.tile_of(group, call)
    group.agree(
        op, m=call.a.shape[0], n=n, dtype=call.a.dtype, reduce_dtype=call.wire_dtype, tile_m=tile_m, tile_n=tile_n,
        group_m=group_m_of(group, call), ctas=plan.ctas_of(group, rows, n, (tile_m, tile_n), call.config),
        team_ctas=team, **more,
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
    config: Config | None = None,
) -> torch.Tensor | None:
    """The result of a prepared call of `mk.matmul_reduce_scatter`; None for others."""
    _, made = group.prepared.repeat(OP, (a, b, out, bias, residual), (reduce_dtype, config), out=2)
    return None if made is None else made[0] if out is None else out


def prepare(group: Group, call: Sum) -> Launch:
    """The launch of a call whose arguments have been checked. Collective if the workspace must grow."""
    call = tuned(TUNABLE, group, call)
    decided = group.planned((OP, call.key), lambda: plan.decide(group, call))
    if decided.few_rows:
        from mkernel.ops.reduce import few_rows

        return few_rows.launch(group, decided, OP, call)
    memory = protocol.layout(group, decided, call.wire_dtype)
    if decided.hopper:
        from mkernel.ops.reduce.reduce_scatter import hopper  # import Gluon only where it is used

        return hopper.launch(group, decided, memory, call)
    return kernel.launch(group, decided, memory, call)
