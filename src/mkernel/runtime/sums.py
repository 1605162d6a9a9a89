"""What the host sides of the operators that sum over ranks have in common: the call, its plan, the
arguments of its kernel."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any

import torch

from mkernel.runtime import planning
from mkernel.runtime.config import Config, Settings
from mkernel.runtime.errors import ArgumentError
from mkernel.runtime.group import Group, Workspace
from mkernel.runtime.matmul import RhsLayout, check_out, check_product, check_tensor
from mkernel.runtime.operands import (
    DTYPES,
    describable,
    descriptor,
    has_descriptors,
    layout,
    matmul_precision,
    same_elements,
)
from mkernel.runtime.tuned import Tunable


@dataclass(frozen=True)
class Sum:
    """A call: sum over ranks of a @ b, plus bias, plus residual, into out [rows, n]."""

    a: torch.Tensor
    b: torch.Tensor
    out: torch.Tensor
    bias: torch.Tensor | None = None
    residual: torch.Tensor | None = None
    reduce_dtype: torch.dtype | None = None
    config: Config | None = None
    fixed_order: bool = True  # parts are added in the order of ranks, not in any that the switch takes

    @property
    def travels(self) -> torch.dtype:
        """The dtype of what travels between ranks."""
        return self.reduce_dtype or self.a.dtype

    @property
    def key(self) -> Hashable:
        """Everything that a plan depends on."""
        tensors = (self.a, self.b, self.out, self.bias, self.residual)
        layouts = tuple(layout(tensor) if tensor is not None else None for tensor in tensors)
        return layouts, self.travels, self.config, self.fixed_order, matmul_precision(self.a.dtype)


def call_of(
    tunable: Tunable, group: Group, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None,
    bias: torch.Tensor | None, residual: torch.Tensor | None, reduce_dtype: torch.dtype | None, config: Config | None,
    scatter: bool,
) -> Sum:  # fmt: skip
    """The call that these arguments make, if they are in order; what they leave open is filled in. `scatter`:
    each rank keeps its share of the rows."""
    shape = _check(tunable.op, group, a, b, out, bias, residual, reduce_dtype, config, scatter)
    if out is None:
        out = group.world.empty(group.world_rank, shape, a.dtype)
    return tuned(tunable, group, Sum(a, b, out, bias, residual, reduce_dtype, config))


def tuned(tunable: Tunable, group: Group, call: Sum) -> Sum:
    """The call with the configuration that it was given, or that tuning found."""
    a, b = call.a, call.b
    config = tunable.choose(group, a.dtype, call.config, m=a.shape[0], n=b.shape[1], k=a.shape[1])
    return replace(call, config=config)


def _check(
    op: str, group: Group, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, bias: torch.Tensor | None,
    residual: torch.Tensor | None, reduce_dtype: torch.dtype | None, config: Config | None, scatter: bool,
) -> tuple[int, int]:  # fmt: skip
    """The shape of the result. Refuses what can not be computed, naming the argument and the rule."""
    planning.check_given(config)
    planning.check_without_helpers(op, config)
    for name, tensor in (("a", a), ("b", b), ("out", out), ("residual", residual)):
        if tensor is not None or name in ("a", "b"):
            check_tensor(op, group, name, tensor)
    check_product(a, b)
    m, n = a.shape[0], b.shape[1]
    if scatter and m % group.size:
        raise ArgumentError(
            f"a has {m} rows, which can not be shared evenly by {group.size} ranks: pad a to "
            f"{-(-m // group.size) * group.size} rows, or use matmul_all_reduce, which takes any number"
        )
    shape, meaning = ((m // group.size, n), "m/world, n") if scatter else ((m, n), "m, n")
    inputs = {"a": a, "b": b}
    if bias is not None:
        check_tensor(op, group, "bias", bias, dimensions=1)
        if bias.shape[0] != n:
            raise ArgumentError(f"bias has {bias.shape[0]} elements, but b has {n} columns")
        inputs["bias"] = bias
    if residual is not None:
        if tuple(residual.shape) != shape:
            raise ArgumentError(f"residual has shape {tuple(residual.shape)}, but the result has {shape} ({meaning})")
        # out may be the residual, each element being read before it is written
        if out is None or not same_elements(out, residual):
            inputs["residual"] = residual
    for name, tensor in (("bias", bias), ("residual", residual)):
        if tensor is not None and tensor.dtype != a.dtype:
            raise ArgumentError(f"{name} has dtype {tensor.dtype}, but a has {a.dtype}: they must be the same")
    if reduce_dtype not in (None, a.dtype, torch.float32):
        raise ArgumentError(f"reduce_dtype must be torch.float32 or a's dtype, {a.dtype}; got {reduce_dtype}")
    if out is not None:
        check_out(out, shape, meaning, a.dtype, inputs)
    return shape


@dataclass(frozen=True, eq=False)
class Plan:
    """What a call will do, and why. `str(plan)` explains it."""

    head: str
    config: Settings
    tiles: int  # that travel as parts: of one rank's rows, or of all
    one_shot: bool
    a_described: bool
    right: RhsLayout
    out_described: bool
    residual_described: bool
    precision: str
    reasons: tuple[str, ...]
    hopper: bool = False  # runs the operator's kernel for Hopper
    sliced: bool = False  # tiles are cut into slices
    multicast: bool = False  # the switch hands out finished tiles
    in_switch: bool = False  # and adds the parts

    def __str__(self) -> str:
        return "\n".join([self.head, *(f"- {reason}" for reason in self.reasons)])


def plan(
    op: str, group: Group, call: Sum, *, tile: tuple[int, int], tiles: int, computed: int, ctas: int,
    one_shot: bool, pushed: int, sent: int, reasons: tuple[str, ...] = (),
) -> Plan:  # fmt: skip
    """The plan of a call that is cut into `tiles` of `tile`, of which a rank computes `computed`, and
    that pushes and sends so many elements."""
    a, b, out, residual = call.a, call.b, call.out, call.residual
    descriptors = has_descriptors(group.device)
    right = RhsLayout.of(b, descriptors)
    described = {"a": descriptors and describable(a), "b": right.uses_tma, "out": descriptors and describable(out)}
    if residual is not None:
        described["residual"] = descriptors and describable(residual)
    settings = planning.settings_of_sum(
        group.device, a.dtype, *tile, described["a"] and right.uses_tma, ctas, call.config
    )
    planning.check_tile(settings, a.dtype, described["a"] and right.uses_tma)
    planning.check(settings, max_ctas=group.world.ctas(group.world_rank), least_send=0, least_intra=0)
    seconds = 2 * tile[0] * tile[1] * a.shape[1] * computed / planning.CTA_RATE[a.dtype] / settings.ctas
    dtype = str(call.travels).removeprefix("torch.")
    movement = (
        f"{pushed} elements go over NVLink and {sent} over the network while {computed} tiles are computed: "
        f"estimated {seconds * 1e3:.3g} ms"
    )
    return Plan(
        head=f"{op}: tiles {tile[0]}x{tile[1]}x{settings.tile_k}, {computed} of them on {settings.ctas} CTAs; "
        f"parts travel as {dtype}{', in one shot' if one_shot else ''}",
        config=settings,
        tiles=tiles,
        one_shot=one_shot,
        a_described=described["a"],
        right=right,
        out_described=described["out"],
        residual_described=described.get("residual", False),
        precision=matmul_precision(a.dtype),
        reasons=(*planning.reasons_of_access(descriptors, described), movement, *reasons),
    )


# Which of them kernels only read, and which they write.
INPUTS = ("a", "b", "bias", "residual")
RESULTS = ("c",)


def arguments_of(group: Group, plan: Plan, workspace: Workspace, call: Sum, parts: int) -> dict[str, Any]:
    """The arguments that the kernels have in common; a's rows lie in so many parts, one below the other."""
    a, b, out, bias, residual = call.a, call.b, call.out, call.bias, call.residual
    (m, k), n, c = a.shape, b.shape[1], plan.config
    rows = m // parts

    def by_rows(tensor: torch.Tensor) -> Any:
        return descriptor(tensor, [1, *tensor.shape], [0, tensor.stride(0), 1], [1, c.tile_m, c.tile_n // 2])

    a_operand: Any = a
    if plan.a_described:
        a_operand = descriptor(a, [parts, rows, k], [rows * a.stride(0), a.stride(0), 1], [1, c.tile_m, c.tile_k])
    paced = group.world.links.nvlink is not None and group.gpus_per_node > 1
    rate = (group.world.links.nvlink or 0) / c.ctas  # GB/s of one CTA
    residual_strides = residual.stride() if residual is not None else (0, 0)
    return dict(
        context=workspace.context,
        a=a_operand, a_row_stride=a.stride(0), a_column_stride=a.stride(1),
        b=plan.right.operand(b, c.tile_n, c.tile_k), b_row_stride=b.stride(0), b_column_stride=b.stride(1),
        c=by_rows(out) if plan.out_described else out, c_row_stride=out.stride(0), c_column_stride=out.stride(1),
        bias=bias.contiguous() if bias is not None else None,
        residual=by_rows(residual) if residual is not None and plan.residual_described else residual,
        residual_row_stride=residual_strides[0], residual_column_stride=residual_strides[1],
        n=n, k=k, signals=workspace.signal_words // 2, nanoseconds_per_mib=round(2**20 / rate) if paced else 0,
        DTYPE=DTYPES[call.travels], GPUS=group.gpus_per_node, PACED=paced,
        BIAS=bias is not None, RESIDUAL=residual is not None, RESIDUAL_DESCRIPTOR=plan.residual_described,
        A_DESCRIPTOR=plan.a_described, B_DESCRIPTOR=plan.right.uses_tma, B_TRANSPOSED=plan.right.transposed,
        C_DESCRIPTOR=plan.out_described, PRECISION=plan.precision,
        TILE_M=c.tile_m, TILE_N=c.tile_n, TILE_K=c.tile_k, GROUP=c.group_m,
    )  # fmt: skip


def variant_of(plan: Plan, workspace: Workspace) -> Hashable:
    """Launches with the same one run the same binary. The workspace is in it, because Triton makes another
    binary for integers with other divisors."""
    return plan, workspace.signal_words, workspace.half_bytes
