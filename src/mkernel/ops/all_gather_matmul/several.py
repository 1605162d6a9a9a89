"""A list of b: the rows are gathered once, and multiplied by several matrices.

If the matrices lie side by side in memory, as views of one, they are multiplied as that one: one launch, in which the
whole product overlaps with the transfers. Otherwise the first is overlapped, the gathered rows are kept, and the others
are local products of them. Matrices are never copied, which would read and write all of them in each call.

The results are columns of one matrix in both cases, since in a graph PyTorch must know their strides before a call, and
cannot know addresses. It also takes results to be aligned to 16 bytes: if a matrix other than the last has a number of
columns that is not, the results are apart, and the matrices are not multiplied as one. Gradients of results are put
side by side, so that each gradient is one product, too.
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
from mkernel.runtime.prepared import ALIGNMENT, PLAIN


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
    """The matrix that has the columns of all of these, if they lie side by side in memory. None if they do not."""
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


def side_by_side(matrices: Sequence[torch.Tensor]) -> torch.Tensor:
    """One matrix with the columns of all: their memory if they lie side by side, otherwise a copy. Always a copy of
    tensors without memory, and of those that are differentiated, since autograd would see the first only."""
    if len(matrices) == 1:
        return matrices[0]
    if all(type(matrix) in PLAIN for matrix in matrices) and not library.needs_gradients(*matrices):
        whole = joined(matrices)
        if whole is not None:
            return whole
    if all(library.by_columns(matrix) for matrix in matrices):
        return torch.cat([matrix.t() for matrix in matrices]).t()
    return torch.cat(list(matrices), dim=1)


def multiply(
    a: torch.Tensor, bs: Sequence[torch.Tensor], group: str, save: str, return_gathered: bool, config: Numbers
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The gathered rows if they are saved or returned, otherwise an empty tensor; and the products."""
    keep = return_gathered or save == "gathered"
    given: dict[str, Any] = dict(group=group, config=library.decoded(config))
    whole = one_product(bs)
    if whole is not None:
        y, gathered = all_gather_matmul(a, whole, return_gathered=keep, **given)
        return gathered if gathered is not None else a.new_empty(0), _columns(y, bs)
    rows = size_of(group) * a.shape[0]
    if _are_columns(bs):
        ys = _columns(a.new_empty(rows, sum([b.shape[1] for b in bs])), bs)
    else:
        ys = [a.new_empty(rows, b.shape[1]) for b in bs]
    _, gathered = all_gather_matmul(a, bs[0], out=ys[0], return_gathered=True, **given)
    assert gathered is not None
    for y, b in zip(ys[1:], bs[1:], strict=True):
        torch.mm(gathered, b, out=y)
    return gathered if keep else a.new_empty(0), ys


def one_product(bs: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The matrix that these are multiplied as, or None."""
    return joined(bs) if _are_columns(bs) else None


def _are_columns(bs: Sequence[torch.Tensor]) -> bool:
    """Are the results columns of one matrix? Only if all are aligned in it."""
    return all([b.shape[1] * b.element_size() % ALIGNMENT == 0 for b in bs[:-1]])


def _columns(y: torch.Tensor, bs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The results in y. No views to PyTorch, which would not let callers overwrite them: they do not overlap."""
    parts = y.split([b.shape[1] for b in bs], dim=1)
    storage = y.untyped_storage()
    return [y.new_empty(0).set_(storage, part.storage_offset(), part.shape, part.stride()) for part in parts]


def _fake(
    a: torch.Tensor, bs: Sequence[torch.Tensor], group: str, save: str, return_gathered: bool, config: Numbers
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    for b in bs:
        fake(a, b, group)
    rows, total = size_of(group) * a.shape[0], sum([b.shape[1] for b in bs])
    keep = return_gathered or save == "gathered"
    gathered = a.new_empty(rows, a.shape[1]) if keep else a.new_empty(0)
    wide = _are_columns(bs)
    return gathered, [a.new_empty_strided((rows, b.shape[1]), (total if wide else b.shape[1], 1)) for b in bs]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    a, bs, ctx.group, ctx.save, _, _ = inputs
    ctx.has_gathered = output[0].dim() == 2
    ctx.by_columns, ctx.rows = library.by_columns(bs[0]), output[1][0].shape[0]
    kept = output[0] if ctx.save == "gathered" else a
    needed = any(b.requires_grad for b in bs)
    ctx.save_for_backward(kept if needed else None, *(b if a.requires_grad else None for b in bs))
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dgathered: torch.Tensor | None, dys: list[Any]) -> tuple[Any, ...]:
    kept, *bs = ctx.saved_tensors
    needs_a, needs_b = ctx.needs_input_grad[:2]
    used = [i for i, dy in enumerate(dys) if dy is not None]
    dgathered = dgathered if ctx.has_gathered else None
    wide = library.dense(side_by_side([dys[i] for i in used])) if used else None
    da = None
    if needs_a:
        right = side_by_side([bs[i] for i in used]) if used else bs[0]
        da = row_gradient_of_both(wide, right, dgathered, ctx.rows, ctx.group)
    dbs: list[torch.Tensor | None] = [None] * len(bs)
    wanted = [i for i in used if needs_b[i]]
    if any(needs_b) and (wanted or ctx.save == "sharded"):  # gathering again is for all ranks
        if wanted != used or wide is None:
            wide = library.dense(side_by_side([dys[i] for i in wanted])) if wanted else kept.new_empty(ctx.rows, 0)
        if ctx.save == "gathered":
            whole = library.weight_gradient(kept, wide, ctx.by_columns)
        else:
            whole = weight_gradient(kept, wide, ctx.by_columns, ctx.group)
        for i, db in zip(wanted, whole.split([dys[i].shape[1] for i in wanted], dim=1)):
            dbs[i] = db
    return da, dbs, None, None, None, None


library.define(
    "all_gather_matmul_list",
    # no default: PyTorch leaves out arguments that are their default, and gradients of lists must match the arguments
    "(Tensor a, Tensor[] bs, str group, str save, bool return_gathered, int[]? config) -> (Tensor, Tensor[])",
    multiply, _fake, save=_save, backward=_backward,
)  # fmt: skip
