"""ring_attention: attention over a sequence that is sharded over the ranks, in one kernel per rank.

What it computes. Every rank holds its part of the sequence: query, key and value [batch, heads, length,
dim]. The result on each rank is the attention of its queries over the keys and values of all ranks, as
F.scaled_dot_product_attention would compute it for the whole sequence. mask.py defines which positions a
rank holds (contiguous, zigzag) and which keys a row sees (causal, packed documents, windows).

How the work is divided. A *unit* is one batch entry and one head of keys. Transfers and computation both
proceed unit by unit: a rank sends unit 0 to all other ranks, then unit 1, and so on, and attends in the
same order. A tile of queries goes through the keys of all ranks in one pass, with its running maximum, sum
and accumulator in registers. The original ring algorithm proceeds rank by rank. It needs the keys of all
heads of one rank before any of the next, so it has to store and reload the state of every tile at each
step. Unit by unit, a few units in flight are enough for full overlap, so a small buffer costs no time. With
4 ranks, 64 units and 3072 keys each on an H200, a unit takes 119 us to compute and 42 us to transfer
(estimated).

Who does what. One persistent launch per rank; the program id of a CTA determines its role:

- `send` (only with several nodes): copies the rank's chunks of keys and values into its own slot, and
  posts requests to write them to its counterpart (the rank with the same local rank) in every node that
  needs them.
- `intra`: pushes the rank's chunks to the ranks of its node that need them, then forwards the chunks that
  arrive from other nodes. So a chunk crosses from one node to another only once.
- `compute`: attends with tiles of queries, in the order of a schedule that the host makes (schedule.py).
  The schedule gives each tile to the CTA that would be free first if all key blocks took equally long.
  Every tile starts with the rank's own keys, which it reads directly from the caller's tensors.
  A call with few tiles divides the keys of a tile between several CTAs (merge.py).
- `send` and `intra` CTAs join the compute when their transfers are done; the schedule estimates when that
  is. In the Hopper kernel, `intra` is a warp of each CTA instead (hopper.py).

Ranks may hold different numbers of positions (lengths.py). The rank with most keys then determines rounds, panels and
chunks. No row sees the keys that another rank lacks, so these are neither sent nor computed. A rank without queries has
one row that sees nothing, because some tile must free its rounds.

Signals: see protocol.py. A *round* moves one unit from every rank. If the buffer cannot hold two units of
all ranks, a round moves only a part of a unit's keys. The CTA that owns a tile then keeps the tile's state
in fp32 in `partial` between two parts. Keys outside the range that a rank's rows see, because of the causal
mask, of document boundaries or of a window, are neither sent to that rank nor computed there.

Why buffers are safe. The workspace is not double buffered: a rank writes to a peer in epoch e only after
the peer has entered e. By then the peer has left e-1, and has read everything that was sent to it in e-1,
because some CTA of the peer waits for every chunk that it is sent. This is a tile that sees the chunk, or
an intra CTA that forwards it. In packed sequences there may be no such tile; there, and where ranks hold
different numbers of positions, one tile of each round waits for everything that its rank receives in the
round. For the same reason, no transfer of an older epoch is in flight, and the slot in which chunks are
staged for the network can be overwritten. Within an epoch, round t reuses the slots of round t - window. A
rank writes them only after the reader has freed that round, that is, after the reader has finished all its
tiles of the round and forwarded all chunks that it had to forward.

Why it cannot deadlock. All CTAs of a launch are resident: the plan rejects more than fit. The rest is by
induction over rounds. Assume that all rounds before t complete. Then round t - window is freed on every
rank, because its tiles and forwarded chunks wait only for chunks of their own round and for earlier rounds
to be freed, and compute CTAs take their tiles in the order of rounds. So round t can be sent, forwarded and
computed, and completes as well. The CTAs that copy before they compute must not own tiles that this
argument needs. They get only tiles of the last `window` rounds, and no transfer waits for those to be
freed. (If the window holds all rounds, no transfer waits for any tile, and a launch with one copying CTA
finishes even if its CTAs run one after the other.) Waits have a timeout nevertheless.

What it costs. 4*length*dim FLOPs for each query, head and rank that the query sees. In units of one rank's
keys and values, each rank writes at most (gpus-1)*nodes over NVLink and nodes-1 over the network, and the
workspace takes `steps` (of the rank with most keys). The default is two steps, and more if a rank has fewer units
than there are other ranks: with two steps, the units would be split into parts, and the state of tiles would
have to be stored. If units are split into parts, the fp32 state of one unit's rows takes additional memory.

Accuracy. Scores, sums and products are accumulated in fp32. Weights are rounded to the dtype of the input
before they are multiplied by the values, as in every flash attention. A result is a weighted mean of
values. Its error is at most about eps times the largest |value| that the row sees, for any length, and the
tests require 3 eps (weights, their sum and the result are rounded). fp32 inputs are multiplied in fp32. The
order of the sum over the keys depends on the rank, not on the schedule: the same input gives the same bits. If CTAs
share the keys of a tile, their partial results are merged in a fixed order.

Rejected alternatives. Rank by rank with partial sums: see above. Double buffering, as in all_gather_matmul:
a rank would have to wait for a late peer's keys anyway. Dynamic scheduling with an atomic counter would
balance as well as the static schedule, but the warps of the Hopper kernel would have to pass each tile
number on to each other. Waiting for one chunk after the other: see `poll_all_arrived`.

Where to read on: mask.py (which keys a row sees), lengths.py (how many each rank holds), protocol.py (the workspace
and its signals), transfer.py (send and intra), softmax.py, rows.py, merge.py and kernel.py (the Triton kernel),
hopper.py, hopper_load.py and hopper_push.py (the Gluon kernel). On the host: run.py (a call), sequences.py, schedule.py
and plan.py (decisions before the launch), call.py and launch.py (arguments of the kernels); registration.py (the
operator in PyTorch's graphs). backward/ is the gradient, with a design record of its own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from mkernel.ops import library
from mkernel.ops.attention import registration, run
from mkernel.ops.attention.plan import Plan, plan
from mkernel.ops.attention.run import TUNABLE, prepare
from mkernel.ops.attention.sequences import Counts, Documents, Scoring, pattern_of
from mkernel.runtime.collective import traceable
from mkernel.runtime.config import Config
from mkernel.runtime.group import current

__all__ = ["TUNABLE", "explain", "prepare", "ring_attention"]


@traceable(run.repeat)
def ring_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    enable_gqa: bool = False,
    layout: str = "contiguous",
    input_layout: str = "bhsd",
    cu_seqlens: Documents = None,
    window_size: tuple[int, int] | None = None,
    seq_lens: Counts = None,
    query_lens: Counts = None,
    return_lse: bool = False,
    group: Any = None,
    out: torch.Tensor | None = None,
    config: Config | None = None,
) -> Any:
    """Attention of this rank's queries over the keys and values of all ranks, in one kernel.

    Differentiable: gradients of query, key and value are computed by `mk.ring_attention_backward`, in one kernel.

    Args:
        query: [batch, heads, queries, dim], this rank's part of the sequence; dim is 64, 96, 128, 192 or 256. Shapes
            and dtype must be the same on every rank, except for the number of positions (seq_lens). Any strides.
        key, value: [batch, kv_heads, seq_local, dim]; value may have another dim of these. Usually, there are as many
            queries as keys. There may be more keys, such as those of earlier positions that are kept in a cache, or
            fewer; with layout="contiguous" and without cu_seqlens. The last query of all ranks then has the position of
            the last key, as with PyTorch's `causal_lower_right` and in flash-attn. Different numbers of queries and
            keys, or different dims, run the portable kernel on Hopper GPUs, too.
        attn_mask, dropout_p: must be None and 0; they are here so that positional arguments are in the order of
            F.scaled_dot_product_attention.
        is_causal: a position sees only itself and earlier positions of the whole sequence. Queries before the first
            key, which there are if there are fewer keys than queries, see nothing.
        scale: the factor of the scores, greater than 0; dim**-0.5 by default.
        softcap: 0, or a number: scores are softcap * tanh(score / softcap), so between -softcap and softcap. Runs the
            portable kernel on Hopper GPUs, too.
        enable_gqa: heads may be a multiple of kv_heads; heads // kv_heads consecutive heads then share
            one head of keys and values.
        layout: "contiguous": rank r holds positions r*seq_local to (r+1)*seq_local-1. "zigzag": the
            sequence is divided into 2*world pieces, and rank r holds pieces r and 2*world-1-r (see `mk.to_zigzag`), so
            that all ranks have the same amount of causal work. The sequence may have any length.
        input_layout: the order of dimensions of query, key, value, out and the result: "bhsd" as above, or "bshd",
            [batch, seq_local, heads, dim].
        cu_seqlens: boundaries of packed documents in the whole sequence, from 0 to its length, the same on every rank;
            a document may span ranks, and documents may have any lengths. A position sees only its own document. The
            host reads them: a tensor on a GPU costs a synchronization.
        window_size: (before, after): a position sees only that many positions before and after its own, besides
            itself; -1 is no limit. With is_causal, it sees none after its own. The time of a call is proportional to
            the window. A model's "sliding window of w" is (w - 1, 0).
        seq_lens: how many positions (keys) each rank holds, if not all hold the same number: a list of world numbers,
            the same on every rank. A rank may hold none. In the zigzag layout, these are the lengths of the parts of
            `mk.to_zigzag`; they can be left out if they are all the same, or with cu_seqlens, whose last number says
            what they are. Such calls run the portable kernel on Hopper GPUs, too, unless all numbers are the same.
        query_lens: how many queries each rank holds, if these are not as many as its keys; with layout="contiguous" and
            without cu_seqlens.
        return_lse: also return the log-sum-exp of the scores of each row.
        group: the group that holds the sequence: a mk.Group, a ProcessGroup, a DeviceMesh of one dimension, or the name
            of a group; the current group by default.
        out: tensor for the result; must not overlap query, key or value. Not with tensors that require grad.
        config: of the forward pass: tiles, chunks, CTAs, `steps`, the size of the buffer for other ranks' keys and
            values, and `team_ctas`, how many CTAs share the keys of a tile.

    Returns:
        [batch, heads, queries, dim of value], in query's dtype; with input_layout="bshd" a view of that in the order of
        the inputs. With return_lse, a pair (result, lse), where lse is
        [batch, heads, queries] in fp32, as natural logarithm. A row that sees no key gives zeros and -inf.

    Raises:
        ArgumentError: an argument is invalid; nothing has been launched.
        CommTimeout: a peer did not arrive within the group's timeout. On a GPU, where calls return before
            they are done, the next call on the group or `group.synchronize()` raises it.
    """
    run.refuse_mask_and_dropout(attn_mask, dropout_p)
    given = out
    query, key, value, out = run.heads_first(input_layout, query, key, value, out)
    query, key, value = library.autocast(query, key, value)
    lse: torch.Tensor | None
    library.refuse_transforms(query=query, key=key, value=value)
    if library.needs_dispatcher(query, key, value, out):
        library.refuse_out_with_gradients(out, query, key, value)
        registration.refuse_options(scale, softcap, layout)
        packed = registration.packed(cu_seqlens, window_size, seq_lens, query_lens)
        arguments = (query, key, value, is_causal, scale, softcap, enable_gqa, layout, *packed)
        result, lse = registration.call(arguments, group, config, out)
    else:
        result, lse = run.ring_attention(
            query, key, value, is_causal=is_causal, scale=scale, softcap=softcap, enable_gqa=enable_gqa, layout=layout,
            cu_seqlens=cu_seqlens, window_size=window_size, seq_lens=seq_lens, query_lens=query_lens,
            return_lse=return_lse, group=group, out=out, config=config,
        )  # fmt: skip
    if input_layout == "bshd":
        result = result.transpose(1, 2) if given is None else given
    return (result, lse) if return_lse else result


def explain(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    enable_gqa: bool = False,
    layout: str = "contiguous",
    input_layout: str = "bhsd",
    cu_seqlens: Documents = None,
    window_size: tuple[int, int] | None = None,
    seq_lens: Counts = None,
    query_lens: Counts = None,
    return_lse: bool = False,
    group: Any = None,
    out: torch.Tensor | None = None,
    config: Config | None = None,
) -> Plan:
    """The plan that `ring_attention` would execute with these arguments."""
    group = current(group)
    run.refuse_mask_and_dropout(attn_mask, dropout_p)
    query, key, value, out = run.heads_first(input_layout, query, key, value, out)
    run.check(group, query, key, value, out, layout, enable_gqa, Scoring(scale, softcap), config)
    pattern = pattern_of(group, query, key, is_causal, layout, cu_seqlens, window_size, (seq_lens, query_lens))
    out = query.new_empty(run.result_shape(query, value)) if out is None else out
    chosen = run.choose(TUNABLE, group, query, key, pattern, config, value)
    decided = plan(group, query, key, value, out, pattern, softcap, chosen)
    return replace(decided, reasons=(*decided.reasons, TUNABLE.origin(config, chosen)))
