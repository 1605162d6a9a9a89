"""scaled_moe_ffn: moe_ffn of tokens and matrices in fp8, with scales; what is combined, and the result, are bf16.

Kernel, roles, order, signals and the combine are those of moe_ffn; tokens travel packed, as in
moe_dispatch_scaled_matmul (scaled.py says who waits for whom, and why that cannot deadlock).

Inner activations. A tile of the first GEMM has 128 columns of gate and of up, and so of activation(gate) * up: the
elements of a row that share a scale in the second GEMM. So each tile quantizes its result in registers, to the bits of
`mk.quantize` of the fp32 values, and stores fp8 and a scale for each row. The counter of the tiles of the first GEMM
covers both. Inner activations always have block scales, whatever the scales of tokens are, because the maximum of a
whole row would be known only after all tiles of the row. So w_down has scales of 128x128 blocks.

What it costs. The dispatch moves about half of the bytes of bf16, the combine the same. Memory on the rank:
rows*hidden*3 bytes for packed tokens and results, which do not share memory, unlike in moe_ffn, and rows*inter*1.03.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from mkernel.ops import library
from mkernel.ops.moe import ffn, protocol, scaled
from mkernel.ops.moe import scaled_registration as registration
from mkernel.ops.moe.arguments import check_activation, check_matrices, check_weights
from mkernel.ops.moe.grouped import Biases, empty_rows
from mkernel.ops.moe.handle import Handle, new_handle, numbers_in_graph, numbers_of
from mkernel.ops.moe.packing import WORD, PackedLayer
from mkernel.ops.moe.plan import Allocation, FfnPlan, bytes_of, bytes_of_tables, plan_ffn, tile_height
from mkernel.ops.moe.sizes import Sizes, capacity_of, row_stride_of, sized, slots_of
from mkernel.ops.moe.sizes import agree as agree_on_sizes
from mkernel.runtime.collective import collective, traceable
from mkernel.runtime.config import Config
from mkernel.runtime.errors import ArgumentError
from mkernel.runtime.group import Group, current
from mkernel.runtime.matmul import check_out, check_tensor
from mkernel.runtime.operands import layout
from mkernel.runtime.scaling import FP8, SIDE, blocks_of, check_scale, check_tile_k
from mkernel.runtime.tuned import Tunable
from mkernel.runtime.world import Launch

OP = "scaled_moe_ffn"
E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
TUNABLE = Tunable(
    OP, agreed=("tokens", "k", "hidden", "blockwise"), own=("inter", "experts", "quantizes"), shared=("chunk_rows",)
)


def check(
    group: Group, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, w_gate_up: torch.Tensor,
    w_down: torch.Tensor, scale_x: Any, scale_gate_up: Any, scale_down: Any, *, capacity: int | None = None,
    max_tokens: int | None = None, activation: str = "silu", out: torch.Tensor | None = None,
    config: Config | None = None, recipe_x: Any = None, dtype_x: Any = E4M3,
) -> PackedLayer:  # fmt: skip
    """Reject arguments that cannot be computed with; the error names the argument and the rule."""
    check_activation(activation)
    packed = scaled.check(
        group, x, topk_ids, w_gate_up, scale_x, scale_gate_up, capacity=capacity, max_tokens=max_tokens, config=config,
        recipe_x=recipe_x, dtype_x=dtype_x, names=(OP, "moe_ffn", "w_gate_up", "scale_gate_up"),
    )  # fmt: skip
    check_tensor(OP, group, "topk_weights", topk_weights)
    check_weights(topk_weights, x.shape[0], topk_ids.shape[1])
    experts, hidden, columns = w_gate_up.shape
    if columns % 2 or (packed.blockwise and columns // 2 % SIDE):
        unit = f"a multiple of {2 * SIDE}, as its scales are of blocks" if packed.blockwise else "even"
        raise ArgumentError(
            f"w_gate_up is {tuple(w_gate_up.shape)}: its last dimension must be {unit}: half of its columns are gate, "
            f"half are up"
        )
    check_tensor(OP, group, "w_down", w_down, 3)
    if w_down.dtype not in FP8:
        raise ArgumentError(f"w_down has dtype {w_down.dtype}; {OP} takes {' and '.join(map(str, FP8))}")
    check_matrices(OP, group, "w_down", w_down, w_down.dtype, columns // 2, "half of the columns of w_gate_up")
    if w_down.shape[0] != experts or w_down.shape[2] != hidden:
        raise ArgumentError(f"w_down is {tuple(w_down.shape)}, but must be {(experts, columns // 2, hidden)}")
    check_scale(group, "scale_down", scale_down, 3)
    expected = (experts, blocks_of(columns // 2), blocks_of(hidden))
    if tuple(scale_down.shape) != expected:
        raise ArgumentError(
            f"scale_down has shape {tuple(scale_down.shape)}, but w_down is {tuple(w_down.shape)}: it must have "
            f"{' x '.join(map(str, expected))}, one for each block of {SIDE} x {SIDE}"
        )
    if out is not None:
        check_tensor(OP, group, "out", out)
        inputs = dict(
            x=x, topk_ids=topk_ids, topk_weights=topk_weights, w_gate_up=w_gate_up, w_down=w_down,
            scale_gate_up=scale_gate_up, scale_down=scale_down,
        )  # fmt: skip
        inputs |= {} if packed.scale_x is None else {"scale_x": packed.scale_x}
        check_out(out, tuple(x.shape), "tokens, hidden", BF16, inputs)
    return PackedLayer(packed, scale_down)


def choose(
    group: Group, topk_ids: torch.Tensor, w_down: torch.Tensor, packed: PackedLayer, max_tokens: int,
    given: Config | None,
) -> Config | None:  # fmt: skip
    """The configuration of a call in which no rank has more than max_tokens tokens. Its chunk size depends only on
    values that are the same on every rank, whether it is tuned or not."""
    experts, inter, hidden = w_down.shape
    return TUNABLE.choose(
        group, BF16, given, tokens=max_tokens, k=topk_ids.shape[1], hidden=hidden,
        blockwise=packed.x.blockwise, inter=inter, experts=experts, quantizes=packed.x.scale_x is None,
    )  # fmt: skip


def agree(
    group: Group, x: torch.Tensor, topk_ids: torch.Tensor, w_down: torch.Tensor, packed: PackedLayer,
    capacity: int | None, max_tokens: int | None, config: Config | None,
) -> Sizes:  # fmt: skip
    """The sizes of a call with valid arguments. Collective."""
    return agree_on_sizes(
        OP, group, scaled.narrow(x, packed.x), topk_ids, w_down.shape[0], capacity, max_tokens, config,
        lambda most: choose(group, topk_ids, w_down, packed, most, config), scales=packed.x.count,
    )  # fmt: skip


def _with_height(device: Any, config: Config | None) -> Config | None:
    """On a GPU, tiles of 64 rows: two tiles of sums and a product are in registers, and those of 128 rows spilled up to
    340 bytes. With several nodes, these spill up to 68."""
    if device.type != "cuda" or (config is not None and config.tile_m is not None):
        return config
    return replace(config or Config(), tile_m=64)


def _plan(
    group: Group, x: torch.Tensor, w_gate_up: torch.Tensor, w_down: torch.Tensor, packed: PackedLayer, sizes: Sizes,
    config: Config | None,
) -> FfnPlan:  # fmt: skip
    words, config = packed.x.words, _with_height(group.target, config)
    decided = plan_ffn(group, scaled.narrow(x, packed.x), w_gate_up, w_down, sizes, config, 4 * words)
    check_tile_k(True, decided.config.tile_k)
    return replace(decided, op=OP, row_stride=row_stride_of(words, WORD), reasons=(str(packed.x), *decided.reasons))


def _memory(sizes: Sizes, packed: PackedLayer) -> Any:
    sums = BF16, row_stride_of(packed.x.hidden, BF16)
    stride = row_stride_of(packed.x.words, WORD)
    return protocol.layout("moe_ffn", sizes, WORD, stride, dispatches=True, combines=True, packs=True, sums=sums)


def _allocate(group: Group, plan: FfnPlan, w_down: torch.Tensor, packed: PackedLayer) -> ffn.Memory:
    _, inter, hidden = w_down.shape
    capacity = max(plan.sizes.capacity, 1)
    rows = empty_rows(group, capacity, packed.x.words, torch.float32, 0).view(WORD)
    bytes_of_inner = row_stride_of(inter, E4M3)
    inner = empty_rows(group, capacity, bytes_of_inner // 4, torch.float32, 0).view(torch.uint8).view(E4M3)
    scales = empty_rows(group, capacity, blocks_of(inter), torch.float32, 0)
    y = empty_rows(group, capacity, hidden, BF16, plan.config.tile_m)
    return ffn.Memory(rows, inner[:, :inter], y, None, scales)


def prepare(
    group: Group, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, w_gate_up: torch.Tensor,
    w_down: torch.Tensor, out: torch.Tensor, packed: PackedLayer, sizes: Sizes, config: Config | None,
    activation: str = "silu",
) -> tuple[Launch, Handle]:  # fmt: skip
    """The launch of a call with valid arguments, and the handle of its routing. Collective if the workspace must
    grow."""
    config = choose(group, topk_ids, w_down, packed, sizes.max_tokens, config)
    key = (
        OP, layout(x), layout(topk_ids), layout(out), layout(topk_weights), layout(w_gate_up), layout(w_down), sizes,
        config, packed.x.key, layout(packed.scale_down),
    )  # fmt: skip
    decided = group.planned(key, lambda: _plan(group, x, w_gate_up, w_down, packed, sizes, config))
    handle = new_handle(group, sizes, decided.config.tile_m)
    launch = ffn.launch_of(
        group, decided, _memory(sizes, packed), x, topk_ids, topk_weights, w_gate_up, w_down, out,
        _allocate(group, decided, w_down, packed), handle, activation, Biases(), packed,
    )  # fmt: skip
    return launch, handle


@collective
def _call(
    x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, w_gate_up: torch.Tensor,
    w_down: torch.Tensor, scale_x: torch.Tensor | None, scale_gate_up: torch.Tensor, scale_down: torch.Tensor, *,
    group: Any, capacity: int | None = None, max_tokens: int | None = None, activation: str = "silu",
    out: torch.Tensor | None = None, config: Config | None = None, recipe_x: Any = None, dtype_x: Any = E4M3,
    numbers: Sequence[int] | None = None,
) -> tuple[torch.Tensor, Handle]:  # fmt: skip
    """`mk.scaled_moe_ffn`, without PyTorch's dispatcher: its result, and the handle of its routing. numbers: those of
    the handle, if they are known already; then they are the bounds."""
    if numbers is not None:
        _, _, capacity, max_tokens, *_ = numbers
    packed = check(
        group, x, topk_ids, topk_weights, w_gate_up, w_down, scale_x, scale_gate_up, scale_down, capacity=capacity,
        max_tokens=max_tokens, activation=activation, out=out, config=config, recipe_x=recipe_x, dtype_x=dtype_x,
    )  # fmt: skip
    if numbers is not None:
        chosen = choose(group, topk_ids, w_down, packed, numbers[3], config) or Config()
        config = replace(chosen, chunk_rows=numbers[4], tile_m=numbers[5])
    sizes = agree(group, x, topk_ids, w_down, packed, capacity, max_tokens, config)
    result = group.world.memory.empty(group.world_rank, tuple(x.shape), BF16) if out is None else out
    given = (x, topk_ids, topk_weights, w_gate_up, w_down)
    launch, handle = prepare(group, *given, result, packed, sizes, config, activation)
    group.launch(launch)
    return result, handle


@collective
def _numbers(
    x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, w_gate_up: torch.Tensor,
    w_down: torch.Tensor, scale_x: torch.Tensor | None, scale_gate_up: torch.Tensor, scale_down: torch.Tensor, *,
    group: Any, capacity: int | None, max_tokens: int | None, config: Config | None, **more: Any,
) -> tuple[int, ...]:  # fmt: skip
    """`Handle.numbers` of a call. Collective."""
    bounds: dict[str, Any] = dict(capacity=capacity, max_tokens=max_tokens, config=config)
    more |= bounds
    with torch.no_grad():
        packed = check(group, x, topk_ids, topk_weights, w_gate_up, w_down, scale_x, scale_gate_up, scale_down, **more)
    sizes = agree(group, x, topk_ids, w_down, packed, **bounds)
    chosen = choose(group, topk_ids, w_down, packed, sizes.max_tokens, config)
    return numbers_of(sizes, tile_height(group.target, packed.x.dtype, _with_height(group.target, chosen)))


registration.define_ffn(_call)


class Kept(NamedTuple):
    """The result of a layer, and what a backward pass needs of its routing."""

    out: torch.Tensor
    tables: torch.Tensor
    group: str
    numbers: tuple[int, ...]


@traceable()
def scaled_moe_ffn_kept(
    x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, w_gate_up: torch.Tensor,
    w_down: torch.Tensor, scale_x: torch.Tensor | None, scale_gate_up: torch.Tensor, scale_down: torch.Tensor, *,
    group: Any, capacity: int | None, max_tokens: int | None, activation: str, config: Config | None = None,
    recipe_x: str | None = None, dtype_x: torch.dtype = E4M3,
) -> Kept:  # fmt: skip
    """`mk.scaled_moe_ffn` by the registered operator that is differentiated."""
    given = (x, topk_ids, topk_weights, w_gate_up, w_down, scale_x, scale_gate_up, scale_down)
    if isinstance(group, str):
        config = _with_height(x.device, config)
        numbers = numbers_in_graph(OP, group, w_gate_up, topk_ids, w_down.shape[0], capacity, max_tokens, config)
    else:
        numbers = _numbers(
            *given, group=group, capacity=capacity, max_tokens=max_tokens, config=config, activation=activation,
            recipe_x=recipe_x, dtype_x=dtype_x,
        )  # fmt: skip
    name = library.name_of(group)
    out, tables = torch.ops.mkernel.scaled_moe_ffn_kept(
        *given, name, list(numbers), activation, library.encoded(config), recipe_x, dtype_x
    )
    return Kept(out, tables, name, numbers)


@traceable()
def scaled_moe_ffn(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    scale_x: torch.Tensor | None,
    scale_gate_up: torch.Tensor,
    scale_down: torch.Tensor,
    *,
    group: Any = None,
    capacity: int | None = None,
    capacity_factor: float | None = None,
    max_tokens: int | None = None,
    activation: str = "silu",
    out: torch.Tensor | None = None,
    config: Config | None = None,
    recipe_x: Any = None,
    dtype_x: torch.dtype = E4M3,
) -> torch.Tensor:
    """A mixture-of-experts layer in fp8 in one kernel: `mk.moe_ffn` of tokens and matrices with scales.

    Inner activations are quantized by the kernel, to torch.float8_e4m3fn with scales of blocks of 1x128. There are no
    biases.

    Differentiable: topk_weights have gradients, and x with recipe_x. They are those of `mk.moe_ffn`, in the dtype of x,
    of what the fp8 of tokens and matrices stands for; inner activations are not quantized in the backward pass, which
    is a collective call, too. Neither tensors in fp8 nor scales have gradients: for those of matrices, use
    `mk.nn.ExpertParallelMoE` with fp8=.

    Args:
        x, scale_x, recipe_x, dtype_x: tokens and their scales, as in moe_dispatch_scaled_matmul.
        topk_ids, topk_weights: as in moe_ffn.
        w_gate_up: [experts, hidden, 2*inter] in fp8, gate, then up. A transposed view is read fastest. With scales of
            blocks, inter must be a multiple of 128.
        w_down: [experts, inter, hidden] in fp8, likewise.
        scale_gate_up: [experts, 1, 2*inter], or, if tokens have scales of blocks, [experts, hidden/128, 2*inter/128],
            rounded up.
        scale_down: [experts, inter/128, hidden/128], rounded up.
        group, capacity, capacity_factor, max_tokens, activation, config: as in moe_ffn.
        out: [tokens, hidden] in bf16, where to put the result; must not overlap an input. Not with tensors that
            require grad.

    Returns:
        [tokens, hidden] in bf16, as are the experts' results that are combined.

    Raises:
        ArgumentError: before anything is launched.
        CapacityError, RoutingError, CommTimeout: as moe_ffn, which their messages name: both share a workspace.
    """
    scales = dict(scale_x=scale_x, scale_gate_up=scale_gate_up, scale_down=scale_down)
    registration.refuse_gradients(x, recipe_x, w_gate_up=w_gate_up, w_down=w_down, **scales)
    library.refuse_transforms(x=x, topk_weights=topk_weights)
    capacity = capacity_of(capacity, capacity_factor, max_tokens, slots_of(topk_ids), library.size_of(group))
    given = (x, topk_ids, topk_weights, w_gate_up, w_down, scale_x, scale_gate_up, scale_down)
    recipe = getattr(recipe_x, "name", recipe_x)
    if not library.needs_dispatcher(*given, out):
        return _call(
            *given, group=group, capacity=capacity, max_tokens=max_tokens, activation=activation, out=out,
            config=config, recipe_x=recipe, dtype_x=dtype_x,
        )[0]  # fmt: skip
    library.refuse_out_with_gradients(out, x, topk_weights)
    if library.needs_gradients(x, topk_weights):
        return scaled_moe_ffn_kept(
            *given, group=group, capacity=capacity, max_tokens=max_tokens, activation=activation, config=config,
            recipe_x=recipe, dtype_x=dtype_x,
        ).out  # fmt: skip
    more = (library.name_of(group), capacity, max_tokens, activation, library.encoded(config), recipe, dtype_x)
    if out is None:
        return torch.ops.mkernel.scaled_moe_ffn(*given, *more)
    torch.ops.mkernel.scaled_moe_ffn_out(*given, *more, out)
    return out


def explain(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    scale_x: torch.Tensor | None,
    scale_gate_up: torch.Tensor,
    scale_down: torch.Tensor,
    *,
    group: Any = None,
    capacity: int | None = None,
    capacity_factor: float | None = None,
    max_tokens: int | None = None,
    activation: str = "silu",
    out: torch.Tensor | None = None,
    config: Config | None = None,
    recipe_x: Any = None,
    dtype_x: torch.dtype = E4M3,
) -> FfnPlan:
    """The plan that `scaled_moe_ffn` would carry out with these arguments, if no rank had more than max_tokens tokens
    (by default, more than this rank)."""
    group = current(group)
    capacity = capacity_of(capacity, capacity_factor, max_tokens, slots_of(topk_ids), group.size)
    packed = check(
        group, x, topk_ids, topk_weights, w_gate_up, w_down, scale_x, scale_gate_up, scale_down, capacity=capacity,
        max_tokens=max_tokens, activation=activation, out=out, config=config, recipe_x=recipe_x, dtype_x=dtype_x,
    )  # fmt: skip
    most = max(x.shape[0] if max_tokens is None else max_tokens, 1)
    chosen = choose(group, topk_ids, w_down, packed, most, config)
    sizes = sized(group, topk_ids, w_down.shape[0], capacity, most, group.size * most, chosen)
    decided = _plan(group, x, w_gate_up, w_down, packed, sizes, chosen)
    rows, (_, inter, hidden) = max(sizes.capacity, 1), w_down.shape
    own = bytes_of(rows, packed.x.words, WORD) + bytes_of(decided.config.tile_m + rows, hidden, BF16)
    own += bytes_of(rows, inter, E4M3) + bytes_of(rows, blocks_of(inter), torch.float32)
    allocated = Allocation(
        2 * x.numel() if out is None else 0, own, bytes_of_tables(sizes), _memory(sizes, packed).nbytes
    )
    return replace(
        decided, reasons=(*decided.reasons, str(allocated), TUNABLE.origin(config, chosen)), memory=allocated
    )
