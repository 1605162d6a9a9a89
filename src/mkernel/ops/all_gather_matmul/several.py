"""A list of b: the rows are gathered once, and multiplied by several matrices.

If the matrices lie side by side in memory, as views of one, they are multiplied as that one: one launch, in which the
whole product overlaps with the transfers. Otherwise the first is overlapped, the gathered rows are kept, and the others
are local products of them. Matrices are never copied, which would read and write all of them in each call.

The registered operator returns the results as one matrix in both cases: in a graph, PyTorch must know their strides
before a call, and cannot know addresses; and the results of an operator must not be views of each other. `split` makes
tensors of its columns. Their gradients come as one matrix, too, so that each gradient is one product; where some
results are used, the gradient of the others is zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mkernel.ops import library
from mkernel.ops.all_gather_matmul.call import all_gather_matmul
from mkernel.ops.all_gather_matmul.registration import Numbers, fake, row_gradient_of_both, weight_gradient
from mkernel.runtime.errors import ArgumentError
from mkernel.runtime.group_names import size_of
from mkernel.runtime.prepared import PLAIN


def check_list(a: Any, bs: Sequence[Any]) -> None:
    """Refuse a list of b whose matrices cannot all be multiplied by the rows of a."""
    for name, tensor in (("a", a), *((f"b[{i}]", b) for i, b in enumerate(bs))):
        if not isinstance(tensor, torch.Tensor):
            raise ArgumentError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    for i, b in enumerate(bs):
        if b.dim() != 2 or b.shape[0] != a.shape[-1] or b.dtype != a.dtype or b.device != a.device:
            raise ArgumentError(
                f"b[{i}] is {tuple(b.shape)}, {b.dtype}, on {b.device}: it must be a matrix with {a.shape[-1]} rows, "
                f"{a.dtype}, on {a.device}, as a is"
            )


def joined(bs: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The matrix that has the columns of all of these, if they lie side by side in memory. None if they do not, or have
    no memory of their own."""
    if any([type(b) not in PLAIN for b in bs]):
        return None
    filled = [b for b in bs if b.shape[1]] or list(bs[:1])
    first, columns = filled[0], 0
    if not len(first):
        return None  # there is no memory
    storage, strides = first.untyped_storage().data_ptr(), first.stride()
    for b in filled:
        if b.stride() != strides or b.untyped_storage().data_ptr() != storage:
            return None
        if b.storage_offset() != first.storage_offset() + columns * strides[1]:
            return None
        columns += b.shape[1]
    return first if len(filled) == 1 else first.as_strided((first.shape[0], columns), strides)


def split(y: torch.Tensor, bs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The results, as columns of one matrix. No views to autograd, which would not let callers overwrite them."""
    return list(torch.unsafe_split_with_sizes(y, [b.shape[1] for b in bs], dim=1))


def multiply(
    a: torch.Tensor, bs: Sequence[torch.Tensor], group: str, save: str, return_gathered: bool, config: Numbers
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gathered rows if they are saved or returned, otherwise an empty tensor; and the products, side by side."""
    keep = return_gathered or save == "gathered"
    given: dict[str, Any] = dict(group=group, config=library.decoded(config))
    whole = joined(bs)
    if whole is not None:
        y, gathered = all_gather_matmul(a, whole, return_gathered=keep, **given)
        return gathered if gathered is not None else a.new_empty(0), y
    y = a.new_empty(size_of(group) * a.shape[0], sum([b.shape[1] for b in bs]))
    first, *others = y.split([b.shape[1] for b in bs], dim=1)
    _, gathered = all_gather_matmul(a, bs[0], out=first, return_gathered=True, **given)
    assert gathered is not None
    for columns, b in zip(others, bs[1:], strict=True):
        torch.mm(gathered, b, out=columns)
    return gathered if keep else a.new_empty(0), y


def _fake(
    a: torch.Tensor, bs: Sequence[torch.Tensor], group: str, save: str, return_gathered: bool, config: Numbers
) -> tuple[torch.Tensor, torch.Tensor]:
    for b in bs:
        fake(a, b, group)
    rows, keep = size_of(group) * a.shape[0], return_gathered or save == "gathered"
    gathered = a.new_empty(rows, a.shape[1]) if keep else a.new_empty(0)
    return gathered, a.new_empty(rows, sum([b.shape[1] for b in bs]))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    a, bs, ctx.group, ctx.save, _, _ = inputs
    ctx.has_gathered, ctx.rows = output[0].dim() == 2, output[1].shape[0]
    ctx.by_columns, ctx.widths = library.by_columns(bs[0]), [b.shape[1] for b in bs]
    kept = output[0] if ctx.save == "gathered" else a
    needed = any(b.requires_grad for b in bs)
    ctx.save_for_backward(kept if needed else None, *(b if a.requires_grad else None for b in bs))
    ctx.set_materialize_grads(False)


def _side_by_side(bs: Sequence[torch.Tensor]) -> torch.Tensor:
    """One matrix with the columns of all: their memory if they lie side by side, otherwise a copy. Always a copy of
    tensors without memory, and of those that are differentiated, since autograd would see the first only."""
    if len(bs) > 1 and all(type(b) in PLAIN for b in bs) and not library.needs_gradients(*bs):
        whole = joined(bs)
        if whole is not None:
            return whole
    return bs[0] if len(bs) == 1 else torch.cat([b.t() for b in bs]).t()


def _backward(ctx: Any, dgathered: torch.Tensor | None, dy: torch.Tensor | None) -> tuple[Any, ...]:
    kept, *bs = ctx.saved_tensors
    needs_a, needs_b = ctx.needs_input_grad[:2]
    dgathered = dgathered if ctx.has_gathered else None
    dy = None if dy is None else library.dense(dy)
    da = None
    if needs_a:
        da = row_gradient_of_both(dy, bs[0] if dy is None else _side_by_side(bs), dgathered, ctx.rows, ctx.group)
    dbs: list[torch.Tensor | None] = [None] * len(needs_b)
    if any(needs_b) and (dy is not None or ctx.save == "sharded"):  # gathering again is for all ranks
        wanted = [i for i, needed in enumerate(needs_b) if needed and dy is not None]
        right = kept.new_empty(ctx.rows, 0) if dy is None else dy
        if dy is not None and len(wanted) < len(needs_b):
            parts = dy.split(ctx.widths, dim=1)
            right = library.dense(torch.cat([parts[i] for i in wanted], dim=1))
        if ctx.save == "gathered":
            whole = library.weight_gradient(kept, right, ctx.by_columns)
        else:
            whole = weight_gradient(kept, right, ctx.by_columns, ctx.group)
        for i, db in zip(wanted, whole.split([ctx.widths[i] for i in wanted], dim=1)):
            dbs[i] = db
    return da, dbs, None, None, None, None


library.define(
    "all_gather_matmul_list",
    # no default: PyTorch leaves out arguments that are their default, and gradients of lists must match the arguments
    "(Tensor a, Tensor[] bs, str group, str save, bool return_gathered, int[]? config) -> (Tensor, Tensor)",
    multiply, _fake, save=_save, backward=_backward,
)  # fmt: skip
