"""torch.ops.mkernel.all_gather_matmul and its variants: on matrices, with the group by name.

Gradients of y = AG(a) @ b. The gradient of a is RS(dy @ b^T), our matmul_reduce_scatter. The gradient of b is
AG(a)^T @ dy. If only this rank's rows were saved, `all_gather_matmul_weight_grad` gathers them again while it
multiplies; if the gathered rows were saved, it is a local product.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mkernel.ops import library
from mkernel.ops.all_gather_matmul.call import all_gather_matmul
from mkernel.ops.all_gather_matmul.weight_grad import all_gather_matmul_weight_grad
from mkernel.runtime.group_names import size_of

Numbers = Sequence[int] | None  # an encoded configuration


# -- on real tensors


def _multiply(a: torch.Tensor, b: torch.Tensor, group: str, config: Numbers = None) -> torch.Tensor:
    return all_gather_matmul(a, b, group=group, config=library.decoded(config))[0]


def _multiply_gathered(
    a: torch.Tensor, b: torch.Tensor, group: str, config: Numbers = None
) -> tuple[torch.Tensor, torch.Tensor]:
    y, gathered = all_gather_matmul(a, b, group=group, return_gathered=True, config=library.decoded(config))
    assert gathered is not None
    return y, gathered


def _multiply_into(
    a: torch.Tensor, b: torch.Tensor, group: str, return_gathered: bool, config: Numbers, out: torch.Tensor
) -> torch.Tensor:
    given = library.decoded(config)
    gathered = all_gather_matmul(a, b, group=group, out=out, return_gathered=return_gathered, config=given)[1]
    return gathered if gathered is not None else a.new_empty(0)


# -- shapes


def fake(a: torch.Tensor, b: torch.Tensor, group: str, config: Numbers = None) -> torch.Tensor:
    library.check_fake(a, b)
    return a.new_empty(size_of(group) * a.shape[0], b.shape[-1])


def _fake_gathered(
    a: torch.Tensor, b: torch.Tensor, group: str, config: Numbers = None
) -> tuple[torch.Tensor, torch.Tensor]:
    return fake(a, b, group, config), a.new_empty(size_of(group) * a.shape[0], a.shape[1])


def _fake_into(
    a: torch.Tensor, b: torch.Tensor, group: str, return_gathered: bool, config: Numbers, out: torch.Tensor
) -> torch.Tensor:
    library.check_fake(a, b)
    return a.new_empty(size_of(group) * a.shape[0], a.shape[1]) if return_gathered else a.new_empty(0)


# -- gradients


def row_gradient(dy: torch.Tensor, b: torch.Tensor, group: str) -> torch.Tensor:
    return library.registered("matmul_reduce_scatter")(dy, b.t(), None, None, group, None, None)


def row_gradient_of_both(
    dy: torch.Tensor | None, b: torch.Tensor, dgathered: torch.Tensor | None, rows: int, group: str
) -> torch.Tensor:
    """The gradient of a, if a rank may have used the product, the gathered rows, or both. It is one product, whatever a
    rank has used, so all ranks make the same call: the gathered rows count as a product with the identity."""
    if dgathered is None:
        return row_gradient(b.new_empty(rows, 0) if dy is None else dy, b[:, :0] if dy is None else b, group)
    identity = torch.eye(dgathered.shape[1], dtype=dgathered.dtype, device=dgathered.device)
    if dy is None:
        return row_gradient(library.dense(dgathered), identity, group)
    return row_gradient(torch.cat([dy, dgathered], dim=1), torch.cat([b.t(), identity]).t(), group)


def weight_gradient(a: torch.Tensor, dy: torch.Tensor, by_columns: bool, group: str) -> torch.Tensor:
    return torch.ops.mkernel.all_gather_matmul_weight_grad(a, dy, by_columns, group, None)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    a, b, ctx.group, _ = inputs
    ctx.by_columns = library.by_columns(b)
    ctx.save_for_backward(*library.saved_for_product(a, b))


def _backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    a, b = ctx.saved_tensors
    dy = library.dense(dy)
    da = row_gradient(dy, b, ctx.group) if ctx.needs_input_grad[0] else None
    db = weight_gradient(a, dy, ctx.by_columns, ctx.group) if ctx.needs_input_grad[1] else None
    return da, db, None, None


def _save_gathered(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    a, b, ctx.group, _ = inputs
    ctx.by_columns, ctx.rows = library.by_columns(b), output[1].shape[0]
    ctx.save_for_backward(output[1] if b.requires_grad else None, b if a.requires_grad else None)
    ctx.set_materialize_grads(False)


def _backward_gathered(ctx: Any, dy: torch.Tensor | None, dgathered: torch.Tensor | None) -> tuple[Any, ...]:
    gathered, b = ctx.saved_tensors
    da = db = None
    if dy is not None:
        dy = library.dense(dy)
    if ctx.needs_input_grad[0]:
        da = row_gradient_of_both(dy, b, dgathered, ctx.rows, ctx.group)
    if ctx.needs_input_grad[1] and dy is not None:
        db = library.weight_gradient(gathered, dy, ctx.by_columns)
    return da, db, None, None


library.define(
    "all_gather_matmul",
    "(Tensor a, Tensor b, str group, int[]? config=None) -> Tensor",
    _multiply, fake, save=_save, backward=_backward,
)  # fmt: skip
library.define(
    "all_gather_matmul_gathered",
    "(Tensor a, Tensor b, str group, int[]? config=None) -> (Tensor, Tensor)",
    _multiply_gathered, _fake_gathered, save=_save_gathered, backward=_backward_gathered,
)  # fmt: skip
library.define(
    "all_gather_matmul_out",
    "(Tensor a, Tensor b, str group, bool return_gathered, int[]? config, Tensor(a!) out) -> Tensor",
    _multiply_into, _fake_into,
)  # fmt: skip


def _weight_grad(
    a: torch.Tensor, dy: torch.Tensor, by_columns: bool, group: str, config: Numbers = None
) -> torch.Tensor:
    out = _fake_weight_grad(a, dy, by_columns, group, config) if by_columns else None
    return all_gather_matmul_weight_grad(a, dy, group=group, out=out, config=library.decoded(config))


def _fake_weight_grad(
    a: torch.Tensor, dy: torch.Tensor, by_columns: bool, group: str, config: Numbers = None
) -> torch.Tensor:
    k, n = a.shape[1], dy.shape[1]
    return a.new_empty(n, k).t() if by_columns else a.new_empty(k, n)


def _save_weight_grad(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    a, dy, _, ctx.group, _ = inputs
    ctx.save_for_backward(a, dy)


def _backward_weight_grad(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    """For gradients of gradients."""
    a, dy = ctx.saved_tensors
    gradient = library.dense(gradient)
    da = row_gradient(dy, gradient, ctx.group) if ctx.needs_input_grad[0] else None
    ddy = torch.ops.mkernel.all_gather_matmul(a, gradient, ctx.group, None) if ctx.needs_input_grad[1] else None
    return da, ddy, None, None, None


library.define(
    "all_gather_matmul_weight_grad",
    "(Tensor a, Tensor dy, bool by_columns, str group, int[]? config=None) -> Tensor",
    _weight_grad, _fake_weight_grad, save=_save_weight_grad, backward=_backward_weight_grad,
)  # fmt: skip
