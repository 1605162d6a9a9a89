"""torch.ops.mkernel.moe_*: with the group by name, and the routing of a dispatch as tensors.

A graph cannot hold a handle. Registered operators therefore take and return the memory of its tables, and the numbers
from which `handle_in` restores it. The shapes of their results depend on the capacity. So if gradients are needed,
callers must know these numbers beforehand.

Gradients are computed by other operators, which are not differentiable themselves (backward.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from mkernel.ops import library
from mkernel.ops.moe import backward, combine, ffn, training
from mkernel.ops.moe.grouped import ROWS_BEFORE, Biases, whole_of
from mkernel.ops.moe.handle import Handle, handle_in
from mkernel.ops.moe.routing import table_words
from mkernel.ops.moe.sizes import row_stride_of
from mkernel.runtime.collective import collective
from mkernel.runtime.config import Config

Numbers = Sequence[int] | None  # an encoded configuration
FFN = (
    "Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor w_gate_up, Tensor w_down, Tensor? b_gate_up, "
    "Tensor? b_down, str group"
)
NUMBERS = "int[] numbers"  # of the handle


def _whole_rows(rows: torch.Tensor, capacity: int, columns: int) -> torch.Tensor:
    """Fake rows that a forward pass keeps for a weight gradient."""
    return rows.new_empty(ROWS_BEFORE + max(capacity, 1), row_stride_of(columns, rows.dtype))


def _fake_tables(x: torch.Tensor, numbers: Sequence[int], group: str) -> torch.Tensor:
    k, experts, capacity, max_tokens = numbers[:4]
    words = table_words(library.size_of(group), max_tokens, k, experts, capacity)
    return x.new_empty(words, dtype=torch.int32)


def _what(activations: bool) -> str:
    return "activations" if activations else "inputs"


def _fake_weight_gradient(w: torch.Tensor, needed: bool) -> torch.Tensor:
    if not needed:
        return w.new_empty(0)
    if backward.is_transposed(w):
        return w.new_empty(w.transpose(1, 2).shape).transpose(1, 2)
    return w.new_empty(w.shape)


def _fake_bias_gradient(x: torch.Tensor, bias: torch.Tensor | None, needed: bool) -> torch.Tensor:
    return x.new_empty(0 if bias is None or not needed else bias.shape)


def _given(gradient: torch.Tensor | None, w: torch.Tensor) -> torch.Tensor:
    """Operators return tensors only: an empty one in place of a gradient that nobody needs."""
    return w.new_empty(0) if gradient is None else gradient


# -- moe_ffn


def _ffn(
    x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, w_gate_up: torch.Tensor,
    w_down: torch.Tensor, b_gate_up: torch.Tensor | None, b_down: torch.Tensor | None, group: str,
    capacity: int | None, max_tokens: int | None, activation: str, config: Numbers = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    return ffn.moe_ffn(
        x, topk_ids, topk_weights, w_gate_up, w_down, group=group, b_gate_up=b_gate_up, b_down=b_down,
        capacity=capacity, max_tokens=max_tokens, activation=activation, out=out, config=library.decoded(config),
    )  # fmt: skip


def _ffn_into(*arguments: Any) -> None:
    _ffn(*arguments)


def _ffn_kept(
    x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, w_gate_up: torch.Tensor,
    w_down: torch.Tensor, b_gate_up: torch.Tensor | None, b_down: torch.Tensor | None, group: str,
    numbers: Sequence[int], activation: str, activations: bool, config: Numbers = None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    out, handle, memory = training.moe_ffn_kept(
        x, topk_ids, topk_weights, w_gate_up, w_down, numbers, group=group, keep=_what(activations),
        config=library.decoded(config), activation=activation, biases=Biases(b_gate_up, b_down),
    )  # fmt: skip
    if memory.pre is None:
        return out, handle.memory, x.new_empty(0), x.new_empty(0)
    return out, handle.memory, whole_of(memory.rows, ROWS_BEFORE), whole_of(memory.pre, 0)


def kept_result(
    given: tuple[torch.Tensor, ...], group: str, numbers: Sequence[int], activation: str, save: str, config: Numbers
) -> torch.Tensor:
    """The result of moe_ffn, which keeps what its backward pass needs."""
    return torch.ops.mkernel.moe_ffn_kept(*given, group, list(numbers), activation, save == "activations", config)[0]


def _fake_ffn_kept(
    x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, w_gate_up: torch.Tensor,
    w_down: torch.Tensor, b_gate_up: torch.Tensor | None, b_down: torch.Tensor | None, group: str,
    numbers: Sequence[int], activation: str, activations: bool, config: Numbers = None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    tables, capacity = _fake_tables(x, numbers, group), numbers[2]
    if not activations:
        return x.new_empty(x.shape), tables, x.new_empty(0), x.new_empty(0)
    pre = x.new_empty(max(capacity, 1), row_stride_of(w_gate_up.shape[2], x.dtype))
    return x.new_empty(x.shape), tables, _whole_rows(x, capacity, x.shape[1]), pre


@collective
def _ffn_gradients(
    dout: torch.Tensor, x: torch.Tensor, topk_weights: torch.Tensor, w_gate_up: torch.Tensor, w_down: torch.Tensor,
    b_gate_up: torch.Tensor | None, b_down: torch.Tensor | None, tables: torch.Tensor, rows: torch.Tensor,
    pre: torch.Tensor, numbers: Sequence[int], activation: str,
    needed: Sequence[bool], *, group: Any,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    kept = None
    if rows.numel():
        kept = rows[ROWS_BEFORE:, : x.shape[1]], pre[:, : w_gate_up.shape[2]]
    handle, biases = handle_in(group, tables, x.shape[0], numbers), Biases(b_gate_up, b_down)
    dx, dweights, *others = backward.moe_ffn_backward(
        dout, x, topk_weights, w_gate_up, w_down, handle, group=group, biases=biases, kept=kept,
        needed=tuple(needed), activation=activation,
    )  # fmt: skip
    return dx, dweights, *(_given(gradient, x) for gradient in others)


def _ffn_backward(
    dout: torch.Tensor, x: torch.Tensor, topk_weights: torch.Tensor, w_gate_up: torch.Tensor, w_down: torch.Tensor,
    b_gate_up: torch.Tensor | None, b_down: torch.Tensor | None, tables: torch.Tensor, rows: torch.Tensor,
    pre: torch.Tensor, group: str, numbers: Sequence[int],
    activation: str, needed: Sequence[bool],
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    return _ffn_gradients(
        dout, x, topk_weights, w_gate_up, w_down, b_gate_up, b_down, tables, rows, pre, numbers, activation, needed,
        group=group,
    )  # fmt: skip


def _fake_ffn_backward(
    dout: torch.Tensor, x: torch.Tensor, topk_weights: torch.Tensor, w_gate_up: torch.Tensor, w_down: torch.Tensor,
    b_gate_up: torch.Tensor | None, b_down: torch.Tensor | None, tables: torch.Tensor, rows: torch.Tensor,
    pre: torch.Tensor, group: str, numbers: Sequence[int],
    activation: str, needed: Sequence[bool],
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    return (
        x.new_empty(x.shape), topk_weights.new_empty(topk_weights.shape),
        _fake_weight_gradient(w_gate_up, needed[0]), _fake_weight_gradient(w_down, needed[1]),
        _fake_bias_gradient(x, b_gate_up, needed[2]), _fake_bias_gradient(x, b_down, needed[3]),
    )  # fmt: skip


def _save_ffn(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    x, _, weights, gate_up, down, b_gate_up, b_down, ctx.group, ctx.numbers, ctx.activation, _, _ = inputs
    _keep(ctx, (x, weights, gate_up, down, b_gate_up, b_down), output)


def _keep(ctx: Any, inputs: tuple[torch.Tensor | None, ...], output: tuple[torch.Tensor, ...]) -> None:
    """Save these inputs, and all results but the first, which have no gradients."""
    ctx.save_for_backward(*inputs, *output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _differentiate_ffn(ctx: Any, dout: torch.Tensor | None, *_: Any) -> tuple[Any, ...]:
    """All ranks compute the gradients of tokens and weights, whichever of them a rank needs: it is one call."""
    x, weights, gate_up, down, b_gate_up, b_down, *kept = ctx.saved_tensors
    needs = ctx.needs_input_grad
    dout = torch.zeros_like(x) if dout is None else library.dense(dout)
    dx, dweights, *others = torch.ops.mkernel.moe_ffn_backward(
        dout, x, weights, gate_up, down, b_gate_up, b_down, *kept, ctx.group, ctx.numbers, ctx.activation, needs[3:7]
    )
    wanted = zip((dx, None, dweights, *others), needs)
    return (*(gradient if needed else None for gradient, needed in wanted), *[None] * 5)


# -- moe_dispatch_matmul


def _dispatch(
    x: torch.Tensor, topk_ids: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, group: str,
    numbers: Sequence[int], activations: bool, config: Numbers = None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    y, handle, rows = training.moe_dispatch_matmul_kept(
        x, topk_ids, w, bias, numbers, group=group, keep=_what(activations), config=library.decoded(config)
    )
    return y, handle.memory, whole_of(rows, ROWS_BEFORE) if activations else x.new_empty(0)


def _fake_dispatch(
    x: torch.Tensor, topk_ids: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, group: str,
    numbers: Sequence[int], activations: bool, config: Numbers = None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    capacity, out = numbers[2], w.shape[2]
    tile_m = numbers[5]
    y = x.new_empty(tile_m + capacity, row_stride_of(out, x.dtype))[tile_m:, :out]  # as `empty_rows` makes it
    rows = _whole_rows(x, capacity, x.shape[1]) if activations else x.new_empty(0)
    return y, _fake_tables(x, numbers, group), rows


@collective
def _dispatch_gradients(
    dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor, tables: torch.Tensor, rows: torch.Tensor,
    numbers: Sequence[int], needed: Sequence[bool], frozen: bool, biased: bool, *, group: Any,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    kept = rows[ROWS_BEFORE:, : x.shape[1]] if rows.numel() else None
    handle = handle_in(group, tables, x.shape[0], numbers)
    dx, dw, dbias = backward.moe_dispatch_matmul_backward(
        dy, x, w, handle, group=group, kept=kept, needed=tuple(needed), biased=biased, frozen=frozen
    )
    return dx, _given(dw, w), _given(dbias, w)


def _dispatch_backward(
    dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor, tables: torch.Tensor, rows: torch.Tensor,
    group: str, numbers: Sequence[int], needed: Sequence[bool], frozen: bool = False,
    biased: bool = False,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    return _dispatch_gradients(dy, x, w, tables, rows, numbers, needed, frozen, biased, group=group)


def _fake_dispatch_backward(
    dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor, tables: torch.Tensor, rows: torch.Tensor,
    group: str, numbers: Sequence[int], needed: Sequence[bool], frozen: bool = False,
    biased: bool = False,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    dbias = x.new_empty((w.shape[0], w.shape[2]) if needed[1] else 0)
    return x.new_empty(x.shape), _fake_weight_gradient(w, needed[0]), dbias


def _save_dispatch(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    x, _, w, bias, ctx.group, ctx.numbers, _, _ = inputs
    ctx.biased = bias is not None
    _keep(ctx, (x, w), output)


def _differentiate_dispatch(ctx: Any, dy: torch.Tensor | None, *_: Any) -> tuple[Any, ...]:
    x, w, tables, rows = ctx.saved_tensors
    needs = ctx.needs_input_grad
    if dy is None:
        dy = x.new_zeros(ctx.numbers[2], w.shape[2])
    dx, dw, dbias = torch.ops.mkernel.moe_dispatch_matmul_backward(
        dy, x, w, tables, rows, ctx.group, ctx.numbers, needs[2:4], False, ctx.biased
    )
    wanted = zip((dx, None, dw, dbias), needs)
    return (*(gradient if needed else None for gradient, needed in wanted), *[None] * 4)


# -- moe_dispatch


def _rows(
    x: torch.Tensor, topk_ids: torch.Tensor, group: str, numbers: Sequence[int], config: Numbers = None
) -> tuple[torch.Tensor, ...]:
    rows, handle = training.moe_dispatch_kept(x, topk_ids, numbers, group=group, config=library.decoded(config))
    return rows, handle.memory


def _fake_rows(
    x: torch.Tensor, topk_ids: torch.Tensor, group: str, numbers: Sequence[int], config: Numbers = None
) -> tuple[torch.Tensor, ...]:
    rows = x.new_empty(max(numbers[2], 1), row_stride_of(x.shape[1], x.dtype))[: numbers[2], : x.shape[1]]
    return rows, _fake_tables(x, numbers, group)


@collective
def _rows_gradients(
    dy: torch.Tensor, tables: torch.Tensor, tokens: int, numbers: Sequence[int], *, group: Any
) -> torch.Tensor:
    return backward.moe_dispatch_backward(dy, handle_in(group, tables, tokens, numbers), group=group)


def _rows_backward(
    dy: torch.Tensor, tables: torch.Tensor, tokens: int, group: str, numbers: Sequence[int]
) -> torch.Tensor:
    return _rows_gradients(dy, tables, tokens, numbers, group=group)


def _fake_rows_backward(dy: torch.Tensor, tables: torch.Tensor, tokens: int, *_: Any) -> torch.Tensor:
    return dy.new_empty(tokens, dy.shape[1])


def _save_rows(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    x, _, ctx.group, ctx.numbers, _ = inputs
    ctx.tokens, ctx.columns, ctx.dtype = x.shape[0], x.shape[1], x.dtype
    _keep(ctx, (), output)


def _differentiate_rows(ctx: Any, dy: torch.Tensor | None, *_: Any) -> tuple[Any, ...]:
    (tables,) = ctx.saved_tensors
    if dy is None:
        dy = tables.new_zeros(ctx.numbers[2], ctx.columns, dtype=ctx.dtype)
    dx = torch.ops.mkernel.moe_dispatch_backward(library.dense(dy), tables, ctx.tokens, ctx.group, ctx.numbers)
    return dx, None, None, None, None


# -- moe_combine


@collective
def _combine_rows(
    y: torch.Tensor, tables: torch.Tensor, topk_weights: torch.Tensor, numbers: Sequence[int], config: Config | None,
    *, group: Any, out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    handle = handle_in(group, tables, topk_weights.shape[0], numbers)
    return combine.moe_combine(y, handle, topk_weights, group=group, out=out, config=config)


def _combine(
    y: torch.Tensor, tables: torch.Tensor, topk_weights: torch.Tensor, group: str, numbers: Sequence[int],
    config: Numbers = None,
) -> torch.Tensor:  # fmt: skip
    return _combine_rows(y, tables, topk_weights, numbers, library.decoded(config), group=group)


def _combine_into(
    y: torch.Tensor, tables: torch.Tensor, topk_weights: torch.Tensor, group: str, numbers: Sequence[int],
    config: Numbers, out: torch.Tensor,
) -> None:  # fmt: skip
    _combine_rows(y, tables, topk_weights, numbers, library.decoded(config), group=group, out=out)


def _fake_combine(y: torch.Tensor, tables: torch.Tensor, topk_weights: torch.Tensor, *_: Any) -> torch.Tensor:
    return y.new_empty(topk_weights.shape[0], y.shape[1])


@collective
def _combine_gradients(
    dout: torch.Tensor, y: torch.Tensor, tables: torch.Tensor, topk_weights: torch.Tensor, numbers: Sequence[int],
    *, group: Any,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    handle: Handle = handle_in(group, tables, topk_weights.shape[0], numbers)
    return backward.moe_combine_backward(dout, y, topk_weights, handle, group=group)


def _combine_backward(
    dout: torch.Tensor, y: torch.Tensor, tables: torch.Tensor, topk_weights: torch.Tensor, group: str,
    numbers: Sequence[int],
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    return _combine_gradients(dout, y, tables, topk_weights, numbers, group=group)


def _fake_combine_backward(
    dout: torch.Tensor, y: torch.Tensor, tables: torch.Tensor, topk_weights: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, ...]:
    return y.new_empty(y.shape), topk_weights.new_empty(topk_weights.shape)


def _save_combine(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    y, tables, weights, ctx.group, ctx.numbers, _ = inputs
    ctx.save_for_backward(y, tables, weights)


def _differentiate_combine(ctx: Any, dout: torch.Tensor) -> tuple[Any, ...]:
    y, tables, weights = ctx.saved_tensors
    dy, dweights = torch.ops.mkernel.moe_combine_backward(
        library.dense(dout), y, tables, weights, ctx.group, ctx.numbers
    )
    needs = ctx.needs_input_grad
    return dy if needs[0] else None, None, dweights if needs[2] else None, None, None, None


# -- all of them


def _define_backward(name: str, schema: str, function: Callable[..., Any], fake: Callable[..., Any]) -> None:
    library.define(f"{name}_backward", schema, function, fake, backward=library.no_backward(f"{name}_backward"))


library.define(
    "moe_ffn", f"({FFN}, int? capacity, int? max_tokens, str activation, int[]? config=None) -> Tensor", _ffn,
    lambda x, *_: x.new_empty(x.shape), backward=library.no_backward("torch.ops.mkernel.moe_ffn, unlike mk.moe_ffn,"),
)  # fmt: skip
library.define(
    "moe_ffn_out", f"({FFN}, int? capacity, int? max_tokens, str activation, int[]? config, Tensor(a!) out) -> ()",
    _ffn_into, lambda *_: None,
)  # fmt: skip
library.define(
    "moe_ffn_kept",
    f"({FFN}, {NUMBERS}, str activation, bool activations, int[]? config=None) -> (Tensor, Tensor, Tensor, Tensor)",
    _ffn_kept, _fake_ffn_kept, save=_save_ffn, backward=_differentiate_ffn,
)  # fmt: skip
_define_backward(
    "moe_ffn",
    "(Tensor dout, Tensor x, Tensor topk_weights, Tensor w_gate_up, Tensor w_down, Tensor? b_gate_up, Tensor? b_down, "
    f"Tensor tables, Tensor rows, Tensor pre, str group, {NUMBERS}, str activation, bool[] needed) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _ffn_backward, _fake_ffn_backward,
)  # fmt: skip
library.define(
    "moe_dispatch_matmul",
    f"(Tensor x, Tensor topk_ids, Tensor w, Tensor? bias, str group, {NUMBERS}, bool activations, int[]? config=None) "
    "-> (Tensor, Tensor, Tensor)",
    _dispatch, _fake_dispatch, save=_save_dispatch, backward=_differentiate_dispatch,
)  # fmt: skip
_define_backward(
    "moe_dispatch_matmul",
    f"(Tensor dy, Tensor x, Tensor w, Tensor tables, Tensor rows, str group, {NUMBERS}, bool[] needed, "
    "bool frozen=False, bool biased=False) "
    "-> (Tensor, Tensor, Tensor)",
    _dispatch_backward, _fake_dispatch_backward,
)  # fmt: skip
library.define(
    "moe_dispatch", f"(Tensor x, Tensor topk_ids, str group, {NUMBERS}, int[]? config=None) -> (Tensor, Tensor)",
    _rows, _fake_rows, save=_save_rows, backward=_differentiate_rows,
)  # fmt: skip
_define_backward(
    "moe_dispatch", f"(Tensor dy, Tensor tables, SymInt tokens, str group, {NUMBERS}) -> Tensor",
    _rows_backward, _fake_rows_backward,
)  # fmt: skip
library.define(
    "moe_combine",
    f"(Tensor y, Tensor tables, Tensor topk_weights, str group, {NUMBERS}, int[]? config=None) -> Tensor",
    _combine, _fake_combine, save=_save_combine, backward=_differentiate_combine,
)  # fmt: skip
library.define(
    "moe_combine_out",
    f"(Tensor y, Tensor tables, Tensor topk_weights, str group, {NUMBERS}, int[]? config, Tensor(a!) out) -> ()",
    _combine_into, lambda *_: None,
)  # fmt: skip
_define_backward(
    "moe_combine",
    f"(Tensor dout, Tensor y, Tensor tables, Tensor topk_weights, str group, {NUMBERS}) -> (Tensor, Tensor)",
    _combine_backward, _fake_combine_backward,
)  # fmt: skip
