"""all_gather_matmul: y = the concatenation of every rank's a, times this rank's b, in one kernel per rank.

What it computes. Every rank holds rows a [m, k] of a tall matrix and its own b [k, n]. The result on
each rank is the whole tall matrix [world*m, k] times its b.

Who does what. One persistent launch per rank; the program id of a CTA determines its role (kernel.py):

- `send` (only with several nodes, or if TMA cannot read a): copies the rank's rows into its own
  workspace, chunk by chunk, and posts requests to write each chunk to its counterpart (the rank with the
  same local rank) in every other node. So a row crosses from one node to another only once. Contiguous
  rows that are already in the symmetric heap are sent directly, without the copy.
- `intra`: pushes the rank's rows to the other ranks of its node, chunk by chunk, and signals each chunk.
  Then it forwards the rows that arrive from other nodes in the same way.
- `compute`: multiplies tiles in the order in which their rows arrive: the rank's own rows, those of its
  node, those of other nodes. Before a tile reads rows, the CTA waits for their chunks.
- `send` and `intra` CTAs join the compute when their transfers are done, with tiles of the rank's own
  rows that were reserved for them (see lang/roles.py).

Few rows in one node take the kernel in few_rows.py, in which all CTAs push and then compute; large ones on Hopper take
that in hopper.py. All follow the same protocol.

Signals. `arrived[parity, rank, chunk]`: this chunk of that rank's rows is in my workspace. It holds an
epoch and only grows.

Why buffers are safe. The workspace and the `arrived` signals are double buffered: the parity of the epoch
selects the half. In epoch e, a rank writes into a peer's half without a handshake. A rank leaves an epoch
only after rows of every rank have arrived. (This holds even if it has no columns to compute. Calls
without rows are not launched.) So a rank in epoch e knows that every rank has sent rows of e-1. A rank
that has sent rows of e-1 had left e-2, the last epoch that read this half. The signals must be double
buffered too, because the network guarantees no order: with a single half, the signal of epoch e+1 could
overtake the data of epoch e and satisfy its wait. A rank that has left e-2 has seen all arrivals of e-2,
so no transfer of this parity is in flight any more, and the rows staged for sending are free as well.

Why it cannot deadlock. `send` waits only for the proxy, `intra` for `send` CTAs of other nodes, `compute`
for both. So a CTA waits only for CTAs with lower program ids, on any rank, and a launch waits only for
launches of the same epoch. Waits have a timeout nevertheless.

What it costs. 2*world*m*n*k FLOPs. Each rank writes (gpus-1)*nodes*m*k elements over NVLink and
(nodes-1)*m*k over the network. CTAs that copy are lost to the compute until they join it. The workspace
takes 2*world*m*k elements per rank.

Rejected alternatives. Pulling (each rank reads from its peers) requires a in the symmetric heap and reads
it once per peer. Dynamic scheduling with an atomic counter: see lang/roles.py. Reading the rank's own rows
through the workspace costs another copy of m*k elements, so they are read from a directly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from mkernel.ops import library
from mkernel.ops.all_gather_matmul import call, several
from mkernel.ops.all_gather_matmul.call import TUNABLE, prepare
from mkernel.ops.all_gather_matmul.plan import Plan, plan
from mkernel.runtime.collective import traceable
from mkernel.runtime.config import Config
from mkernel.runtime.errors import ArgumentError
from mkernel.runtime.group import current
from mkernel.runtime.operands import overlap

__all__ = ["TUNABLE", "all_gather_matmul", "explain", "prepare"]


@traceable(call.repeat)
def all_gather_matmul(
    a: torch.Tensor,
    b: torch.Tensor | Sequence[torch.Tensor],
    *,
    group: Any = None,
    out: torch.Tensor | None = None,
    return_gathered: bool = False,
    gather_dim: int = 0,
    bias: torch.Tensor | None = None,
    save: str = "sharded",
    config: Config | None = None,
) -> Any:
    """Gather every rank's `a` and multiply it by this rank's `b`, overlapped, in one kernel.

    Differentiable in a, b and bias. The gradient of a is a fused GEMM + reduce-scatter, that of b a fused
    all-gather + GEMM over the gathered rows.

    Args:
        a: [..., k], this rank's rows, in bf16, fp16 or fp32. Shape and dtype must be the same on every rank.
            Any strides.
        b: [k, n]; n may differ between ranks. A transposed view (`w.t()`) is read without a copy. Or a list of such
            matrices, which are multiplied with the same gathered rows: in one product if they lie side by side in
            memory, such as `w[:n].t()` and `w[n:].t()`; otherwise only the first is overlapped with the transfers.
        group: the group to gather over: a mk.Group, a ProcessGroup, a DeviceMesh of one dimension, or the name of a
            group; the current group by default.
        out: tensor for the result; must not overlap a or b. Not for a list of b, and not with gradients.
        return_gathered: also return the gathered a.
        gather_dim: the dimension of a that is gathered; not the last one.
        bias: [n], added to every row of the result. Not for a list of b.
        save: what the gradient of b keeps: "sharded", this rank's rows, which are gathered again in the backward
            pass, or "gathered", all rows, which takes world times the memory and saves that transfer.
        config: tiles, chunks and CTAs; None selects defaults.

    Returns:
        [..., n], in a's dtype, where gather_dim is world times as long and in rank order; accumulated in fp32. For a
        list of b, a list, whose tensors are columns of one matrix. With return_gathered, a pair (result, gathered
        a).

    Raises:
        ArgumentError: an argument is invalid; nothing has been launched.
        CommTimeout: a peer did not arrive within the group's timeout. On a GPU, where calls return before
            they are done, the next call on the group or `group.synchronize()` raises it.
    """
    _check_save(save)
    if isinstance(b, (list, tuple)):
        return _several(a, b, group, out, return_gathered, gather_dim, bias, save, config)
    a, one, bias = library.autocast(a, b, bias)
    return _one(a, one, bias, group, out, return_gathered, gather_dim, save, config)


def _one(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, group: Any, out: torch.Tensor | None,
    return_gathered: bool, gather_dim: int, save: str, config: Config | None,
) -> Any:  # fmt: skip
    """A call with one b."""
    if not library.are_operands(a, b, bias, out):
        dim, rows, matrix = 0, library.rows_to_refuse(a), out
    elif a.dim() == 2 and gather_dim == 0:
        dim, rows, matrix = 0, a, out
    else:
        dim = library.check_dim("gather_dim", gather_dim, a, "a")
        rows, matrix = library.as_rows(a, dim), None
        if out is not None:
            shape = (*a.shape[:dim], library.size_of(group) * a.shape[dim], *a.shape[dim + 1 : -1], b.shape[-1])
            matrix = library.out_as_rows(out, shape, dim)
    check_bias(bias, rows, b, out)
    library.refuse_transforms(a=a, b=b, bias=bias)
    y, gathered = _run(rows, b, group, matrix, return_gathered, save, config)
    if bias is not None:
        traced = library.needs_gradients(y, bias) or torch.compiler.is_compiling()
        y = y + bias if traced and out is None else y.add_(bias)
    y = out if out is not None else _unflatten(y, a, dim, group)
    return (y, _unflatten(gathered, a, dim, group)) if return_gathered else y


def _run(
    a: torch.Tensor, b: torch.Tensor, group: Any, out: torch.Tensor | None, return_gathered: bool, save: str,
    config: Config | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """A call on matrices: (result, gathered rows if they are returned)."""
    if not library.needs_dispatcher(a, b, out):
        return call.all_gather_matmul(a, b, group=group, out=out, return_gathered=return_gathered, config=config)
    library.refuse_out_with_gradients(out, a, b)
    name, numbers = library.name_of(group), library.encoded(config)
    if out is not None:
        gathered = torch.ops.mkernel.all_gather_matmul_out(a, b, name, return_gathered, numbers, out)
        return out, gathered if return_gathered else None
    if return_gathered or (save == "gathered" and library.needs_gradients(b)):
        y, gathered = torch.ops.mkernel.all_gather_matmul_gathered(a, b, name, numbers)
        return y, gathered if return_gathered else None
    return torch.ops.mkernel.all_gather_matmul(a, b, name, numbers), None


def _several(
    a: torch.Tensor, bs: Sequence[torch.Tensor], group: Any, out: Any, return_gathered: bool, gather_dim: int,
    bias: Any, save: str, config: Config | None,
) -> Any:  # fmt: skip
    """A call with a list of b."""
    if not bs:
        raise ArgumentError("b is an empty list: pass at least one matrix [k, n]")
    for name, value in (("out", out), ("bias", bias)):
        if value is not None:
            raise ArgumentError(f"{name} cannot be combined with a list of b: call all_gather_matmul for each b")
    a, *bs = library.autocast(a, *bs)
    several.check_list(a, bs)
    library.refuse_transforms(a=a, **{f"b[{i}]": b for i, b in enumerate(bs)})
    dim = library.check_dim("gather_dim", gather_dim, a, "a")
    rows = library.as_rows(a, dim)
    if not library.needs_gradients(*bs):
        save = "sharded"  # nothing is saved
    given = (rows, bs, library.name_of(group), save, return_gathered, library.encoded(config))
    if library.needs_dispatcher(a, *bs):
        gathered, y = torch.ops.mkernel.all_gather_matmul_list(*given)
    else:
        gathered, y = several.multiply(*given)
    results = [_unflatten(y, a, dim, group) for y in several.split(y, bs)]
    return (results, _unflatten(gathered, a, dim, group)) if return_gathered else results


def _unflatten(matrix: torch.Tensor | None, a: torch.Tensor, dim: int, group: Any) -> Any:
    """A matrix with gathered rows, in the dimensions of a."""
    if matrix is None or a.dim() == 2:
        return matrix
    return library.from_rows(matrix, a.shape[:-1], dim, library.size_of(group) * a.shape[dim])


def _check_save(save: str) -> None:
    if save not in ("sharded", "gathered"):
        raise ArgumentError(f"save must be 'sharded' or 'gathered', got {save!r}")


def check_bias(bias: Any, a: torch.Tensor, b: torch.Tensor, out: Any, dtype: torch.dtype | None = None) -> None:
    """Refuse a bias that cannot be added to the result, whose dtype is that of a unless it is given."""
    if bias is None or not library.are_operands(a, b):
        return  # the call refuses a and b
    if not isinstance(bias, torch.Tensor) or bias.dim() != 1 or bias.shape[0] != b.shape[1]:
        got = f"shape {tuple(bias.shape)}" if isinstance(bias, torch.Tensor) else type(bias).__name__
        raise ArgumentError(f"bias must be a vector of {b.shape[1]} elements, one for each column of b; got {got}")
    if bias.dtype != (dtype or a.dtype) or bias.device != a.device:
        right = f"{'a' if dtype is None else 'the result'} is {dtype or a.dtype} on {a.device}"
        raise ArgumentError(f"bias is {bias.dtype} on {bias.device}, but {right}: they must be the same")
    if isinstance(out, torch.Tensor):
        library.refuse_out_with_gradients(out, bias)
        if not library.needs_dispatcher(a, b, bias, out) and overlap(out, bias):
            raise ArgumentError("out overlaps bias in memory: it would be overwritten before the bias is added")


def explain(
    a: torch.Tensor,
    b: torch.Tensor | Sequence[torch.Tensor],
    *,
    group: Any = None,
    out: torch.Tensor | None = None,
    return_gathered: bool = False,
    gather_dim: int = 0,
    bias: torch.Tensor | None = None,
    save: str = "sharded",
    config: Config | None = None,
) -> Plan:
    """The plan that `all_gather_matmul` would execute with these arguments; for a list of b, that of the launch:
    of all of them if they lie side by side in memory, otherwise of the first."""
    group = current(group)
    one: Any = b
    _check_save(save)
    if isinstance(b, (list, tuple)):
        several.check_list(a, b)
        whole = several.joined(b)
        keeps = whole is None or return_gathered or (save == "gathered" and library.needs_gradients(*b))
        one = b[0] if whole is None else whole
        return explain(a, one, group=group, return_gathered=keeps, gather_dim=gather_dim, save=save, config=config)
    if not library.are_operands(a, one, bias, out):
        a = library.rows_to_refuse(a)
    elif a.dim() != 2 or gather_dim != 0:
        dim = library.check_dim("gather_dim", gather_dim, a, "a")
        a, out = library.as_rows(a, dim), None
    call.check(group, a, one, out, config)
    check_bias(bias, a, one, out)
    if out is None:
        out = torch.empty((group.size * a.shape[0], one.shape[1]), dtype=a.dtype, device=a.device)
    chosen = call.choose(group, a, one, config)
    decided = plan(group, a, one, out, return_gathered, chosen)
    return replace(decided, reasons=(*decided.reasons, TUNABLE.origin(config, chosen)))
