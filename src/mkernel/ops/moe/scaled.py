"""moe_dispatch_scaled_matmul: moe_dispatch_matmul of tokens and matrices in fp8, with scales.

Kernel, roles, workspace and schedule are those of moe_dispatch_matmul. About half as many bytes travel as in bf16.

How scales travel. The scales of a token follow its elements in one row (packing.py). So a CTA that copies a token also
copies its scales, with no additional signal or request. A rank packs each of its tokens once, into the staging buffer,
from the caller's two tensors, or quantizes it on the way (`recipe_x`). The bytes sent are the same as after
`mk.quantize`, so other ranks need not know which of the two a rank does, and may choose differently.

Who waits for whom. Packed tokens are only in `staged`, so all CTAs read them from there. This adds one wait: `send`
waits for the rank's own `held` signal of a chunk before it copies tokens of the chunk for another node. `intra` has no
additional wait: every CTA that stages does so before it counts, so the rank's own tokens are packed when `counted` is
set.

So `send` waits for CTAs of its own rank with higher program ids. This cannot deadlock. All CTAs that stage do so first,
and wait only for entries into the previous epoch; one of them also waits for entries of the node into this epoch. And
all CTAs of a launch are resident.

Rows of the experts are packed tokens, too. The GEMM reads their elements through a descriptor. It reads the scale of
each row, or of each row and 128 of k, through a pointer. If a tile reaches into the next expert's rows, it multiplies
those by zero and does not store them.

What it costs. A packed token takes hidden bytes and 4 bytes for each scale, rounded up to a multiple of 16: at hidden =
7168 with block scales, 7392 bytes, compared with 14336 in bf16. Unlike in moe_dispatch_matmul, a rank stages its
tokens, which takes memory, even if it is alone in its node.

Alternatives that were rejected. Scales in a buffer of their own: each chunk needs a second request, a second signal,
and a second wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from mkernel.ops import library
from mkernel.ops.moe import protocol
from mkernel.ops.moe import scaled_registration as registration
from mkernel.ops.moe.arguments import check_bias, check_bounds, check_config, check_matrices, check_tokens
from mkernel.ops.moe.dispatch_matmul import launch_of
from mkernel.ops.moe.grouped import empty_rows
from mkernel.ops.moe.handle import Handle, handle_in, new_handle, numbers_in_graph, numbers_of, traced_handle
from mkernel.ops.moe.packing import WORD, Packed
from mkernel.ops.moe.plan import Allocation, DispatchPlan, bytes_of, bytes_of_tables, plan_dispatch, tile_height
from mkernel.ops.moe.scaled_registration import E4M3, OP
from mkernel.ops.moe.sizes import Sizes, capacity_of, row_stride_of, sized, slots_of
from mkernel.ops.moe.sizes import agree as agree_on_sizes
from mkernel.runtime.collective import collective, traceable
from mkernel.runtime.config import Config
from mkernel.runtime.errors import ArgumentError
from mkernel.runtime.gpus import capability
from mkernel.runtime.group import Group, current
from mkernel.runtime.matmul import check_tensor
from mkernel.runtime.operands import layout
from mkernel.runtime.planning import check_flag
from mkernel.runtime.scaling import (
    FP8,
    OLDEST,
    RECIPES_A,
    RESULTS,
    SIDE,
    blocks_of,
    check_out_dtype,
    check_scale,
    check_tile_k,
)
from mkernel.runtime.tuned import Tunable
from mkernel.runtime.world import Launch

TUNABLE = Tunable(
    OP, agreed=("tokens", "k", "hidden", "out", "blockwise"), own=("experts", "quantizes"), shared=("chunk_rows",)
)


def _recipe(scale_x: Any, recipe_x: Any, dtype_x: Any) -> str | None:
    """The name of the recipe by which the kernel quantizes tokens; None if they have scales."""
    name = getattr(recipe_x, "name", recipe_x)
    if name is None:
        return None
    if name not in RECIPES_A:
        raise ArgumentError(f"recipe_x must be one of {', '.join(RECIPES_A)}; got {recipe_x!r}")
    if scale_x is not None:
        raise ArgumentError("scale_x is given, and so is recipe_x: pass x and its scales, or scale_x=None")
    if dtype_x not in FP8:
        raise ArgumentError(f"dtype_x must be {' or '.join(map(str, FP8))}, got {dtype_x!r}")
    return name


def _check_scales(
    group: Group, x: torch.Tensor, w: torch.Tensor, scale_x: Any, scale_w: Any, recipe: str | None, name: str
) -> bool:
    """Reject scales of the wrong shape. Returns whether they are those of blocks."""
    (tokens, hidden), (experts, _, n) = x.shape, w.shape
    check_scale(group, name, scale_w, 3)
    blocks = (experts, blocks_of(hidden), blocks_of(n))
    shapes: dict[tuple[int, ...], tuple[int, ...]] = {(experts, 1, n): (tokens, 1), blocks: (tokens, blocks_of(hidden))}
    if recipe is not None:
        shapes = {blocks if recipe == "BlockWise1x128" else (experts, 1, n): ()}
    if tuple(scale_w.shape) not in shapes:
        kinds: dict[tuple[int, ...], str] = {(experts, 1, n): "one for each column"}
        kinds[blocks] = f"one for each block of {SIDE} x {SIDE}"
        expected = ", or ".join(f"{' x '.join(map(str, shape))}, {kinds[shape]}" for shape in shapes)
        raise ArgumentError(
            f"{name} has shape {tuple(scale_w.shape)}, but {name.replace('scale', 'w')} is {tuple(w.shape)}: it must "
            f"have {expected}"
        )
    if recipe is None:
        check_scale(group, "scale_x", scale_x, 2)
        expected_x = shapes[tuple(scale_w.shape)]
        if tuple(scale_x.shape) != expected_x:
            raise ArgumentError(
                f"scale_x has shape {tuple(scale_x.shape)}, but x is {tokens} x {hidden} and {name} has shape "
                f"{tuple(scale_w.shape)}: it must have {expected_x[0]} x {expected_x[1]}"
            )
    return tuple(scale_w.shape) == blocks and tuple(scale_w.shape) != (experts, 1, n)


def check(
    group: Group, x: torch.Tensor, topk_ids: torch.Tensor, w: torch.Tensor, scale_x: Any, scale_w: Any, *,
    bias: Any = None, out_dtype: Any = None, use_fast_accum: Any = False, capacity: int | None = None,
    max_tokens: int | None = None, config: Config | None = None, recipe_x: Any = None, dtype_x: Any = E4M3,
    names: tuple[str, str, str, str] = (OP, "moe_dispatch_matmul", "w", "scale_w"),
) -> Packed:  # fmt: skip
    """Reject arguments that cannot be computed with; the error names the argument and the rule. names: of the operator,
    of that without scales, of w and of scale_w."""
    op, plain, of_w, of_scale = names
    check_config(op, config)
    recipe = _recipe(scale_x, recipe_x, dtype_x)
    if recipe is None and isinstance(x, torch.Tensor) and x.dtype in RESULTS:
        raise ArgumentError(
            f"x has dtype {x.dtype}: quantize it with mk.quantize, or pass recipe_x, and the kernel does; or call "
            f"{plain}, which has no scales"
        )
    check_tokens(op, group, x, topk_ids, FP8 if recipe is None else RESULTS)
    check_tensor(op, group, of_w, w, 3)
    if w.dtype not in FP8:
        raise ArgumentError(f"{of_w} has dtype {w.dtype}; {op} takes {' and '.join(map(str, FP8))}")
    check_matrices(op, group, of_w, w, w.dtype, x.shape[1], "the size of a token")
    dtype = check_out_dtype(out_dtype, None)
    check_bias(op, group, "bias", bias, w, of_w, dtype)
    check_bounds(x.shape[0], capacity, max_tokens)
    check_flag("use_fast_accum", use_fast_accum)
    blockwise = _check_scales(group, x, w, scale_x, scale_w, recipe, of_scale)
    if blockwise and use_fast_accum:
        raise ArgumentError("use_fast_accum is for scales of rows: with scales of blocks, pass use_fast_accum=False")
    if group.target.type == "cuda" and capability(group.target) < OLDEST:
        raise ArgumentError(f"{op} needs a GPU that multiplies fp8, of compute capability 8.9 or newer")
    return Packed(
        hidden=x.shape[1], dtype=x.dtype if recipe is None else dtype_x, scale_x=None if recipe else scale_x,
        scale_w=scale_w, blockwise=blockwise, fast=use_fast_accum, out_dtype=dtype,
    )  # fmt: skip


def narrow(x: torch.Tensor, packed: Packed) -> torch.Tensor:
    """x in the dtype in which it travels; without memory."""
    return torch.empty(x.shape, dtype=packed.dtype, device="meta")


def choose(
    group: Group, topk_ids: torch.Tensor, w: torch.Tensor, packed: Packed, max_tokens: int, given: Config | None
) -> Config | None:
    """The configuration of a call in which no rank has more than max_tokens tokens. Its chunk size depends only on
    values that are the same on every rank, whether it is tuned or not."""
    experts, hidden, out = w.shape
    return TUNABLE.choose(
        group, packed.out_dtype, given, tokens=max_tokens, k=topk_ids.shape[1], hidden=hidden, out=out,
        blockwise=packed.blockwise, experts=experts, quantizes=packed.scale_x is None,
    )  # fmt: skip


def agree(
    group: Group, x: torch.Tensor, topk_ids: torch.Tensor, w: torch.Tensor, packed: Packed, capacity: int | None,
    max_tokens: int | None, config: Config | None,
) -> Sizes:  # fmt: skip
    """The sizes of a call with valid arguments. Collective."""
    return agree_on_sizes(
        OP, group, narrow(x, packed), topk_ids, w.shape[0], capacity, max_tokens, config,
        lambda most: choose(group, topk_ids, w, packed, most, config), out=w.shape[2], scales=packed.count,
        out_dtype=packed.out_dtype,
    )  # fmt: skip


def _plan(
    group: Group, x: torch.Tensor, w: torch.Tensor, packed: Packed, sizes: Sizes, config: Config | None
) -> DispatchPlan:
    decided = plan_dispatch(group, narrow(x, packed), w, sizes, config, 4 * packed.words)
    check_tile_k(packed.blockwise, decided.config.tile_k)
    return replace(
        decided, op=OP, row_stride=row_stride_of(packed.words, WORD), reasons=(str(packed), *decided.reasons)
    )


def _memory(sizes: Sizes, packed: Packed) -> Any:
    stride = row_stride_of(packed.words, WORD)
    return protocol.layout("moe_dispatch_matmul", sizes, WORD, stride, dispatches=True, packs=True)


def prepare(
    group: Group, x: torch.Tensor, topk_ids: torch.Tensor, w: torch.Tensor, packed: Packed, sizes: Sizes,
    config: Config | None, bias: torch.Tensor | None = None,
) -> tuple[Launch, torch.Tensor, Handle]:  # fmt: skip
    """The launch of a call with valid arguments, its result and its handle. Collective if the workspace must grow."""
    config = choose(group, topk_ids, w, packed, sizes.max_tokens, config)
    key = (OP, layout(x), layout(topk_ids), layout(w), sizes, config, packed.key)
    decided = group.planned(key, lambda: _plan(group, x, w, packed, sizes, config))
    tile_m = decided.config.tile_m
    y = empty_rows(group, sizes.capacity, w.shape[2], packed.out_dtype, tile_m)
    rows = empty_rows(group, max(sizes.capacity, 1), packed.words, torch.float32, 0).view(WORD)
    handle = new_handle(group, sizes, tile_m)
    launch = launch_of(
        group, decided, _memory(sizes, packed), x, topk_ids, w, bias, y, rows, handle.tables, packed
    )  # fmt: skip
    return launch, y, handle


@collective
def _call(
    x: torch.Tensor, topk_ids: torch.Tensor, w: torch.Tensor, scale_x: torch.Tensor | None, scale_w: torch.Tensor, *,
    group: Any, bias: torch.Tensor | None = None, out_dtype: torch.dtype | None = None, use_fast_accum: bool = False,
    capacity: int | None = None, max_tokens: int | None = None, config: Config | None = None, recipe_x: Any = None,
    dtype_x: torch.dtype = E4M3, numbers: Sequence[int] | None = None,
) -> tuple[torch.Tensor, Handle]:  # fmt: skip
    """`mk.moe_dispatch_scaled_matmul`, without PyTorch's dispatcher. numbers: those of the handle, if they are known
    already; then they are the bounds."""
    if numbers is not None:
        _, _, capacity, max_tokens, *_ = numbers
    packed = check(
        group, x, topk_ids, w, scale_x, scale_w, bias=bias, out_dtype=out_dtype, use_fast_accum=use_fast_accum,
        capacity=capacity, max_tokens=max_tokens, config=config, recipe_x=recipe_x, dtype_x=dtype_x,
    )  # fmt: skip
    if numbers is not None:
        chosen = choose(group, topk_ids, w, packed, numbers[3], config) or Config()
        config = replace(chosen, chunk_rows=numbers[4], tile_m=numbers[5])
    sizes = agree(group, x, topk_ids, w, packed, capacity, max_tokens, config)
    launch, y, handle = prepare(group, x, topk_ids, w, packed, sizes, config, bias)
    group.launch(launch)
    return y, handle


@collective
def _numbers(
    x: torch.Tensor, topk_ids: torch.Tensor, w: torch.Tensor, scale_x: torch.Tensor | None, scale_w: torch.Tensor, *,
    group: Any, capacity: int | None, max_tokens: int | None, config: Config | None, **given: Any,
) -> tuple[int, ...]:  # fmt: skip
    """`Handle.numbers` of a call. Collective."""
    bounds: dict[str, Any] = dict(capacity=capacity, max_tokens=max_tokens, config=config)
    with torch.no_grad():
        packed = check(group, x, topk_ids, w, scale_x, scale_w, **bounds, **given)
    sizes = agree(group, x, topk_ids, w, packed, **bounds)
    chosen = choose(group, topk_ids, w, packed, sizes.max_tokens, config)
    return numbers_of(sizes, tile_height(group.target, packed.dtype, chosen))


registration.define(_call)


@traceable()
def moe_dispatch_scaled_matmul(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    w: torch.Tensor,
    scale_x: torch.Tensor | None,
    scale_w: torch.Tensor,
    *,
    group: Any = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
    capacity: int | None = None,
    capacity_factor: float | None = None,
    max_tokens: int | None = None,
    config: Config | None = None,
    recipe_x: Any = None,
    dtype_x: torch.dtype = E4M3,
) -> tuple[torch.Tensor, Handle]:
    """Send every token in fp8, with its scales, to the ranks of its experts and multiply it there, overlapped, in one
    kernel.

    `mk.quantize` makes such tokens and matrices; or the kernel quantizes tokens as it stages them, with the same
    result.

    Differentiable: bias has a gradient, and x with recipe_x; gradients pass through the quantization as if it changed
    nothing, and are computed in the dtype of x (ops/moe/scaled_registration.py). Neither tensors in fp8 nor scales have
    gradients: for those of matrices, use `mk.nn.ExpertParallelMoE` with fp8=. The backward pass is a collective call,
    too.

    Args:
        x: [tokens, hidden] in torch.float8_e4m3fn or torch.float8_e5m2: this rank's tokens. With recipe_x: in bf16,
            fp16 or fp32.
        topk_ids: as in moe_dispatch_matmul.
        w: [experts, hidden, out], in one of the fp8 dtypes. A transposed view of [experts, out, hidden] is read
            fastest.
        scale_x: what x must be multiplied by, in fp32: [tokens, 1], or [tokens, hidden/128], rounded up, one for each
            block of 1 x 128. With recipe_x: None.
        scale_w: what w must be multiplied by: [experts, 1, out], or, if tokens have scales of blocks, [experts,
            hidden/128, out/128], rounded up.
        group: the group; the current one by default.
        bias: [experts, out], in the dtype of the result: what is added to the products of each expert.
        out_dtype: the dtype of the result: torch.bfloat16 (default), torch.float16 or torch.float32.
        use_fast_accum: keep sums in the tensor cores, with fewer bits. Not with scales of blocks.
        capacity, capacity_factor, max_tokens, config: as in moe_dispatch_matmul.
        recipe_x: quantize x in the kernel, each token once: "RowWise" or "BlockWise1x128", or such a member of
            torch.nn.functional.ScalingType.
        dtype_x: the dtype to which x is then quantized.

    Returns:
        (y, handle), as moe_dispatch_matmul, y in out_dtype.

    Raises:
        ArgumentError: before anything is launched.
        CapacityError, RoutingError, CommTimeout: as moe_dispatch_matmul, which their messages name: both share a
            workspace.
    """
    registration.refuse_gradients(x, recipe_x, w=w, scale_x=scale_x, scale_w=scale_w)
    capacity = capacity_of(capacity, capacity_factor, max_tokens, slots_of(topk_ids), library.size_of(group))
    library.refuse_transforms(x=x, bias=bias)
    bounds: dict[str, Any] = dict(capacity=capacity, max_tokens=max_tokens, config=config)
    given: dict[str, Any] = dict(
        bias=bias, out_dtype=check_out_dtype(out_dtype, None), use_fast_accum=use_fast_accum,
        recipe_x=getattr(recipe_x, "name", recipe_x), dtype_x=dtype_x,
    )  # fmt: skip
    if not library.needs_dispatcher(x, topk_ids, w, scale_x, scale_w, bias):
        return _call(x, topk_ids, w, scale_x, scale_w, group=group, **bounds, **given)
    if isinstance(group, str):
        numbers = numbers_in_graph(OP, group, w, topk_ids, w.shape[0], **bounds)
    else:
        numbers = _numbers(x, topk_ids, w, scale_x, scale_w, group=group, **bounds, **given)
    y, tables = torch.ops.mkernel.moe_dispatch_scaled_matmul(
        x, topk_ids, w, scale_x, scale_w, bias, library.name_of(group), list(numbers), given["out_dtype"],
        use_fast_accum, library.encoded(config), given["recipe_x"], dtype_x,
    )  # fmt: skip
    if isinstance(group, str):
        return y, traced_handle(group, tables, x.shape[0], numbers)
    return y, handle_in(group, tables, x.shape[0], numbers)


def explain(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    w: torch.Tensor,
    scale_x: torch.Tensor | None,
    scale_w: torch.Tensor,
    *,
    group: Any = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
    capacity: int | None = None,
    capacity_factor: float | None = None,
    max_tokens: int | None = None,
    config: Config | None = None,
    recipe_x: Any = None,
    dtype_x: torch.dtype = E4M3,
) -> DispatchPlan:
    """The plan that `moe_dispatch_scaled_matmul` would carry out with these arguments, if no rank had more than
    max_tokens tokens (by default, more than this rank)."""
    group = current(group)
    capacity = capacity_of(capacity, capacity_factor, max_tokens, slots_of(topk_ids), group.size)
    packed = check(
        group, x, topk_ids, w, scale_x, scale_w, bias=bias, out_dtype=out_dtype, use_fast_accum=use_fast_accum,
        capacity=capacity, max_tokens=max_tokens, config=config, recipe_x=recipe_x, dtype_x=dtype_x,
    )  # fmt: skip
    most = max(x.shape[0] if max_tokens is None else max_tokens, 1)
    chosen = choose(group, topk_ids, w, packed, most, config)
    sizes = sized(group, topk_ids, w.shape[0], capacity, most, group.size * most, chosen)
    decided = _plan(group, x, w, packed, sizes, chosen)
    allocated = Allocation(
        bytes_of(decided.config.tile_m + sizes.capacity, w.shape[2], packed.out_dtype),
        bytes_of(max(sizes.capacity, 1), packed.words, WORD),
        bytes_of_tables(sizes),
        _memory(sizes, packed).nbytes,
    )
    return replace(
        decided, reasons=(*decided.reasons, str(allocated), TUNABLE.origin(config, chosen)), memory=allocated
    )
