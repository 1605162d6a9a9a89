"""The host side of all_gather_matmul: a call on two-dimensional tensors, its checks, and its launch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from mkernel.ops.all_gather_matmul import kernel, protocol
from mkernel.ops.all_gather_matmul.plan import as_gathered, chunk_rows, plan
from mkernel.runtime import planning
from mkernel.runtime.collective import collective
from mkernel.runtime.config import Config
from mkernel.runtime.group import Group
from mkernel.runtime.matmul import check_out, check_product, check_tensor
from mkernel.runtime.operands import layout, matmul_precision
from mkernel.runtime.scaling import Scaling
from mkernel.runtime.tuned import Tunable
from mkernel.runtime.world import Launch

OP = "all_gather_matmul"
TUNABLE = Tunable(OP, agreed=("m", "k"), own=("n",), shared=("chunk_rows",))
SCALED_TUNABLE = Tunable(
    "all_gather_scaled_matmul", agreed=("m", "k", "blockwise"), own=("n", "quantizes"), shared=("chunk_rows",)
)


@collective
def all_gather_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    group: Any,
    out: torch.Tensor | None = None,
    return_gathered: bool = False,
    config: Config | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The result, and the gathered rows if they are wanted: `mk.all_gather_matmul` of matrices, without gradients."""
    key, made = group.prepared.repeat(OP, (a, b, out), (return_gathered, config), out=2)
    if made is not None:
        return made[0] if out is None else out, made[-1] if return_gathered else None
    planning.check_flag("return_gathered", return_gathered)
    check(group, a, b, out, config)
    config = choose(group, a, b, config)
    m, k = a.shape
    group.agree(OP, m=m, k=k, dtype=a.dtype, chunk_rows=chunk_rows(group, a, config))
    rows = group.size * m
    empty, rank = group.world.memory.empty, group.world_rank
    y = empty(rank, (rows, b.shape[1]), a.dtype) if out is None else out
    gathered = empty(rank, (rows, k), a.dtype) if return_gathered else None
    if a.numel():
        made = [y] * (out is None) + [gathered] * return_gathered
        group.launch(prepare(group, a, b, y, gathered, config), key, (a, b, out), made)
    else:
        group.confirm()
        y.zero_()
    return y, gathered


def repeat(
    a: torch.Tensor, b: torch.Tensor, *, group: Group, out: torch.Tensor | None = None, config: Config | None = None
) -> torch.Tensor | None:
    """The result of a prepared call of `mk.all_gather_matmul`; None for others."""
    _, made = group.prepared.repeat(OP, (a, b, out), (False, config), out=2)
    return None if made is None else made[0] if out is None else out


def check(group: Group, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, config: Config | None) -> None:
    """Reject invalid arguments. The error names the argument and the rule."""
    planning.check_given(config)
    for name, tensor in (("a", a), ("b", b), *([("out", out)] if out is not None else [])):
        check_tensor(OP, group, name, tensor)
    check_product(a, b)
    if out is not None:
        check_out(out, (group.size * a.shape[0], b.shape[1]), "world*m, n", a.dtype, {"a": a, "b": b})


def choose(
    group: Group, a: torch.Tensor, b: torch.Tensor, given: Config | None, dtype: torch.dtype | None = None,
    scaling: Scaling | None = None,
) -> Config | None:  # fmt: skip
    """The configuration of a call. Chunks are the same on every rank, even if only some have a tuned configuration.
    dtype: that of the result, if it is not that of a. With scales, a is what is gathered (`as_gathered`)."""
    sizes = dict(m=a.shape[0], n=b.shape[1], k=a.shape[1])
    if scaling is None:
        config = TUNABLE.choose(group, a.dtype, given, **sizes)
    else:
        sizes |= dict(blockwise=scaling.blockwise, quantizes=scaling.quantizes is not None)
        config = SCALED_TUNABLE.choose(group, dtype or a.dtype, given, **sizes)
    if given is None and config is not None and config.chunk_rows is None:
        quantizes = scaling is not None and scaling.quantizes is not None
        return replace(config, chunk_rows=chunk_rows(group, a, None, quantizes))
    return config


def prepare(
    group: Group, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, gathered: torch.Tensor | None,
    config: Config | None, scaling: Scaling | None = None, gathered_scales: torch.Tensor | None = None,
) -> Launch:  # fmt: skip
    """The launch of a call with valid arguments. Collective if the workspace must grow."""
    config = choose(group, as_gathered(a, scaling), b, config, out.dtype, scaling)
    plain = group.heap.find(a) is None
    scales = None if scaling is None else scaling.key
    key = (layout(a), layout(b), layout(out), plain, gathered is None, config, matmul_precision(a.dtype), scales)
    decided = group.planned(key, lambda: plan(group, a, b, out, gathered is not None, config, scaling))
    dtype, stride = as_gathered(a, scaling).dtype, decided.access.rows.row_stride
    memory = protocol.layout(group.size, a.shape[0], decided.chunks, stride, dtype)
    if decided.few_rows:
        from mkernel.ops.all_gather_matmul import few_rows

        return few_rows.launch(group, decided, memory, a, b, out, scaling)
    if decided.hopper and scaling is not None:
        from mkernel.ops.all_gather_matmul.scaled import hopper as scaled_hopper

        return scaled_hopper.launch(group, decided, memory, a, b, out, scaling)
    if decided.hopper:
        from mkernel.ops.all_gather_matmul import hopper  # Gluon is imported only where it runs

        return hopper.launch(group, decided, memory, a, b, out, gathered)
    return kernel.launch(group, decided, memory, a, b, out, gathered, scaling, gathered_scales)
