"""all_gather_scaled_matmul: all_gather_matmul of fp8 matrices with scales.

Kernels, roles, workspace and signals are those of all_gather_matmul. Half as many bytes travel as in bf16.

How scales travel. Each row of the workspace ends with the row's scales, aligned to 16 bytes: one, or one for each 128
of k. So a CTA that copies a chunk, within the node or into the memory that the network sends from, copies its rows and
its scales, and then sets the single signal of the chunk. A request to the network carries both, because they are
contiguous. No signal, wait or request is added, and the arguments for rows (the package's docstring) also hold for
scales. If a has one scale for all rows, a rank sends it with every row, because ranks may have different ones.

What it costs. A row takes k bytes and 4 bytes for each scale, rounded up to 128 in the workspace. The padding between
rows travels over the network, too: 1.6% at k = 8192. Because the caller's rows and scales are two tensors, the network
never reads directly from them, and allocating a in the symmetric heap saves nothing.

Quantizing (`recipe_a`). The kernel can quantize a, which is then bf16, fp16 or fp32. The bytes sent are the same as
after `mk.quantize`, so other ranks need not know which of the two a rank does, and may choose differently.

- A `send` CTA of the rank that holds a row quantizes it, once, into the rank's own workspace, followed by its scales.
  The CTA then signals the chunk in the rank's own workspace, and posts it to the other nodes.
- `intra` waits for that signal before it pushes a chunk of its own rank, as it does for chunks of other nodes.
- `compute` reads the rank's own rows from the workspace, too, and waits for their chunks as for all others. No CTA
  joins the compute, because every tile depends on transfers.

So `send` waits for the proxy alone, `intra` for `send`, and `compute` for both: as always, CTAs wait only for CTAs with
lower program ids. This saves a launch. It costs the `send` CTAs, which are lost to the compute, and a second pass over
a row if it has one scale. The kernel for few rows does not quantize. Rejected: letting all CTAs quantize first, which
would take less time, but then `intra` would wait for CTAs with higher program ids.

Large calls in one node take the kernel in hopper.py on Hopper, unless they quantize or return the gathered rows.

Rejected alternatives. A buffer of their own for scales: the network keeps no order between two requests, so each chunk
would need a second signal. Chunks that begin with their scales: a tile of rows from two chunks would need two
descriptors.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from mkernel.ops import library
from mkernel.ops.all_gather_matmul import call, check_bias
from mkernel.ops.all_gather_matmul.plan import Plan, as_gathered, chunk_rows, plan
from mkernel.ops.all_gather_matmul.scaled import registration
from mkernel.ops.all_gather_matmul.scaled.registration import OP, Gathered
from mkernel.runtime import planning
from mkernel.runtime.collective import collective, traceable
from mkernel.runtime.config import Config
from mkernel.runtime.errors import ArgumentError
from mkernel.runtime.group import Group, current
from mkernel.runtime.matmul import check_out, check_tensor
from mkernel.runtime.scaling import (
    Scaling,
    check_operands,
    check_out_dtype,
    check_recipe_a,
    scaling_of,
    scaling_of_recipe,
)

__all__ = ["TUNABLE", "all_gather_scaled_matmul", "explain", "prepare"]

prepare = call.prepare
TUNABLE = call.SCALED_TUNABLE


def _check(
    group: Group, a: torch.Tensor, b: torch.Tensor, scale_a: Any, scale_b: Any, out_dtype: Any, use_fast_accum: Any,
    out: torch.Tensor | None, config: Config | None, recipe_a: Any, dtype_a: Any,
) -> tuple[Scaling, torch.dtype]:  # fmt: skip
    """Reject invalid arguments. Returns the scales, and the dtype of the result."""
    planning.check_given(config)
    for name, tensor in (("a", a), ("b", b), *([("out", out)] if out is not None else [])):
        check_tensor(OP, group, name, tensor)
    recipe = check_recipe_a(scale_a, recipe_a, dtype_a)
    if recipe is None and scale_a is None:
        raise ArgumentError(
            f"scale_a is None, and so is recipe_a: pass a and its scales, as mk.quantize returns them, or the recipe "
            f"by which the kernel quantizes a ({a.dtype}), such as recipe_a='RowWise'"
        )
    check_operands(OP, group, a, b, recipe)
    dtype = check_out_dtype(out_dtype, out)
    if recipe is None:
        scaling = scaling_of(group, a, b, scale_a, scale_b, use_fast_accum)
    else:
        scaling = scaling_of_recipe(group, a, b, recipe, dtype_a, scale_b, use_fast_accum)
    if out is not None:
        inputs = {"a": a, "b": b} | scaling.tensors
        check_out(out, (group.size * a.shape[0], b.shape[1]), "world*m, n", dtype, inputs)
    return scaling, dtype


@collective
def _call(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor | None, scale_b: torch.Tensor, *, group: Any,
    out_dtype: torch.dtype | None = None, use_fast_accum: bool = False, out: torch.Tensor | None = None,
    return_gathered: bool = False, config: Config | None = None, recipe_a: Any = None,
    dtype_a: torch.dtype = torch.float8_e4m3fn,
) -> tuple[torch.Tensor, Gathered | None]:  # fmt: skip
    """A call on matrices: the result, and the gathered rows and scales if they are wanted."""
    passed = (a, b, out, scale_a, scale_b)
    rest = (out_dtype, use_fast_accum, return_gathered, config, recipe_a, dtype_a)
    key, made = group.prepared.repeat(OP, passed, rest, out=2)
    if made is not None:
        return made[0] if out is None else out, (made[-2], made[-1]) if return_gathered else None
    planning.check_flag("return_gathered", return_gathered)
    scaling, dtype = _check(group, a, b, scale_a, scale_b, out_dtype, use_fast_accum, out, config, recipe_a, dtype_a)
    narrow = as_gathered(a, scaling)
    config = call.choose(group, narrow, b, config, dtype, scaling)
    (m, k), rows = a.shape, group.size * a.shape[0]
    chunk = chunk_rows(group, narrow, config, scaling.quantizes is not None)
    group.agree(OP, m=m, k=k, dtype=narrow.dtype, scales=scaling.count, chunk_rows=chunk)
    empty, rank = group.world.memory.empty, group.world_rank
    y = empty(rank, (rows, b.shape[1]), dtype) if out is None else out
    gathered = None
    if return_gathered:
        count = registration.count_of(a, scale_a, recipe_a)
        gathered = empty(rank, (rows, k), narrow.dtype), empty(rank, (rows, count), torch.float32)
    if a.numel():
        made = [y] * (out is None) + list(gathered or ())
        of_rows, of_scales = gathered or (None, None)
        launch = prepare(group, a, b, y, of_rows, config, scaling, of_scales)
        group.launch(launch, key, passed, made)
    else:
        group.confirm()
        y.zero_()
        if gathered is not None:
            gathered[1].fill_(1.0)
    return y, gathered


def _repeat(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor | None, scale_b: torch.Tensor, *, group: Group,
    out_dtype: torch.dtype | None = None, use_fast_accum: bool = False, out: torch.Tensor | None = None,
    config: Config | None = None, recipe_a: Any = None, dtype_a: torch.dtype = torch.float8_e4m3fn,
) -> torch.Tensor | None:  # fmt: skip
    """The result of a prepared call of `mk.all_gather_scaled_matmul`; None for others."""
    dtype = out_dtype or (torch.bfloat16 if out is None else out.dtype)  # as `_call` is given it
    rest = (dtype, use_fast_accum, False, config, getattr(recipe_a, "name", recipe_a), dtype_a)
    _, made = group.prepared.repeat(OP, (a, b, out, scale_a, scale_b), rest, out=2)
    return None if made is None else made[0] if out is None else out


registration.define(_call)


@traceable(_repeat)
def all_gather_scaled_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor | None,
    scale_b: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
    group: Any = None,
    out: torch.Tensor | None = None,
    return_gathered: bool = False,
    gather_dim: int = 0,
    config: Config | None = None,
    recipe_a: Any = None,
    dtype_a: torch.dtype = torch.float8_e4m3fn,
) -> Any:
    """Gather every rank's fp8 rows and their scales, and multiply them by this rank's `b`, overlapped, in one kernel.

    `mk.quantize` makes such matrices; or the kernel quantizes a as it sends it, with the same result. There is no
    backward pass.

    Args:
        a: [..., k] in torch.float8_e4m3fn or torch.float8_e5m2: this rank's rows. Shape and dtype must be the same on
            every rank. Any strides. With recipe_a: in bf16, fp16 or fp32.
        b: [k, n], in one of these dtypes; n may differ between ranks. A transposed view (`w.t()`) is read fastest.
        scale_a: what a must be multiplied by, in fp32: one element, or [..., 1], one for each row, or [..., k/128],
            rounded up, one for each block of 1 x 128. Each rank has its own. With recipe_a: None.
        scale_b: what b must be multiplied by: one element, or [1, n], one for each column, or, if a has scales of
            blocks, [k/128, n/128], rounded up, one for each block of 128 x 128.
        bias: [n], added to every row of the result, in its dtype.
        out_dtype: the dtype of the result: torch.bfloat16 (default), torch.float16 or torch.float32.
        use_fast_accum: keep sums in the tensor cores, with fewer bits. By default, they are added up in fp32 every 128
            of k. Not with scales of blocks.
        group: the group to gather over: a mk.Group, a ProcessGroup, a DeviceMesh of one dimension, or the name of a
            group; the current group by default.
        out: tensor for the result; must not overlap an input.
        return_gathered: also return the gathered a and its scales, [..., 1] or [..., k/128].
        gather_dim: the dimension of a that is gathered; not the last one.
        config: tiles, chunks and CTAs; None selects defaults.
        recipe_a: quantize a in the kernel, once, on the rank that has it: "RowWise" or "BlockWise1x128", or such a
            member of torch.nn.functional.ScalingType. Ranks may choose differently.
        dtype_a: the dtype to which a is then quantized.

    Returns:
        [..., n], where gather_dim is world times as long and in rank order. With return_gathered, (result, gathered a,
        its scales).

    Raises:
        ArgumentError: an argument is invalid; nothing has been launched.
        CommTimeout: a peer did not arrive within the group's timeout. On a GPU, where calls return before
            they are done, the next call on the group or `group.synchronize()` raises it.
    """
    library.refuse_gradients(OP, a=a, b=b, scale_a=scale_a, scale_b=scale_b, bias=bias)
    rows, matrix, dim = a, out, 0
    if not library.are_operands(a, b, bias, out):
        rows = library.rows_to_refuse(a)
    elif a.dim() != 2 or gather_dim != 0:
        dim = library.check_dim("gather_dim", gather_dim, a, "a")
        rows, scale_a = library.as_rows(a, dim), library.scale_as_rows(scale_a, a, dim)
        if out is not None:
            shape = (*a.shape[:dim], library.size_of(group) * a.shape[dim], *a.shape[dim + 1 : -1], b.shape[-1])
            matrix = library.out_as_rows(out, shape, dim)
    dtype = check_out_dtype(out_dtype, out)
    check_bias(bias, rows, b, out, dtype)
    library.refuse_transforms(bias=bias)
    given: dict[str, Any] = dict(out_dtype=dtype, use_fast_accum=use_fast_accum, config=config)
    if recipe_a is not None:
        given |= dict(recipe_a=getattr(recipe_a, "name", recipe_a), dtype_a=dtype_a)
    y, gathered = _run(rows, b, scale_a, scale_b, group, matrix, return_gathered, given)
    if bias is not None:
        y = y + bias if torch.compiler.is_compiling() and out is None else y.add_(bias)
    results = [out if out is not None else y, *(gathered or ())]
    if a.dim() != 2:
        size = library.size_of(group) * a.shape[dim]
        first = 1 if out is not None else 0
        results[first:] = [library.from_rows(each, a.shape[:-1], dim, size) for each in results[first:]]
    return tuple(results) if return_gathered else results[0]


def _run(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor | None, scale_b: torch.Tensor, group: Any,
    out: torch.Tensor | None, return_gathered: bool, given: dict[str, Any],
) -> tuple[torch.Tensor, Gathered | None]:  # fmt: skip
    """A call on matrices, by way of PyTorch's dispatcher where it must see it."""
    if not library.needs_dispatcher(a, b, scale_a, scale_b, out):
        return _call(a, b, scale_a, scale_b, group=group, out=out, return_gathered=return_gathered, **given)
    arguments = a, b, scale_a, scale_b, library.name_of(group)
    named = given | dict(config=library.encoded(given["config"]))
    if out is not None:
        found = torch.ops.mkernel.all_gather_scaled_matmul_out(
            *arguments, **named, return_gathered=return_gathered, out=out
        )
        return out, found if return_gathered else None
    if return_gathered:
        y, rows, scales = torch.ops.mkernel.all_gather_scaled_matmul_gathered(*arguments, **named)
        return y, (rows, scales)
    return torch.ops.mkernel.all_gather_scaled_matmul(*arguments, **named), None


def explain(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor | None,
    scale_b: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
    group: Any = None,
    out: torch.Tensor | None = None,
    return_gathered: bool = False,
    gather_dim: int = 0,
    config: Config | None = None,
    recipe_a: Any = None,
    dtype_a: torch.dtype = torch.float8_e4m3fn,
) -> Plan:
    """The plan that `all_gather_scaled_matmul` would execute with these arguments."""
    group = current(group)
    if not library.are_operands(a, b, bias, out):
        a = library.rows_to_refuse(a)
    elif a.dim() != 2 or gather_dim != 0:
        dim = library.check_dim("gather_dim", gather_dim, a, "a")
        a, scale_a, out = library.as_rows(a, dim), library.scale_as_rows(scale_a, a, dim), None
    scaling, dtype = _check(group, a, b, scale_a, scale_b, out_dtype, use_fast_accum, out, config, recipe_a, dtype_a)
    check_bias(bias, a, b, out, dtype)
    if out is None:
        out = torch.empty((group.size * a.shape[0], b.shape[1]), dtype=dtype, device=a.device)
    chosen = call.choose(group, as_gathered(a, scaling), b, config, dtype, scaling)
    decided = plan(group, a, b, out, return_gathered, chosen, scaling)
    return replace(decided, op=OP, reasons=(*decided.reasons, TUNABLE.origin(config, chosen)))
