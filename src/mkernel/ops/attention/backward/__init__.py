"""ring_attention_backward: the gradients of ring_attention, in one kernel per rank.

What it computes. Every rank holds its part of the sequence: query, key and value, the result of ring_attention with its
log-sum-exp, and the gradient of that result. It gets dq for its queries over the keys of all ranks, and dk and dv for
its keys over the queries of all ranks. kernel.py has the formulas.

How the work is divided. As in ring_attention, transfers and computation proceed unit by unit (a batch entry and a head
of keys), and a *round* moves one unit's keys and values from every rank. The gradient needs two kinds of sums, and each
belongs to the CTA that keeps it in registers, so that no sum depends on timing:

- A tile of dq is a sum over keys. A CTA owns a tile of queries and goes through the keys of all ranks.
- dk and dv of a block of keys are sums over queries. A CTA owns a block of keys of any rank, and goes through this
  rank's queries that see it, in all heads that share the keys. The result is this rank's *partial*. The owner of the
  keys adds up the partials of all ranks, in a fixed order.

Both recompute the weights, so there are 7 products where one pass over both would need 5. That pass would have to add
dq or dk and dv in memory, in any order (atomics) or in turns (each CTA would wait for another one).

Who does what. One persistent launch per rank; the program id of a CTA determines its role:

- `send` and `intra` move keys and values as in ring_attention, with the same code (ops/attention/transfer.py).
- `compute` CTAs first compute delta, one number per row (`_prepare`), and wait for each other. Then they do the tasks
  of the schedule (schedule.py): tiles of dq, blocks of keys, and *reductions*, which add up partials.
- `send` and `intra` CTAs join the compute when their transfers are done. In the kernel for Hopper, `intra` is a warp of
  each CTA instead (hopper.py).

Two kernels. The Triton kernel runs everywhere. The Gluon kernel is for Hopper: the same tasks, protocol and schedule,
with two blocks of 64 keys in a task. It runs wherever it can (choice.py).

Partials. A rank pushes its partial of a block, in fp32, to a slot of the rank of its node that has the owner's local
rank. With one node this is the owner. It has a slot for every rank of its node, and adds them in the order of ranks.
With several nodes, it first adds up the partials of its node for its counterparts, and posts each sum to its owner; the
owner adds the sums in the order of nodes, its own node's first. So partials cross from one node to another once, after
they were summed within the node. Keys that the mask hides from all rows of a rank are not sent to it, and it sends no
partials for them.

Signals: those of ring_attention for keys and values, and for each block `partial` and `node_sum` (protocol.py).

Why buffers are safe. The slots of keys and values: by the argument of ring_attention. Some CTA waits for every chunk
that a rank is sent: every block of keys within the range that the rank's rows see is a task. The slots of partials are
reused by round t + window, once their readers have finished the reductions of round t (`added`). A rank's own partial
shares its slot with the node's sum that the network reads. So the rank overwrites it only after the owner of those
keys, which received the sum, has finished its reductions, too. Between epochs: a rank writes a partial of another
rank's keys only after a chunk of them has arrived in this epoch. The chunk came from the owner or through the reducer,
which therefore has left the epoch before, and has waited there for all partials and sums that it was sent. Calls of
another shape may use the same memory for another purpose. So a rank does not leave an epoch before the network has read
all that it was asked to send (`wait_posted`).

Why it cannot deadlock. All CTAs of a launch are resident: the plan rejects more than fit. Every CTA does its tasks in
the order of the schedule, and the schedules of all ranks have the same order of batches: the compute of round t, then
the reductions of round t - 1 for other nodes, then those of round t - 1 or t - 2 of the rank's own keys. A task waits
only for batches before its own: compute of round t for chunks of round t, which are sent when round t - window is
freed, and for the reductions of round t - window; a reduction for the compute of its own round on other ranks; a
reduction of own keys also for those for other nodes. Reductions lag by less than the window, so those of round t -
window come before the compute of round t. The CTAs that copy before they compute have only tasks of the last `window`
rounds, for which no transfer waits. Waits have a timeout nevertheless.

What it costs. 14 * length * dim FLOPs for each query, head and rank that the query sees; 10 would be the minimum. In
units of one rank's keys and values in their dtype, a rank writes over NVLink at most (gpus-1)*nodes, as the forward
pass does, and (gpus-1)*nodes partials in fp32, twice as much for 16-bit types; over the network nodes-1, and as many
sums in fp32. With grouped heads, all of this is small. Memory: `steps` units of keys and values, as in the forward
pass; for the same rounds, (world + nodes - 1) / slots as many partials in fp32, where slots is world - 1 in one node
and world in several; and one fp32 number per row of queries. Both buffers are bounded by `steps`, for any length and
world size. If units are split into parts, sums of dq of one unit's rows take additional memory. Partials of heads of 96
columns take as much as those of 128, and those of 192 as much as those of 256. If keys and values differ in their
columns, both take slots of the wider ones.

Accuracy. Scores, sums and products are accumulated in fp32. Weights and gradients of scores are rounded to the dtype of
the input before they are multiplied. Partials are fp32, so the results are rounded once. The order of every sum depends
on the rank and the plan, never on timing: the same input gives the same bits.

Rejected alternatives. Sending dk and dv around the ring, one step behind the keys, as the usual ring does: each rank
would wait for the sums of its neighbour, and the order of the sum would still be fixed by the ring; a partial would
cross between nodes once for each rank instead of once. Keeping dq in memory and computing everything in one pass: see
above. A slot for the partials of the whole unit of every rank: the memory would grow with the world size.

Where to read on: protocol.py (the workspace and its signals), kernel.py (the Triton kernel); hopper.py, hopper_load.py
and hopper_sums.py (the Gluon kernel). On the host: choice.py, schedule.py, plan.py and launch.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from mkernel.ops.attention.backward import protocol
from mkernel.ops.attention.backward.launch import Tensors, launch
from mkernel.ops.attention.backward.plan import Plan, plan, tiles_of
from mkernel.ops.attention.backward.protocol import OP
from mkernel.ops.attention.run import (
    PACKED_PLANS_KEPT,
    check_config,
    check_heads,
    check_options,
    choose,
    result_shape,
    with_a_row,
)
from mkernel.ops.attention.sequences import Counts, Documents, Pattern, Scoring, pattern_of
from mkernel.runtime.collective import collective
from mkernel.runtime.config import Config
from mkernel.runtime.errors import ArgumentError
from mkernel.runtime.group import PLANS_KEPT, Group, current
from mkernel.runtime.matmul import check_tensor
from mkernel.runtime.operands import layout as layout_of
from mkernel.runtime.operands import matmul_precision
from mkernel.runtime.tuned import Tunable
from mkernel.runtime.world import Launch

TUNABLE = Tunable(OP, agreed=("batch", "heads", "kv_heads", "length", "dim", "causal", "zigzag"), own=(), shared=())


@collective
def ring_attention_backward(
    dout: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    dlse: torch.Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    softcap: float = 0.0,
    enable_gqa: bool = False,
    layout: str = "contiguous",
    cu_seqlens: Documents = None,
    window_size: tuple[int, int] | None = None,
    seq_lens: Counts = None,
    query_lens: Counts = None,
    group: Any = None,
    config: Config | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of `out, lse = ring_attention(query, key, value, return_lse=True)`, in one kernel. Autograd calls
    it; there is no need to call it directly.

    Args:
        dout: the gradient of out, in its shape and dtype. Any strides.
        query, key, value: as in `ring_attention`.
        out, lse: what `ring_attention` returned for them.
        dlse: the gradient of lse, in its shape, in fp32; None if nothing depends on lse.
        is_causal, scale, softcap, enable_gqa, layout, cu_seqlens, window_size, seq_lens, query_lens, group: as in
            `ring_attention`.
        config: tiles, chunks, CTAs, and `steps`, the size of the buffers for other ranks' keys, values and partial
            gradients.

    Returns:
        (dq, dk, dv): in the shapes and the dtype of query, key and value. A row that sees no key has zeros in dq. Sums
        over heads that share keys, and over the ranks, are in fp32, in an order that does not depend on timing.

    Raises:
        ArgumentError: an argument is invalid; nothing has been launched.
        CommTimeout: a peer did not arrive within the group's timeout. On a GPU, where calls return before
            they are done, the next call on the group or `group.synchronize()` raises it.
    """
    assert group is not None
    check_config(config, OP)
    _check(group, dict(dout=dout, query=query, key=key, value=value, out=out), lse, dlse)
    check_options(group, query, key, layout, enable_gqa, Scoring(scale, softcap))
    pattern = pattern_of(group, query, key, is_causal, layout, cu_seqlens, window_size, (seq_lens, query_lens))
    config = choose(TUNABLE, group, query, key, pattern, config, value)
    tiles = tiles_of(group, query, key, value, config)
    group.agree(
        OP, **pattern.shapes(query, key), value_dim=value.shape[3], dtype=query.dtype,
        is_causal=pattern.is_causal, layout=layout, cu_seqlens=pattern.documents, window_size=pattern.window,
        tile_n=tiles.tile_n, chunk_rows=tiles.chunk_rows, steps=tiles.steps,
    )  # fmt: skip
    empty = group.world.memory.empty
    dq, dk, dv = (empty(group.world_rank, tensor.shape, query.dtype) for tensor in (query, key, value))
    if not pattern.is_empty(query, key):
        dense = lse.contiguous(), None if dlse is None else dlse.contiguous()
        tensors = (dout, query, key, value, out, *dense, dq, dk, dv)
        rows = Tensors(*(with_a_row(group, tensor) for tensor in tensors))
        group.launch(prepare(group, rows, pattern, Scoring(scale, softcap), config))
    else:
        group.confirm()
        for gradient in (dq, dk, dv):
            gradient.zero_()
    return dq, dk, dv


def _check(group: Group, heads: dict[str, torch.Tensor], lse: torch.Tensor, dlse: torch.Tensor | None) -> None:
    """Reject invalid tensors. The error names the argument and the rule."""
    check_heads(OP, group, heads)
    query = heads["query"]
    shape = result_shape(query, heads["value"])
    for name in ("dout", "out"):
        if heads[name].shape != shape:
            raise ArgumentError(
                f"{name} is {tuple(heads[name].shape)}, but must be {shape}: as query, with value's dim"
            )
    for name, tensor in (("lse", lse), *([] if dlse is None else [("dlse", dlse)])):
        check_tensor(OP, group, name, tensor, dimensions=3)
        if tensor.dtype != torch.float32:
            raise ArgumentError(f"{name} has dtype {tensor.dtype}, but must have torch.float32")
        if tensor.shape != query.shape[:3]:
            raise ArgumentError(
                f"{name} is {tuple(tensor.shape)} and query is {tuple(query.shape)}: {name} must be "
                f"{tuple(query.shape[:3])}, a number per row and head"
            )


def prepare(
    group: Group, tensors: Tensors, pattern: Pattern, scoring: Scoring, config: Config | None
) -> Launch:  # fmt: skip
    """The launch of a call with valid arguments. Collective if the workspace must grow."""
    query, key, value = tensors.query, tensors.key, tensors.value
    config = choose(TUNABLE, group, query, key, pattern, config, value)
    layouts = tuple(layout_of(tensor) for tensor in tensors.inputs.values())
    mask = (pattern.is_causal, pattern.layout, scoring.softcap > 0)
    plan_key = (OP, layouts, query.dtype, *mask, config, matmul_precision(query.dtype))
    decided = group.planned(
        # documents may change with every call, and such a plan owns device memory: use it on one stream only
        (*plan_key, pattern, group.world.launcher.stream_key(group.world_rank) if pattern.has_spans else None),
        lambda: plan(group, tensors.inputs, pattern, scoring.softcap, config),
        kept=PACKED_PLANS_KEPT if pattern.has_spans else PLANS_KEPT,
    )
    group.keep_if_captured(decided)
    memory = protocol.layout(decided, query.dtype)
    # to the kernel, documents and windows are data; and a plan with documents must not live as long as the binary
    variant = (plan_key, pattern.binary, decided.config, decided.kernel, tensors.dlse is not None)
    return launch(group, decided, memory, tensors, scoring, variant)


def explain(
    dout: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    dlse: torch.Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    softcap: float = 0.0,
    enable_gqa: bool = False,
    layout: str = "contiguous",
    cu_seqlens: Documents = None,
    window_size: tuple[int, int] | None = None,
    seq_lens: Counts = None,
    query_lens: Counts = None,
    group: Any = None,
    config: Config | None = None,
) -> Plan:
    """The plan that `ring_attention_backward` would execute with these arguments."""
    group = current(group)
    check_config(config, OP)
    _check(group, dict(dout=dout, query=query, key=key, value=value, out=out), lse, dlse)
    check_options(group, query, key, layout, enable_gqa, Scoring(scale, softcap))
    pattern = pattern_of(group, query, key, is_causal, layout, cu_seqlens, window_size, (seq_lens, query_lens))
    tensors = Tensors(dout, query, key, value, out, lse, dlse, query, key, value)
    return explained(group, tensors, pattern, Scoring(scale, softcap), config)


def explained(
    group: Group, tensors: Tensors, pattern: Pattern, scoring: Scoring, config: Config | None
) -> Plan:  # fmt: skip
    """The plan of a call with valid arguments, and where its configuration comes from."""
    chosen = choose(TUNABLE, group, tensors.query, tensors.key, pattern, config, tensors.value)
    decided = plan(group, tensors.inputs, pattern, scoring.softcap, chosen)
    return replace(decided, reasons=(*decided.reasons, TUNABLE.origin(config, chosen)))
