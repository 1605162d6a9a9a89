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

from dataclasses import replace

import torch

from mkernel.ops.all_gather_matmul import kernel, protocol
from mkernel.ops.all_gather_matmul.plan import Plan, chunk_rows, plan
from mkernel.runtime import planning
from mkernel.runtime.config import Config
from mkernel.runtime.group import Group, collective, current
from mkernel.runtime.matmul import check_out, check_product, check_tensor
from mkernel.runtime.operands import layout, matmul_precision
from mkernel.runtime.tuned import Tunable
from mkernel.runtime.world import Launch

TUNABLE = Tunable("all_gather_matmul", agreed=("m", "k"), own=("n",), shared=("chunk_rows",))


@collective
def all_gather_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    group: Group | None = None,
    out: torch.Tensor | None = None,
    return_gathered: bool = False,
    config: Config | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Gather every rank's `a` and multiply it by this rank's `b`, overlapped, in one kernel.

    Args:
        a: [m, k], this rank's rows, in bf16, fp16 or fp32. Shape and dtype must be the same on every rank.
            Any strides.
        b: [k, n]; n may differ between ranks. A transposed view (`w.t()`) is read without a copy.
        group: the group to gather over; the current group by default.
        out: [world*m, n], tensor for the result; must not overlap a or b.
        return_gathered: also return the gathered a, [world*m, k].
        config: tiles, chunks and CTAs; None selects defaults.

    Returns:
        [world*m, n], in a's dtype, with the rows in rank order; accumulated in fp32. With return_gathered, a
        pair (result, gathered a).

    Raises:
        ArgumentError: an argument is invalid; nothing has been launched.
        CommTimeout: a peer did not arrive within the group's timeout. On a GPU, where calls return before
            they are done, the next call on the group or `group.synchronize()` raises it.
    """
    assert group is not None
    _check(group, a, b, out, config)
    config = _choose(group, a, b, config)
    m, k = a.shape
    group.agree("all_gather_matmul", m=m, k=k, dtype=a.dtype, chunk_rows=chunk_rows(group, a, config))
    rows = group.size * m
    if out is None:
        out = group.world.memory.empty(group.world_rank, (rows, b.shape[1]), a.dtype)
    gathered = group.world.memory.empty(group.world_rank, (rows, a.shape[1]), a.dtype) if return_gathered else None
    if a.numel():
        group.launch(prepare(group, a, b, out, gathered, config))
    else:
        group.confirm()
        out.zero_()
    return (out, gathered) if gathered is not None else out


def _check(group: Group, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, config: Config | None) -> None:
    """Reject invalid arguments. The error names the argument and the rule."""
    planning.check_given(config)
    for name, tensor in (("a", a), ("b", b), *([("out", out)] if out is not None else [])):
        check_tensor("all_gather_matmul", group, name, tensor)
    check_product(a, b)
    if out is not None:
        check_out(out, (group.size * a.shape[0], b.shape[1]), "world*m, n", a.dtype, {"a": a, "b": b})


def _choose(group: Group, a: torch.Tensor, b: torch.Tensor, given: Config | None) -> Config | None:
    """The configuration of a call. Chunks are the same on every rank, even if only some have a tuned configuration."""
    config = TUNABLE.choose(group, a.dtype, given, m=a.shape[0], n=b.shape[1], k=a.shape[1])
    if given is None and config is not None and config.chunk_rows is None:
        return replace(config, chunk_rows=chunk_rows(group, a, None))
    return config


def prepare(
    group: Group, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, gathered: torch.Tensor | None,
    config: Config | None,
) -> Launch:  # fmt: skip
    """The launch of a call with valid arguments. Collective if the workspace must grow."""
    config = _choose(group, a, b, config)
    plain = group.heap.find(a) is None
    key = (layout(a), layout(b), layout(out), plain, gathered is None, config, matmul_precision(a.dtype))
    decided = group.planned(key, lambda: plan(group, a, b, out, gathered is not None, config))
    memory = protocol.layout(group.size, a.shape[0], decided.chunks, decided.access.rows.row_stride, a.dtype)
    if decided.hopper:
        from mkernel.ops.all_gather_matmul import hopper  # Gluon is imported only where it runs

        return hopper.launch(group, decided, memory, a, b, out)
    return kernel.launch(group, decided, memory, a, b, out, gathered)


def explain(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    group: Group | None = None,
    out: torch.Tensor | None = None,
    return_gathered: bool = False,
    config: Config | None = None,
) -> Plan:
    """The plan that `all_gather_matmul` would execute with these arguments."""
    group = current(group)
    _check(group, a, b, out, config)
    if out is None:
        out = torch.empty((group.size * a.shape[0], b.shape[1]), dtype=a.dtype, device=a.device)
    chosen = _choose(group, a, b, config)
    decided = plan(group, a, b, out, return_gathered, chosen)
    return replace(decided, reasons=(*decided.reasons, TUNABLE.origin(config, chosen)))
