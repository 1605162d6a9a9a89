"""fp8 operands with scales: which recipes there are, what is refused, and what kernels are told.

An fp8 matrix stands for its elements times its scales, which are fp32. As with torch._scaled_mm, the shapes of the
scales tell the recipe, here in the names of torch.nn.functional.ScalingType, for a [m, k] and b [k, n]:

| recipe of a | scale_a | recipe of b | scale_b |
|---|---|---|---|
| TensorWise | one element | TensorWise | one element |
| RowWise | [m, 1] | RowWise | [1, n] |
| BlockWise1x128 | [m, k/128] | BlockWise128x128 | [k/128, n/128] |

Numbers of blocks are rounded up. The first two recipes may be mixed; the third is for both operands. Where shapes mean
several recipes, as [1, 1] does, these mean the same numbers. b may have any layout; w.t() is fastest, because tensor
cores read fp8 along k only.

Why operators with scales are functions of their own. torch.mm and torch._scaled_mm are two functions, and so are
fused_all_gather_matmul and fused_all_gather_scaled_matmul of torch.ops.symm_mem: with scales, the dtype of the result
is no longer that of the operands, and no call takes both kinds. So calls without scales check, key and pass nothing
more than before. Both kinds run the same kernels, whose operands have scales or not (`Strides.scales`), and they share
workspaces.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from mkernel.lang.matrix import Strides
from mkernel.lang.scaling import BLOCK, SMALLEST_SCALE, Scales
from mkernel.runtime.errors import ArgumentError
from mkernel.runtime.gpus import capability
from mkernel.runtime.group import Group
from mkernel.runtime.operands import check_device, check_plain, constants, layout
from mkernel.runtime.planning import check_flag

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
RESULTS = (torch.bfloat16, torch.float16, torch.float32)
RECIPES_A = ("RowWise", "BlockWise1x128")  # by which kernels quantize a
OLDEST = (8, 9)  # compute capability with tensor cores for fp8
SIDE: int = BLOCK.value
SMALLEST: float = SMALLEST_SCALE.value


def with_scales(strides: Strides, scales: Scales | None) -> Strides:
    """How the kernel reads a matrix that has scales, or none."""
    return strides if scales is None else strides._replace(scales=scales, SCALED=constants(True)[0])


def blocks_of(size: int) -> int:
    """How many blocks of 128 there are in a dimension of this size."""
    return math.ceil(size / SIDE)


@dataclass(frozen=True)
class Scaling:
    """The scales of a product: a is [m, count] or, if all rows have the same scales, [1, count]; b is [count, groups].

    `blockwise`: each block of k has scales of its own. `fast`: fast accumulation. `quantizes`: the fp8 to which the
    kernel quantizes a, if it does; then a has no scales yet, and this a is None.
    """

    a: torch.Tensor | None
    b: torch.Tensor
    blockwise: bool
    fast: bool
    quantizes: torch.dtype | None = None

    @property
    def count(self) -> int:
        """How many scales a row of a has."""
        return self.b.shape[0]

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The scales that a call was passed, by the names of its arguments."""
        return {"scale_b": self.b} | ({} if self.a is None else {"scale_a": self.a})

    @property
    def key(self) -> Hashable:
        """Everything that a plan depends on."""
        of_a = self.quantizes if self.a is None else layout(self.a)
        return of_a, layout(self.b), self.blockwise, self.fast

    def of_a(self, rows: int) -> Scales | None:
        """The scales of a, whose parts have so many rows, for the kernel; None if it makes them."""
        if self.a is None:
            return None
        row = self.a.stride(0) if self.a.shape[0] > 1 else 0
        return self._scales(self.a, rows * row, row, self.a.stride(1), 1)

    def of_b(self) -> Scales:
        """The scales of b, for the kernel."""
        column = self.b.stride(1) if self.b.shape[1] > 1 else 0
        return self._scales(self.b, constants(0)[0], column, self.b.stride(0), SIDE if self.blockwise else 1)

    def of_gathered(self, data: torch.Tensor, part: int, row: int) -> Scales:
        """The scales of rows that have been gathered, each of which has `count`, one after the other, for the
        kernel."""
        return self._scales(data, part, row, 1, 1)

    def _scales(self, data: torch.Tensor, part: int, row: int, block: int, group: int) -> Scales:
        return Scales(data, part, row, block, *constants(group, self.blockwise, self.fast))

    def __str__(self) -> str:
        if self.blockwise:
            return "blocks of 1x128 of a and 128x128 of b have scales, and are added up in fp32"
        sums = "with fast accumulation" if self.fast else f"added up in fp32 every {SIDE} of k"
        of_a = "a scale for each row of a" if self.a is None or self.a.shape[0] > 1 else "one scale for a"
        of_b = "for each column of b" if self.b.shape[1] > 1 else "one for b"
        return f"{of_a}, {of_b}; sums are {sums}" if not self.fast else f"{of_a}, {of_b}; {sums}"


def check_operands(op: str, group: Group, a: torch.Tensor, b: torch.Tensor, recipe_a: str | None = None) -> None:
    """Reject matrices that are not fp8 or cannot be multiplied. recipe_a: how the kernel quantizes a, if it does."""
    for name, tensor in (("a", a), ("b", b)):
        if name == "a" and recipe_a is not None:
            if a.dtype not in RESULTS:
                raise ArgumentError(f"a has dtype {a.dtype}; to be quantized, it must be {_any_of(RESULTS)}")
        elif tensor.dtype not in FP8:
            raise ArgumentError(
                f"{name} has dtype {tensor.dtype}; {op} takes {' and '.join(map(str, FP8))}: quantize it with "
                f"mk.quantize, or call {op.replace('scaled_', '')}, which has no scales"
            )
    if a.shape[1] != b.shape[0]:
        raise ArgumentError(
            f"a is {tuple(a.shape)} and b is {tuple(b.shape)}: "
            f"a's columns ({a.shape[1]}) must be b's rows ({b.shape[0]})"
        )
    device = group.target
    if device.type == "cuda" and capability(device) < OLDEST:
        major, minor = capability(device)
        raise ArgumentError(
            f"{op} needs a GPU that multiplies fp8, of compute capability 8.9 or newer; this one has {major}.{minor}. "
            f"Call {op.replace('scaled_', '')} in bf16 instead"
        )


def _any_of(dtypes: Sequence[torch.dtype]) -> str:
    return f"one of {', '.join(map(str, dtypes))}"


def check_recipe_a(scale_a: Any, recipe_a: Any, dtype_a: Any) -> str | None:
    """The name of the recipe by which the kernel quantizes a; None if a has scales."""
    name = getattr(recipe_a, "name", recipe_a)
    if name is None:
        return None
    if name not in RECIPES_A:
        hint = ": its scale depends on all rows, so quantize a with mk.quantize" if name == "TensorWise" else ""
        raise ArgumentError(f"recipe_a must be one of {', '.join(RECIPES_A)}; got {recipe_a!r}{hint}")
    if scale_a is not None:
        raise ArgumentError("scale_a is given, and so is recipe_a: pass a and its scales, or scale_a=None")
    if dtype_a not in FP8:
        raise ArgumentError(f"dtype_a must be {' or '.join(map(str, FP8))}, got {dtype_a!r}")
    return name


def recipe_of(*, tensorwise: bool = False, blockwise: bool = False) -> str:
    """The recipe by which a kernel quantizes a, as the options of a command tell it."""
    if tensorwise:
        raise ArgumentError("a kernel cannot quantize a with a single scale, because that depends on all rows")
    return "BlockWise1x128" if blockwise else "RowWise"


def scaling_of_recipe(
    group: Group, a: torch.Tensor, b: torch.Tensor, recipe_a: str, dtype_a: torch.dtype, scale_b: Any,
    use_fast_accum: Any,
) -> Scaling:  # fmt: skip
    """The scales of a @ b, of which the kernel quantizes a."""
    count = 1 if recipe_a == "RowWise" else blocks_of(a.shape[1])
    like = torch.ones(1, 1, device=a.device).expand(a.shape[0], count)  # in the shape of those that a will have
    found = scaling_of(group, a, b, like, scale_b, use_fast_accum)
    return replace(found, a=None, quantizes=dtype_a)


def check_out_dtype(out_dtype: Any, out: torch.Tensor | None) -> torch.dtype:
    """The dtype of the result: as asked for, or that of `out`, or bf16."""
    if out_dtype is None:
        out_dtype = out.dtype if isinstance(out, torch.Tensor) else torch.bfloat16
    if out_dtype not in RESULTS:
        raise ArgumentError(f"out_dtype must be one of {', '.join(map(str, RESULTS))}, got {out_dtype}")
    return out_dtype


def for_library(scale: torch.Tensor, blockwise: bool) -> torch.Tensor:
    """Scales as torch._scaled_mm wants them on GPUs: those of blocks column-major, others row-major."""
    return scale.t().contiguous().t() if blockwise else scale.contiguous()


def check_tile_k(blockwise: bool, tile_k: int) -> None:
    """Refuse a depth of the steps of a tile that has no fp8 product, or reaches over several blocks."""
    most = SIDE if blockwise else None
    if tile_k < 32:
        raise ArgumentError(f"config.tile_k is {tile_k}, but must be at least 32: less of fp8 cannot be multiplied")
    if most is not None and tile_k > most:
        raise ArgumentError(f"config.tile_k is {tile_k}, but may be at most {most}: each block of k has its own scales")


def scaling_of(
    group: Group, a: torch.Tensor, b: torch.Tensor, scale_a: Any, scale_b: Any, use_fast_accum: Any
) -> Scaling:  # fmt: skip
    """The scales of a @ b, for operands that have been checked. The error says which shapes would do."""
    for name, scale in (("scale_a", scale_a), ("scale_b", scale_b)):
        check_scale(group, name, scale, 2)
    check_flag("use_fast_accum", use_fast_accum)
    (m, k), n = a.shape, b.shape[1]
    of_rows, of_columns = _shape_of(scale_a) in ((1, 1), (m, 1)), _shape_of(scale_b) in ((1, 1), (1, n))
    if of_rows and of_columns:
        return Scaling(_as_matrix(scale_a), _as_matrix(scale_b), False, use_fast_accum)
    blocks_a, blocks_b = (m, blocks_of(k)), (blocks_of(k), blocks_of(n))
    if _shape_of(scale_a) != blocks_a and not of_rows:
        raise ArgumentError(
            f"scale_a has shape {tuple(scale_a.shape)}, but a is {m} x {k}: it must have one element, or {m} x 1, one "
            f"for each row, or {m} x {blocks_of(k)}, one for each block of 1 x {SIDE}"
        )
    if _shape_of(scale_a) != blocks_a or _shape_of(scale_b) != blocks_b:
        rows = f"one element, or 1 x {n}, one for each column" if of_rows else ""
        blocks = f"{blocks_of(k)} x {blocks_of(n)}, one for each block of {SIDE} x {SIDE}"
        if _shape_of(scale_a) != blocks_a:
            blocks += f", and then scale_a {m} x {blocks_of(k)}"
        raise ArgumentError(
            f"scale_b has shape {tuple(scale_b.shape)}, but b is {k} x {n} and scale_a has shape "
            f"{tuple(scale_a.shape)}: it must have {rows}{', or ' if rows else ''}{blocks}"
        )
    if use_fast_accum:
        raise ArgumentError(
            "use_fast_accum is for scales of tensors and rows: with scales of blocks, the sum over each block leaves "
            "the tensor cores in any case; pass use_fast_accum=False"
        )
    if not k:  # nothing is multiplied
        return Scaling(scale_a.new_ones(1, 1), scale_b.new_ones(1, 1), False, False)
    return Scaling(_as_matrix(scale_a), _as_matrix(scale_b), True, False)


def _shape_of(scale: torch.Tensor) -> tuple[int, ...]:
    return (1, 1) if scale.numel() == 1 else tuple(scale.shape)


def _as_matrix(scale: torch.Tensor) -> torch.Tensor:
    return scale.reshape(1, 1) if scale.numel() == 1 else scale


def check_scale(group: Group, name: str, scale: Any, dimensions: int) -> None:
    """Refuse what cannot be scales of anything. dimensions: as many as they may have."""
    if not isinstance(scale, torch.Tensor):
        raise ArgumentError(f"{name} must be a torch.Tensor, got {type(scale).__name__}")
    if scale.dtype != torch.float32:
        micro = ": blocks of 1 x 32 (MXFP8) and 1 x 16 (NVFP4) are not supported" if scale.element_size() == 1 else ""
        raise ArgumentError(f"{name} has dtype {scale.dtype}, but must have torch.float32{micro}")
    if scale.dim() > dimensions:
        raise ArgumentError(f"{name} must have at most {dimensions} dimensions, got shape {tuple(scale.shape)}")
    check_device(name, scale, group.device)
    check_plain(name, scale)
    if torch.is_grad_enabled() and scale.requires_grad:
        raise ArgumentError(f"{name} requires grad, but scales have no gradients: pass {name}.detach()")
