"""all_gather_matmul: y = concat of every rank's a, times this rank's b, in one kernel per rank.

What it computes. Every rank holds rows a [m, k] of a tall matrix and its own b [k, n]. The result on
each rank is the whole tall matrix [world*m, k] times its b.

Who does what. One persistent launch per rank; a CTA takes its role from its program id (kernel.py):

- `send` (only with several nodes, or when a's own rows cannot be read by TMA): copies the rank's rows
  into its own workspace, chunk by chunk, and asks the network to write each chunk to the rank of the
  same local index in every other node. A row crosses between two nodes once. Rows that already lie
  in the symmetric heap, contiguously, are sent from where they are.
- `intra`: pushes the rank's rows to the other ranks of its node, chunk by chunk, and signals each
  chunk. Then it does the same with the rows that arrive from other nodes, so the node spreads them.
- `compute`: takes tiles in the order in which their rows arrive: its own rows, those of the node,
  those of other nodes. Before the first use of rows it waits for their chunks.
- send and intra CTAs join the compute when they are done, with tiles of the rank's own rows that were
  left for them (see lang/roles.py).

What is signalled. `arrived[parity, rank, chunk]`: the chunk of that rank's rows is in my workspace. It
holds epochs and only grows.

Why buffers are safe. The workspace and the arrival signals have two halves, used in turn by the
epoch's parity. Epoch e writes into a peer's half without asking: a rank leaves an epoch only when rows of
every rank have arrived (also if it has no columns to compute, and calls without rows are not launched), so
a rank in epoch e knows that every rank has sent rows of e-1. That rank had left e-2 then, the last
epoch that read this half. The arrival signals need two halves too, because the
network promises no order: with one, the signal of epoch e+1 could overtake the data of epoch e and
satisfy its wait. A rank that has left e-2 has seen all arrivals of e-2, so nothing of that
parity is in flight any more; that also frees the rows that were staged for sending.

Why it cannot deadlock. send waits for nobody but the proxy, intra for other nodes' sends, compute for
both. So in every rank CTAs wait only for CTAs with lower program ids, of any rank, and
the launch of any rank waits only for launches of the same epoch. Waits have a timeout all the same.

What it costs. FLOPs 2*world*m*n*k; each rank writes (gpus-1)*nodes*m*k elements over NVLink and
(nodes-1)*m*k over the network, and its CTAs that copy are lost to the compute until they join it.
Workspace: 2*world*m*k elements per rank.

Ways that lost. Pulling (each rank reads from its peers) needs a's rows in the symmetric heap and
reads them once per peer. Handing out tiles by an atomic counter: see lang/roles.py. Reading own rows
through the workspace costs one more copy of m*k, so they are read where they are.
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
        a: [m, k], this rank's rows; the same shape and dtype on every rank. Any strides.
        b: [k, n]; n may differ between ranks. A transposed view (`w.t()`) is read as it is.
        group: the group to gather over; the current one by default.
        out: [world*m, n], where to put the result; must not overlap a or b.
        return_gathered: also return the gathered a, [world*m, k].
        config: tiles, chunks and CTAs; None takes good defaults.

    Returns:
        [world*m, n], the rows in rank order; with return_gathered a pair (result, gathered a).
        bf16, fp16 or fp32, accumulated in fp32.

    Raises:
        ArgumentError: before anything is launched.
        CommTimeout: a peer did not come within the group's timeout. On a GPU, where calls return
            before they are done, the next call on the group or `group.synchronize()` raises it.
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
    """Refuse what can not be computed, naming the argument and the rule."""
    planning.check_given(config)
    for name, tensor in (("a", a), ("b", b), *([("out", out)] if out is not None else [])):
        check_tensor("all_gather_matmul", group, name, tensor)
    check_product(a, b)
    if out is not None:
        check_out(out, (group.size * a.shape[0], b.shape[1]), "world*m, n", a.dtype, {"a": a, "b": b})


def _choose(group: Group, a: torch.Tensor, b: torch.Tensor, given: Config | None) -> Config | None:
    """The configuration of a call. Chunks are the same on every rank, also if not all found a tuned one."""
    config = TUNABLE.choose(group, a.dtype, given, m=a.shape[0], n=b.shape[1], k=a.shape[1])
    if given is None and config is not None and config.chunk_rows is None:
        return replace(config, chunk_rows=chunk_rows(group, a, None))
    return config


def prepare(
    group: Group, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, gathered: torch.Tensor | None,
    config: Config | None,
) -> Launch:  # fmt: skip
    """The launch of a call whose arguments are in order. Collective when the workspace must grow."""
    config = _choose(group, a, b, config)
    plain = group.heap.find(a) is None
    key = (layout(a), layout(b), layout(out), plain, gathered is None, config, matmul_precision(a.dtype))
    decided = group.planned(key, lambda: plan(group, a, b, out, gathered is not None, config))
    memory = protocol.layout(group.size, a.shape[0], decided, a.dtype)
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
    """The plan that `all_gather_matmul` with these arguments would carry out."""
    group = current(group)
    _check(group, a, b, out, config)
    if out is None:
        out = torch.empty((group.size * a.shape[0], b.shape[1]), dtype=a.dtype, device=a.device)
    chosen = _choose(group, a, b, config)
    decided = plan(group, a, b, out, return_gathered, chosen)
    return replace(decided, reasons=(*decided.reasons, TUNABLE.origin(config, chosen)))
