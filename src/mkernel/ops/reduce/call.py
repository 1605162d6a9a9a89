"""The host side of the operators that sum over ranks: a call and its plan."""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from mkernel.runtime import hopper, planning
from mkernel.runtime.config import Config, Settings
from mkernel.runtime.errors import ArgumentError
from mkernel.runtime.group import Group
from mkernel.runtime.matmul import RhsLayout, check_out, check_product, check_tensor
from mkernel.runtime.operands import describable, has_descriptors, layout, matmul_precision, same_elements
from mkernel.runtime.scaling import Scaling, check_operands, check_out_dtype, check_tile_k, scaling_of
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
    fixed_order: bool = True  # partials are added in rank order, not in whatever order the switch uses
    scaling: Scaling | None = None  # of a and b, which are fp8

    @property
    def wire_dtype(self) -> torch.dtype:
        """The dtype of partials and sums that travel between ranks."""
        return self.reduce_dtype or self.out.dtype

    @property
    def key(self) -> Hashable:
        """Everything that a plan depends on."""
        tensors = (self.a, self.b, self.out, self.bias, self.residual)
        layouts = tuple(layout(tensor) if tensor is not None else None for tensor in tensors)
        scales = None if self.scaling is None else self.scaling.key
        return layouts, self.wire_dtype, self.config, self.fixed_order, matmul_precision(self.a.dtype), scales


@dataclass(frozen=True)
class Scaled:
    """What calls with scales have besides: see `mkernel.runtime.scaling`. None of it has been checked."""

    scale_a: Any
    scale_b: Any
    out_dtype: Any
    use_fast_accum: Any


def call_of(
    tunable: Tunable, group: Group, a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor | None,
    bias: torch.Tensor | None, residual: torch.Tensor | None, reduce_dtype: torch.dtype | None, config: Config | None,
    scatter: bool, scaled: Scaled | None = None,
) -> Sum:  # fmt: skip
    """Check the arguments and make a `Sum` of them, with defaults filled in. `scatter`: each rank keeps its share of
    the rows."""
    op = tunable.op if scaled is None else f"scaled_{tunable.op}"
    planning.check_given(config)
    planning.check_without_helpers(op, config)
    for name, tensor in (("a", a), ("b", b), ("out", out), ("residual", residual)):
        if tensor is not None or name in ("a", "b"):
            check_tensor(op, group, name, tensor)
    scaling, dtype = None, a.dtype
    if scaled is None:
        check_product(a, b)
    else:
        check_operands(op, group, a, b)
        dtype = check_out_dtype(scaled.out_dtype, out)
        scaling = scaling_of(group, a, b, scaled.scale_a, scaled.scale_b, scaled.use_fast_accum)
    m, n = a.shape[0], b.shape[1]
    if scatter and m % group.size:
        other = op.replace("reduce_scatter", "all_reduce")
        raise ArgumentError(
            f"a has {m} rows, which cannot be divided evenly among {group.size} ranks: pad a to "
            f"{-(-m // group.size) * group.size} rows, or use {other}, which takes any number of rows"
        )
    shape, meaning = ((m // group.size, n), "m/world, n") if scatter else ((m, n), "m, n")
    whose = "a" if scaling is None else "the result"
    _check_added(op, group, bias, residual, n, shape, meaning)
    for name, tensor in (("bias", bias), ("residual", residual)):
        if tensor is not None and tensor.dtype != dtype:
            raise ArgumentError(f"{name} has dtype {tensor.dtype}, but {whose} has {dtype}: they must be the same")
    if reduce_dtype not in (None, dtype, torch.float32):
        raise ArgumentError(f"reduce_dtype must be torch.float32 or {whose}'s dtype, {dtype}; got {reduce_dtype}")
    if out is None:
        out = group.world.memory.empty(group.world_rank, shape, dtype)
    else:
        inputs = {"a": a, "b": b} | ({"bias": bias} if bias is not None else {})
        if scaling is not None:
            inputs |= scaling.tensors
        # out may be the residual: each element is read before it is written
        if residual is not None and not same_elements(out, residual):
            inputs["residual"] = residual
        check_out(out, shape, meaning, dtype, inputs)
    return tuned(tunable, group, Sum(a, b, out, bias, residual, reduce_dtype, config, scaling=scaling))


def group_m_of(group: Group, call: Sum) -> int:
    """Row blocks that are computed together. It determines the numbers of tiles, by which ranks exchange them, so it
    must be the same on every rank."""
    default = planning.default_tiles(group.target, call.a.dtype, call.b.shape[1], uses_tma=True)
    return planning.chooser(call.config)("group_m", default.group_m)


def tuned(tunable: Tunable, group: Group, call: Sum) -> Sum:
    """The call with the configuration that was passed, or else with the one that tuning found."""
    a, b = call.a, call.b
    sizes = dict(m=a.shape[0], n=b.shape[1], k=a.shape[1])
    if call.scaling is None:
        config = tunable.choose(group, a.dtype, call.config, **sizes)
    else:
        blockwise = call.scaling.blockwise
        config = scaled_tunable(tunable).choose(group, call.out.dtype, call.config, **sizes, blockwise=blockwise)
    return replace(call, config=config)


@functools.cache
def scaled_tunable(tunable: Tunable) -> Tunable:
    """How the configurations of the operator with scales are stored. Its dtype is that of the result."""
    return replace(tunable, op=f"scaled_{tunable.op}", agreed=(*tunable.agreed, "blockwise"))


def _check_added(
    op: str, group: Group, bias: torch.Tensor | None, residual: torch.Tensor | None, n: int, shape: tuple[int, int],
    meaning: str,
) -> None:  # fmt: skip
    """Reject a bias or a residual that cannot be added to a result of this shape."""
    if bias is not None:
        check_tensor(op, group, "bias", bias, dimensions=1)
        if bias.shape[0] != n:
            raise ArgumentError(f"bias has {bias.shape[0]} elements, but b has {n} columns")
    if residual is not None and tuple(residual.shape) != shape:
        raise ArgumentError(f"residual has shape {tuple(residual.shape)}, but the result has {shape} ({meaning})")


@dataclass(frozen=True, eq=False)
class Plan:
    """How a call will run, and why. `str(plan)` explains it."""

    head: str
    config: Settings
    tiles: int  # tiles of one rank's rows (reduce-scatter), or of the whole result (all-reduce)
    a_uses_tma: bool
    right: RhsLayout
    out_uses_tma: bool
    residual_uses_tma: bool
    precision: str
    reasons: tuple[str, ...]
    hopper: bool = False  # takes the kernel for Hopper
    sliced: bool = False  # tiles are split into slices
    few_rows: bool = False  # takes the kernel for few rows
    multicast: bool = False  # the switch delivers finished tiles to all ranks
    in_switch: bool = False  # and also reduces the partials

    def __str__(self) -> str:
        return "\n".join([self.head, *(f"- {reason}" for reason in self.reasons)])


FEW_ROWS = 256  # of all ranks
SHARED = ("tile_m", "tile_n", "ctas", "group_m")  # the fields of a configuration that are the same on every rank


def few_rows(
    group: Group, m: int, n: int, dtype: torch.dtype, config: Config | None, k: int | None = None,
    promoted: bool = False,
) -> planning.FewRows | None:  # fmt: skip
    """The tile of a sum [m, n] with few rows, and the size of the teams that compute one; None for other sums. Depends
    only on what is the same on every rank: with several ranks, k must be None. promoted: see `planning.few_rows`; it
    only matters to steps and stages, which ranks need not share."""
    given, most = config or Config(), planning.common_ctas(group)
    if group.nodes > 1 or not m * n:
        return None
    defaults = planning.default_tiles(group.target, dtype, n, uses_tma=True)
    tile = planning.FewRows(
        defaults.tile_m, min(defaults.tile_n, 128), defaults.tile_k, defaults.stages, defaults.warps, 1
    )
    if given.team_ctas is None:
        names = [field.name for field in fields(given)] if group.size == 1 else SHARED
        if any(getattr(given, name) is not None for name in names):
            return None
        if group.target.type != "cuda" or dtype.itemsize > 2 or (group.size > 1 and m > FEW_ROWS):
            return None
        found = planning.few_rows(group.target, dtype, m, n, k, most, promoted)
        if found is None and dtype.itemsize == 1:
            return None
        if found is None and group.size == 1 and not 1.8 < math.ceil(m / 128) * math.ceil(n / 128) / most <= 2:
            return None
        # with one rank, two tiles for almost every CTA: 0.94 of cuBLAS, where the kernel for Hopper had 0.88
        tile = found or planning.FewRows(64 if m <= 64 else 128, 128, 64, 6, 4 if m <= 64 else 8, 1)
    choose = planning.chooser(config)
    tile_m, tile_n, ctas = choose("tile_m", tile.tile_m), choose("tile_n", tile.tile_n), choose("ctas", most)
    tiles = math.ceil(m / tile_m) * math.ceil(n / tile_n)
    team = planning.largest_team(min(choose("team_ctas", tile.team), tile_m, ctas // tiles))
    return replace(tile, tile_m=tile_m, tile_n=tile_n, team=team)


def plan_of_few_rows(op: str, group: Group, call: Sum, k: int | None = None) -> Plan | None:
    """The plan of a call that takes the kernel for few rows; None for other calls. k: see `few_rows`."""
    m, n = call.a.shape[0], call.b.shape[1]
    tile = few_rows(
        group, m, n, call.a.dtype, call.config, k, call.scaling is not None and not call.scaling.fast
    )  # fmt: skip
    descriptors = has_descriptors(group.target)
    right = RhsLayout.of(call.b, descriptors)
    uses_tma = descriptors and describable(call.a) and right.uses_tma
    if call.scaling is not None:
        uses_tma = uses_tma and right.transposed  # tensor cores read fp8 along k only
    forced = call.config is not None and call.config.team_ctas is not None
    if tile is None or (group.size == 1 and not uses_tma and not forced):
        return None
    choose = planning.chooser(call.config)
    tiles = math.ceil(m / tile.tile_m) * math.ceil(n / tile.tile_n)
    most = planning.common_ctas(group)
    given = call.config.ctas if call.config is not None else None
    ctas = planning.ctas_of_teams(given, tiles * tile.team, tile.team, most)
    elements = tiles * tile.tile_m * tile.tile_n
    config = replace(call.config or Config(), ctas=ctas)
    if uses_tma:
        names = ("tile_k", "stages", "warps")
        config = replace(config, **{name: choose(name, getattr(tile, name)) for name in names})
    plan = plan_of(
        op, group, replace(call, config=config), tile=(tile.tile_m, tile.tile_n), tiles=tiles, computed=tiles,
        ctas=ctas, pushed=elements * (group.size - 1) // group.size, sent=0,
        reasons=(f"few rows: {tile.team} CTAs compute each tile, which covers the rows of all ranks",),
    )  # fmt: skip
    settings = replace(plan.config, team_ctas=tile.team)
    return replace(plan, config=settings, few_rows=True, out_uses_tma=False, residual_uses_tma=False)


def plan_of(
    op: str, group: Group, call: Sum, *, tile: tuple[int, int], tiles: int, computed: int, ctas: int,
    pushed: int, sent: int, reasons: tuple[str, ...] = (),
) -> Plan:  # fmt: skip
    """The plan of a call with `tiles` tiles of size `tile`, in which a rank computes `computed` tiles, pushes `pushed`
    elements over NVLink and sends `sent` elements over the network."""
    a, b, out, residual = call.a, call.b, call.out, call.residual
    descriptors = has_descriptors(group.target)
    right = RhsLayout.of(b, descriptors)
    uses_tma = {"a": descriptors and describable(a), "b": right.uses_tma, "out": descriptors and describable(out)}
    if residual is not None:
        uses_tma["residual"] = descriptors and describable(residual)
    settings = planning.settings_of_sum(
        group.target, a.dtype, *tile, uses_tma["a"] and right.uses_tma, ctas, call.config
    )
    planning.check_tile(settings, a.dtype, uses_tma["a"] and right.uses_tma)
    if call.scaling is not None:
        check_tile_k(call.scaling.blockwise, settings.tile_k)
        reasons = (f"fp8: {call.scaling}", *reasons)
    planning.check(settings, max_ctas=group.world.launcher.ctas(group.world_rank), least_send=0, least_intra=0)
    seconds = 2 * tile[0] * tile[1] * a.shape[1] * computed / planning.CTA_RATE[a.dtype] / settings.ctas
    dtype = str(call.wire_dtype).removeprefix("torch.")
    movement = (
        f"{pushed} elements go over NVLink and {sent} over the network while {computed} tiles are computed: "
        f"estimated {seconds * 1e3:.3g} ms"
    )
    return Plan(
        head=f"{op}: tiles {tile[0]}x{tile[1]}x{settings.tile_k}, {computed} of them on {settings.ctas} CTAs; "
        f"partials travel as {dtype}",
        config=settings,
        tiles=tiles,
        a_uses_tma=uses_tma["a"],
        right=right,
        out_uses_tma=uses_tma["out"],
        residual_uses_tma=uses_tma.get("residual", False),
        precision=matmul_precision(a.dtype),
        reasons=(*planning.reasons_of_access(descriptors, uses_tma), movement, *reasons),
    )


def has_wide_tiles(group: Group, call: Sum, rows: int) -> bool:
    """Whether tiles of a sum of fp8 products have the size that the kernel for Hopper takes, which is too wide for the
    sums of the portable kernels. Depends only on what is the same on every rank: ranks exchange whole tiles, so those
    that cannot run that kernel have the same tiles. rows: of the matrix that tiles divide."""
    given = call.config or Config()
    return (
        call.scaling is not None
        and hopper.suits(group, 0, call.a.dtype, None, free=set(), itemsize=1)
        and given.tile_m is None
        and given.tile_n is None
        and rows * call.b.shape[1] > 0
        and call.b.shape[1] % 8 == 0  # TMA can write the result
        and call.wire_dtype == call.out.dtype
        and call.out.dtype.itemsize == 2
    )


def _why_not_hopper(group: Group, call: Sum, portable: Plan) -> str | None:
    """Why a call does not take the kernel for Hopper, on a GPU that has one; None if it does."""
    itemsize = 2 if call.scaling is None else 1
    if not hopper.suits(group, 0, call.a.dtype, None, free=set(), itemsize=itemsize):
        return "it is for Hopper GPUs in one node, and 16-bit or fp8 operands"
    if not hopper.suits(group, 0, call.a.dtype, call.config, {"ctas", "group_m"}, itemsize=itemsize):
        return "the configuration sets more than ctas and group_m"
    if call.wire_dtype != call.out.dtype or call.out.dtype.itemsize != 2:
        return "its partials and results are 16-bit, and alike"
    if (portable.config.tile_m, portable.config.tile_n) != (hopper.TILE_M, hopper.TILE_N):
        return f"there are too few tiles of {hopper.TILE_M}x{hopper.TILE_N}"
    if not (portable.a_uses_tma and portable.right.uses_tma and portable.out_uses_tma):
        return "a, b or the result has no contiguous, 16-byte aligned rows"
    if call.scaling is not None and not portable.right.transposed:
        return "b is not a transposed view, and tensor cores read fp8 along k"
    if call.scaling is None and (call.bias is not None or call.residual is not None):
        return "it adds bias and residual to products of fp8 only"
    return None if call.a.shape[1] > 0 else "k is 0"


def for_hopper(group: Group, call: Sum, portable: Plan) -> Plan:
    """The plan for the kernel for Hopper, if the GPU and the call suit it; else the portable plan. Both kernels use the
    same slots, so ranks need not decide alike."""
    missing = _why_not_hopper(group, call, portable)
    if missing is not None:
        if call.scaling is None:
            return portable
        return replace(portable, reasons=(*portable.reasons, f"the portable kernel, not that for Hopper: {missing}"))
    depth = hopper.TILE_K if call.scaling is None else hopper.FP8_TILE_K
    return replace(
        portable,
        hopper=True,
        config=replace(portable.config, tile_k=depth, stages=hopper.STAGES, warps=hopper.WARPS),
        reasons=(*portable.reasons, "the kernel for Hopper: while one warpgroup stores, the other one multiplies"),
    )
