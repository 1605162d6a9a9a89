"""all_gather_matmul_weight_grad."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from mkernel.ops.all_gather_matmul import protocol
from mkernel.ops.all_gather_matmul.weight_grad import kernel
from mkernel.ops.all_gather_matmul.weight_grad.plan import OP, Plan, chunk_rows, plan
from mkernel.runtime import planning
from mkernel.runtime.collective import collective
from mkernel.runtime.config import Config
from mkernel.runtime.errors import ArgumentError
from mkernel.runtime.group import Group, current
from mkernel.runtime.matmul import check_out, check_tensor
from mkernel.runtime.operands import DTYPES, layout, matmul_precision
from mkernel.runtime.tuned import Tunable
from mkernel.runtime.world import Launch

TUNABLE = Tunable(OP, agreed=("m", "k"), own=("n",), shared=("chunk_rows",))


@collective
def all_gather_matmul_weight_grad(
    a: torch.Tensor,
    dy: torch.Tensor,
    *,
    group: Any = None,
    out: torch.Tensor | None = None,
    config: Config | None = None,
) -> torch.Tensor:
    """Gather every rank's `a` and multiply its transpose by this rank's `dy`, overlapped, in one kernel: the gradient
    of the weight b of `all_gather_matmul(a, b)`, if dy is the gradient of its result.

    Args:
        a: [m, k], this rank's rows, in bf16, fp16 or fp32. Shape and dtype must be the same on every rank.
            Any strides.
        dy: [world*m, n], in a's dtype, with the rows in rank order; n may differ between ranks. Any strides.
        group: the group to gather over; the current group by default.
        out: [k, n], tensor for the result; must not overlap a or dy. Any strides: for the gradient of `w.t()`, pass
            the transposed view of a tensor that is laid out like w.
        config: tiles, chunks, passes and CTAs; None selects defaults.

    Returns:
        [k, n], in a's dtype; accumulated in fp32, in an order that depends on the rank, the sizes and the
        configuration, but not on timing.

    Raises:
        ArgumentError: an argument is invalid; nothing has been launched.
        CommTimeout: a peer did not arrive within the group's timeout. On a GPU, where calls return before
            they are done, the next call on the group or `group.synchronize()` raises it.
    """
    assert group is not None
    _check(group, a, dy, out, config)
    config = _choose(group, a, dy, config)
    m, k = a.shape
    group.agree(OP, m=m, k=k, dtype=a.dtype, chunk_rows=chunk_rows(group, a, config))
    if out is None:
        out = group.world.memory.empty(group.world_rank, (k, dy.shape[1]), a.dtype)
    if a.numel():
        group.launch(prepare(group, a, dy, out, config))
    else:
        group.confirm()
        out.zero_()
    return out


def _check(group: Group, a: torch.Tensor, dy: torch.Tensor, out: torch.Tensor | None, config: Config | None) -> None:
    """Reject invalid arguments. The error names the argument and the rule."""
    planning.check_given(config)
    for name, tensor in (("a", a), ("dy", dy), *([("out", out)] if out is not None else [])):
        check_tensor(OP, group, name, tensor)
    if a.dtype not in DTYPES:
        raise ArgumentError(f"a has dtype {a.dtype}; supported are {', '.join(str(d) for d in DTYPES)}")
    if dy.dtype != a.dtype:
        raise ArgumentError(f"dy has dtype {dy.dtype}, but a has {a.dtype}: they must be the same")
    m, k = a.shape
    if dy.shape[0] != group.size * m:
        raise ArgumentError(
            f"a is {(m, k)} and dy is {tuple(dy.shape)}: dy must have a row for each of the {group.size * m} gathered "
            f"rows of a, {m} from each of {group.size} ranks"
        )
    if out is not None:
        check_out(out, (k, dy.shape[1]), "k, n", a.dtype, {"a": a, "dy": dy})


def _choose(group: Group, a: torch.Tensor, dy: torch.Tensor, given: Config | None) -> Config | None:
    """The configuration of a call. Chunks are the same on every rank, even if only some have a tuned configuration."""
    config = TUNABLE.choose(group, a.dtype, given, m=a.shape[0], n=dy.shape[1], k=a.shape[1])
    if given is None and config is not None and config.chunk_rows is None:
        return replace(config, chunk_rows=chunk_rows(group, a, None))
    return config


def prepare(group: Group, a: torch.Tensor, dy: torch.Tensor, out: torch.Tensor, config: Config | None) -> Launch:
    """The launch of a call with valid arguments. Collective if the workspace must grow."""
    config = _choose(group, a, dy, config)
    plain = group.heap.find(a) is None
    key = (OP, layout(a), layout(dy), layout(out), plain, config, matmul_precision(a.dtype))
    decided = group.planned(key, lambda: plan(group, a, dy, out, config))
    memory = protocol.layout(group.size, a.shape[0], decided.chunks, decided.access.rows.row_stride, a.dtype, OP)
    return kernel.launch(group, decided, memory, a, dy, out)


def explain(
    a: torch.Tensor,
    dy: torch.Tensor,
    *,
    group: Any = None,
    out: torch.Tensor | None = None,
    config: Config | None = None,
) -> Plan:
    """The plan that `all_gather_matmul_weight_grad` would execute with these arguments."""
    group = current(group)
    _check(group, a, dy, out, config)
    if out is None:
        out = torch.empty((a.shape[1], dy.shape[1]), dtype=a.dtype, device=a.device)
    chosen = _choose(group, a, dy, config)
    decided = plan(group, a, dy, out, chosen)
    return replace(decided, reasons=(*decided.reasons, TUNABLE.origin(config, chosen)))
