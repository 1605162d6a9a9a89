"""all_gather_scaled_matmul: all_gather_matmul of fp8 matrices with scales.

Kernels, roles, workspace and signals are those of all_gather_matmul. Half as many bytes travel as in bf16.

How scales travel. Each row of the workspace ends with the row's scales, aligned to 16 bytes: one, or one for each 128
of k. So whoever copies a chunk, within the node or into the memory that the network sends from, copies its rows and
its scales and then sets the one signal of the chunk; a request to the network carries both, as they are one piece of
memory. No signal, no wait and no request is added, and what holds for rows (the package's docstring) holds for scales.
A rank whose a has one scale for all rows sends it with every row: ranks may have different ones.

What it costs. A row takes k bytes and 4 for each scale, in the workspace rounded up to 128. What may lie between two
rows travels over the network, too: at k = 8192, 1.6%. As rows and scales lie in two tensors, the network never reads
them from there; a in the symmetric heap saves nothing here.

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
from mkernel.ops.all_gather_matmul.plan import Plan, chunk_rows, plan
from mkernel.runtime import planning
from mkernel.runtime.collective import collective, traceable
from mkernel.runtime.config import Config
from mkernel.runtime.group import Group, current
from mkernel.runtime.group_names import size_of
from mkernel.runtime.matmul import check_out, check_tensor
from mkernel.runtime.scaling import Scaling, check_operands, check_out_dtype, scaling_of

OP = "all_gather_scaled_matmul"
Gathered = tuple[torch.Tensor, torch.Tensor]  # rows of all ranks, and their scales

__all__ = ["TUNABLE", "all_gather_scaled_matmul", "explain", "prepare"]

prepare = call.prepare
TUNABLE = call.SCALED_TUNABLE


def _check(
    group: Group, a: torch.Tensor, b: torch.Tensor, scale_a: Any, scale_b: Any, out_dtype: Any, use_fast_accum: Any,
    out: torch.Tensor | None, config: Config | None,
) -> tuple[Scaling, torch.dtype]:  # fmt: skip
    """Reject invalid arguments. Returns the scales, and the dtype of the result."""
    planning.check_given(config)
    for name, tensor in (("a", a), ("b", b), *([("out", out)] if out is not None else [])):
        check_tensor(OP, group, name, tensor)
    check_operands(OP, group, a, b)
    dtype = check_out_dtype(out_dtype, out)
    scaling = scaling_of(group, a, b, scale_a, scale_b, use_fast_accum)
    if out is not None:
        inputs = {"a": a, "b": b, "scale_a": scaling.a, "scale_b": scaling.b}
        check_out(out, (group.size * a.shape[0], b.shape[1]), "world*m, n", dtype, inputs)
    return scaling, dtype


def _count_of(scale_a: torch.Tensor) -> int:
    """How many scales a row has."""
    return scale_a.shape[1] if scale_a.dim() == 2 else 1


@collective
def _call(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, *, group: Any,
    out_dtype: torch.dtype | None = None, use_fast_accum: bool = False, out: torch.Tensor | None = None,
    return_gathered: bool = False, config: Config | None = None,
) -> tuple[torch.Tensor, Gathered | None]:  # fmt: skip
    """A call on matrices: the result, and the gathered rows and scales if they are wanted."""
    passed = (a, b, out, scale_a, scale_b)
    key, made = group.prepared.repeat(OP, passed, (out_dtype, use_fast_accum, return_gathered, config), out=2)
    if made is not None:
        return made[0] if out is None else out, (made[-2], made[-1]) if return_gathered else None
    scaling, dtype = _check(group, a, b, scale_a, scale_b, out_dtype, use_fast_accum, out, config)
    config = call.choose(group, a, b, config, dtype, scaling)
    (m, k), rows = a.shape, group.size * a.shape[0]
    group.agree(OP, m=m, k=k, dtype=a.dtype, scales=scaling.count, chunk_rows=chunk_rows(group, a, config))
    empty, rank = group.world.memory.empty, group.world_rank
    y = empty(rank, (rows, b.shape[1]), dtype) if out is None else out
    gathered = None
    if return_gathered:
        gathered = empty(rank, (rows, k), a.dtype), empty(rank, (rows, _count_of(scale_a)), torch.float32)
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
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, *, group: Group,
    out_dtype: torch.dtype | None = None, use_fast_accum: bool = False, out: torch.Tensor | None = None,
    config: Config | None = None,
) -> torch.Tensor | None:  # fmt: skip
    """The result of a prepared call of `mk.all_gather_scaled_matmul`; None for others."""
    rest = (out_dtype, use_fast_accum, False, config)
    _, made = group.prepared.repeat(OP, (a, b, out, scale_a, scale_b), rest, out=2)
    return None if made is None else made[0] if out is None else out


@traceable(_repeat)
def all_gather_scaled_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
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
) -> Any:
    """Gather every rank's fp8 rows and their scales, and multiply them by this rank's `b`, overlapped, in one kernel.

    `mk.quantize` makes such matrices. There is no backward pass.

    Args:
        a: [..., k] in torch.float8_e4m3fn or torch.float8_e5m2: this rank's rows. Shape and dtype must be the same on
            every rank. Any strides.
        b: [k, n], in one of these dtypes; n may differ between ranks. A transposed view (`w.t()`) is read fastest.
        scale_a: what a must be multiplied by, in fp32: one element, or [..., 1], one for each row, or [..., k/128],
            rounded up, one for each block of 1 x 128. Each rank has its own.
        scale_b: what b must be multiplied by: one element, or [1, n], one for each column, or, if scale_a has blocks,
            [k/128, n/128], rounded up, one for each block of 128 x 128.
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
    if library.are_operands(a, b, bias, out) and (a.dim() != 2 or gather_dim != 0):
        dim = library.check_dim("gather_dim", gather_dim, a, "a")
        rows, scale_a = library.as_rows(a, dim), library.scale_as_rows(scale_a, a, dim)
        if out is not None:
            shape = (*a.shape[:dim], library.size_of(group) * a.shape[dim], *a.shape[dim + 1 : -1], b.shape[-1])
            matrix = library.out_as_rows(out, shape, dim)
    dtype = check_out_dtype(out_dtype, out)
    check_bias(bias, rows, b, out, dtype)
    library.refuse_forward_mode(bias=bias)
    y, gathered = _run(rows, b, scale_a, scale_b, group, dtype, use_fast_accum, matrix, return_gathered, config)
    if bias is not None:
        y = y + bias if torch.compiler.is_compiling() and out is None else y.add_(bias)
    results = [out if out is not None else y, *(gathered or ())]
    if a.dim() != 2:
        size = library.size_of(group) * a.shape[dim]
        first = 1 if out is not None else 0
        results[first:] = [library.from_rows(each, a.shape[:-1], dim, size) for each in results[first:]]
    return tuple(results) if return_gathered else results[0]


def _run(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, group: Any, dtype: torch.dtype,
    use_fast_accum: bool, out: torch.Tensor | None, return_gathered: bool, config: Config | None,
) -> tuple[torch.Tensor, Gathered | None]:  # fmt: skip
    """A call on matrices, by way of PyTorch's dispatcher where it must see it."""
    if not library.needs_dispatcher(a, b, scale_a, scale_b, out):
        return _call(
            a, b, scale_a, scale_b, group=group, out_dtype=dtype, use_fast_accum=use_fast_accum, out=out,
            return_gathered=return_gathered, config=config,
        )  # fmt: skip
    arguments = (a, b, scale_a, scale_b, library.name_of(group), dtype, use_fast_accum)
    numbers = library.encoded(config)
    if out is not None:
        found = torch.ops.mkernel.all_gather_scaled_matmul_out(*arguments, return_gathered, numbers, out)
        return out, found if return_gathered else None
    if return_gathered:
        y, rows, scales = torch.ops.mkernel.all_gather_scaled_matmul_gathered(*arguments, numbers)
        return y, (rows, scales)
    return torch.ops.mkernel.all_gather_scaled_matmul(*arguments, numbers), None


def explain(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
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
) -> Plan:
    """The plan that `all_gather_scaled_matmul` would execute with these arguments."""
    group = current(group)
    if library.are_operands(a, b, bias, out) and (a.dim() != 2 or gather_dim != 0):
        dim = library.check_dim("gather_dim", gather_dim, a, "a")
        a, scale_a, out = library.as_rows(a, dim), library.scale_as_rows(scale_a, a, dim), None
    scaling, dtype = _check(group, a, b, scale_a, scale_b, out_dtype, use_fast_accum, out, config)
    check_bias(bias, a, b, out, dtype)
    if out is None:
        out = torch.empty((group.size * a.shape[0], b.shape[1]), dtype=dtype, device=a.device)
    chosen = call.choose(group, a, b, config, dtype, scaling)
    decided = plan(group, a, b, out, return_gathered, chosen, scaling)
    return replace(decided, op=OP, reasons=(*decided.reasons, TUNABLE.origin(config, chosen)))


# -- torch.ops.mkernel.all_gather_scaled_matmul and its variants

_ARGUMENTS = "Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, str group, ScalarType out_dtype, bool use_fast_accum"


def _multiply(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, group: str, out_dtype: torch.dtype,
    use_fast_accum: bool, config: Any = None,
) -> torch.Tensor:  # fmt: skip
    return _call(
        a, b, scale_a, scale_b, group=group, out_dtype=out_dtype, use_fast_accum=use_fast_accum,
        config=library.decoded(config),
    )[0]  # fmt: skip


def _multiply_gathered(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, group: str, out_dtype: torch.dtype,
    use_fast_accum: bool, config: Any = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    y, gathered = _call(
        a, b, scale_a, scale_b, group=group, out_dtype=out_dtype, use_fast_accum=use_fast_accum, return_gathered=True,
        config=library.decoded(config),
    )  # fmt: skip
    assert gathered is not None
    return y, *gathered


def _multiply_into(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, group: str, out_dtype: torch.dtype,
    use_fast_accum: bool, return_gathered: bool, config: Any, out: torch.Tensor,
) -> Gathered:  # fmt: skip
    _, gathered = _call(
        a, b, scale_a, scale_b, group=group, out_dtype=out_dtype, use_fast_accum=use_fast_accum, out=out,
        return_gathered=return_gathered, config=library.decoded(config),
    )  # fmt: skip
    return gathered or (a.new_empty(0), scale_a.new_empty(0))


def _fake(
    a: torch.Tensor, b: torch.Tensor, scale_a: Any, scale_b: Any, group: str, out_dtype: torch.dtype, *others: Any,
    **named: Any,
) -> torch.Tensor:  # fmt: skip
    library.check_scaled_fake(a, b)
    return a.new_empty(size_of(group) * a.shape[0], b.shape[-1], dtype=out_dtype)


def _fake_gathered_of(a: torch.Tensor, scale_a: torch.Tensor, group: str) -> Gathered:
    rows = size_of(group) * a.shape[0]
    return a.new_empty(rows, a.shape[1]), scale_a.new_empty(rows, _count_of(scale_a))


def _fake_all(*arguments: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _fake(*arguments, **named), *_fake_gathered_of(arguments[0], arguments[2], arguments[4])


def _fake_into(*arguments: Any) -> Gathered:
    a, scale_a, group, return_gathered = arguments[0], arguments[2], arguments[4], arguments[7]
    if return_gathered:
        return _fake_gathered_of(a, scale_a, group)
    return a.new_empty(0), scale_a.new_empty(0)


library.define(OP, f"({_ARGUMENTS}, int[]? config=None) -> Tensor", _multiply, _fake, backward=library.no_backward(OP))
library.define(
    f"{OP}_gathered", f"({_ARGUMENTS}, int[]? config=None) -> (Tensor, Tensor, Tensor)", _multiply_gathered, _fake_all,
    backward=library.no_backward(OP),
)  # fmt: skip
library.define(
    f"{OP}_out",
    f"({_ARGUMENTS}, bool return_gathered, int[]? config, Tensor(a!) out) -> (Tensor, Tensor)",
    _multiply_into, _fake_into,
)  # fmt: skip
