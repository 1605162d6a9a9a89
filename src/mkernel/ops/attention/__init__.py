"""ring_attention: attention over a sequence that is sharded over the ranks, in one kernel per rank.

What it computes. Every rank holds its part of the sequence: query, key and value [batch, heads, length,
dim]. The result on each rank is the attention of its queries over the keys and values of all ranks, as
F.scaled_dot_product_attention would compute it for the whole sequence. mask.py defines which positions a
rank holds (contiguous, zigzag) and which keys a row sees (causal, packed documents).

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
- `send` and `intra` CTAs join the compute when their transfers are done; the schedule estimates when that
  is. In the Hopper kernel, `intra` is a warp of each CTA instead (hopper.py).

Signals: see protocol.py. A *round* moves one unit from every rank. If the buffer cannot hold two units of
all ranks, a round moves only a part of a unit's keys. The CTA that owns a tile then keeps the tile's state
in fp32 in `partial` between two parts. Keys outside the range that a rank's rows see, because of the causal
mask or of document boundaries, are neither sent to that rank nor computed there.

Why buffers are safe. The workspace is not double buffered: a rank writes to a peer in epoch e only after
the peer has entered e. By then the peer has left e-1, and has read everything that was sent to it in e-1,
because some CTA of the peer waits for every chunk that it is sent. This is a tile that sees the chunk, or
an intra CTA that forwards it. In packed sequences there may be no such tile; there, one tile of each round
waits for everything that its rank receives in the round. For the same reason, no transfer of an older
epoch is in flight, and the slot in which chunks are staged for the network can be overwritten. Within an
epoch, round t reuses the slots of round t - window. A rank writes them only after the reader has freed that
round, that is, after the reader has finished all its tiles of the round and forwarded all chunks that it
had to forward.

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
workspace takes `steps`. The default is two steps. It is more if a rank has fewer units than there are other
ranks, because with two steps the units would be split into parts, and the state of tiles would have to be
stored. If units are split into parts, the fp32 state of one unit's rows takes additional memory.

Accuracy. Scores, sums and products are accumulated in fp32. Weights are rounded to the dtype of the input
before they are multiplied by the values, as in every flash attention. A result is a weighted mean of
values. Its error is at most about eps times the largest |value| that the row sees, for any length, and the
tests require 3 eps (weights, their sum and the result are rounded). fp32 inputs are multiplied in fp32. The
order of the sum over the keys depends on the rank, not on the schedule: the same input gives the same bits.

Rejected alternatives. Rank by rank with partial sums: see above. Double buffering, as in all_gather_matmul:
a rank would have to wait for a late peer's keys anyway. Dynamic scheduling with an atomic counter would
balance as well as the static schedule, but the warps of the Hopper kernel would have to pass each tile
number on to each other. Waiting for one chunk after the other: see `poll_all_arrived`.

Where to read on: mask.py (which keys a row sees), protocol.py (the workspace and its signals), transfer.py
(send and intra), softmax.py and kernel.py (the Triton kernel), hopper.py and hopper_load.py (the Gluon
kernel). On the host: sequences.py, schedule.py and plan.py (decisions before the launch), call.py and
launch.py (arguments of the kernels).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from mkernel.ops.attention import protocol
from mkernel.ops.attention.launch import launch
from mkernel.ops.attention.plan import Plan, plan, tiles_of
from mkernel.ops.attention.sequences import documents_of
from mkernel.runtime import planning
from mkernel.runtime.config import Config
from mkernel.runtime.errors import ArgumentError
from mkernel.runtime.group import PLANS_KEPT, Group, collective, current
from mkernel.runtime.matmul import check_out, check_tensor
from mkernel.runtime.operands import DTYPES, matmul_precision
from mkernel.runtime.operands import layout as layout_of
from mkernel.runtime.tuned import Tunable
from mkernel.runtime.world import Launch

HEAD_DIMS = (64, 96, 128, 256)
LAYOUTS = ("contiguous", "zigzag")
PACKED_PLANS_KEPT = 32  # the plan of a packed sequence holds 16 bytes of device memory per row
TUNABLE = Tunable(
    "ring_attention", agreed=("batch", "heads", "kv_heads", "length", "dim", "causal", "zigzag"), own=(), shared=()
)


@collective
def ring_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    layout: str = "contiguous",
    cu_seqlens: torch.Tensor | Sequence[int] | None = None,
    return_lse: bool = False,
    group: Group | None = None,
    out: torch.Tensor | None = None,
    config: Config | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of this rank's queries over the keys and values of all ranks, in one kernel.

    Args:
        query: [batch, heads, seq_local, dim], this rank's part of the sequence; dim is 64, 96, 128 or 256.
            Shapes and dtype must be the same on every rank. Any strides.
        key, value: [batch, kv_heads, seq_local, dim].
        is_causal: a position sees only itself and earlier positions of the whole sequence.
        scale: the factor of the scores, greater than 0; dim**-0.5 by default.
        enable_gqa: heads may be a multiple of kv_heads; heads // kv_heads consecutive heads then share
            one head of keys and values.
        layout: "contiguous": rank r holds positions r*seq_local to (r+1)*seq_local-1. "zigzag": the
            sequence is divided into 2*world equal pieces, and rank r holds pieces r and 2*world-1-r (see
            `mk.to_zigzag`), so that all ranks have the same amount of causal work.
        cu_seqlens: boundaries of packed documents in the whole sequence, from 0 to world*seq_local, the
            same on every rank; a document may span ranks. A position sees only its own document. The host
            reads them: a tensor on a GPU costs a synchronization.
        return_lse: also return the log-sum-exp of the scores of each row.
        group: the group that holds the sequence; the current group by default.
        out: tensor for the result; must not overlap query, key or value.
        config: tiles, chunks, CTAs, and `steps`, the size of the buffer for other ranks' keys and values.

    Returns:
        [batch, heads, seq_local, dim], in query's dtype. With return_lse, a pair (result, lse), where lse is
        [batch, heads, seq_local] in fp32, as natural logarithm. A row that sees no key gives zeros and -inf.

    Raises:
        ArgumentError: an argument is invalid; nothing has been launched.
        CommTimeout: a peer did not arrive within the group's timeout. On a GPU, where calls return before
            they are done, the next call on the group or `group.synchronize()` raises it.
    """
    assert group is not None
    _check(group, query, key, value, out, layout, enable_gqa, scale, config)
    documents = documents_of(group, cu_seqlens, query.shape[2])
    config = _choose(group, query, key, bool(is_causal), layout, documents, config)
    tiles = tiles_of(group, query, key, config)
    group.agree(
        "ring_attention", query=tuple(query.shape), key=tuple(key.shape), dtype=query.dtype, is_causal=bool(is_causal),
        layout=layout, cu_seqlens=documents, tile_n=tiles.tile_n, chunk_rows=tiles.chunk_rows, steps=tiles.steps,
    )  # fmt: skip
    if out is None:
        out = group.world.memory.empty(group.world_rank, query.shape, query.dtype)
    lse = group.world.memory.empty(group.world_rank, query.shape[:3], torch.float32) if return_lse else None
    if query.numel():
        group.launch(prepare(group, query, key, value, out, lse, bool(is_causal), scale, layout, documents, config))
    else:
        group.confirm()
    return (out, lse) if lse is not None else out


def _check(
    group: Group, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor | None,
    layout: str, enable_gqa: bool, scale: float | None, config: Config | None,
) -> None:  # fmt: skip
    """Reject invalid arguments. The error names the argument and the rule."""
    planning.check_given(config)
    for name in ("tile_k", "group_m", "join_tiles"):
        if config is not None and getattr(config, name) is not None:
            raise ArgumentError(f"config.{name} does not apply to ring_attention: leave it unset")
    if config is not None and config.steps == 0:
        raise ArgumentError("config.steps must be at least 1; got 0")
    given = dict(query=query, key=key, value=value) | ({} if out is None else dict(out=out))
    for name, tensor in given.items():
        if isinstance(tensor, torch.Tensor) and tensor.dim() != 4:
            raise ArgumentError(f"{name} must be [batch, heads, seq_local, dim], got shape {tuple(tensor.shape)}")
        check_tensor("ring_attention", group, name, tensor, dimensions=4)
        if query.dtype not in DTYPES:
            raise ArgumentError(f"query has dtype {query.dtype}; supported: {', '.join(str(d) for d in DTYPES)}")
        if tensor.dtype != query.dtype:
            raise ArgumentError(f"{name} has dtype {tensor.dtype}, but query has {query.dtype}: they must be the same")
    batch, heads, length, dim = query.shape
    if dim not in HEAD_DIMS:
        raise ArgumentError(
            f"query has head dimension {dim}; supported head dimensions: {', '.join(map(str, HEAD_DIMS))}. "
            f"Pad query, key and value with zeros to one of these, and pass scale={dim}**-0.5"
        )
    if key.shape != value.shape:
        raise ArgumentError(f"key is {tuple(key.shape)} and value is {tuple(value.shape)}: shapes must be the same")
    if (key.shape[0], key.shape[2], key.shape[3]) != (batch, length, dim):
        raise ArgumentError(
            f"key is {tuple(key.shape)} and query is {tuple(query.shape)}: batch, seq_local and dim must be the same"
        )
    if key.shape[1] != heads:
        if not enable_gqa:
            raise ArgumentError(
                f"query has {heads} heads and key has {key.shape[1]}: these must be the same, unless enable_gqa=True"
            )
        if key.shape[1] == 0 or heads % key.shape[1]:
            raise ArgumentError(f"query has {heads} heads, which is not a multiple of key's {key.shape[1]}")
    if layout not in LAYOUTS:
        raise ArgumentError(f"layout must be one of {', '.join(map(repr, LAYOUTS))}; got {layout!r}")
    if layout == "zigzag" and length % 2:
        raise ArgumentError(
            f"seq_local is {length}, but must be even for layout='zigzag': a rank holds two equal pieces"
        )
    if group.size * length >= 2**31:
        raise ArgumentError(f"the sequence has {group.size * length} positions; the limit is {2**31 - 1}")
    if scale is not None and not (
        isinstance(scale, (int, float)) and not isinstance(scale, bool) and 1e-30 < scale < 1e30
    ):
        raise ArgumentError(
            f"scale must be a number greater than 0 and finite; got {scale!r}. For a negative scale, negate query"
        )
    if out is not None:
        check_out(out, tuple(query.shape), "as query", query.dtype, dict(query=query, key=key, value=value))


def _choose(
    group: Group, query: torch.Tensor, key: torch.Tensor, is_causal: bool, layout: str,
    documents: tuple[int, ...] | None, given: Config | None,
) -> Config | None:  # fmt: skip
    """The configuration of a call: the same on every rank, because it depends only on arguments that are the same on
    every rank. Document boundaries vary too much for tuning, so packed sequences use no tuned configuration."""
    if documents is not None:
        return given
    batch, heads, length, dim = query.shape
    return TUNABLE.choose(
        group, query.dtype, given, batch=batch, heads=heads, kv_heads=key.shape[1], length=length, dim=dim,
        causal=is_causal, zigzag=layout == "zigzag",
    )  # fmt: skip


def prepare(
    group: Group, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor,
    lse: torch.Tensor | None, is_causal: bool, scale: float | None, layout: str,
    documents: tuple[int, ...] | None, config: Config | None,
) -> Launch:  # fmt: skip
    """The launch of a call with valid arguments. Collective if the workspace must grow."""
    config = _choose(group, query, key, is_causal, layout, documents, config)
    layouts = tuple(layout_of(tensor) for tensor in (query, key, value, out))
    plan_key = ("ring_attention", layouts, is_causal, layout, config, matmul_precision(query.dtype))
    decided = group.planned(
        # documents may change with every call, and such a plan owns device memory: use it on one stream only
        (*plan_key, documents, group.world.launcher.stream_key(group.world_rank) if documents is not None else None),
        lambda: plan(group, query, key, value, out, is_causal, layout, documents, config),
        kept=PLANS_KEPT if documents is None else PACKED_PLANS_KEPT,
    )
    group.keep_if_captured(decided)
    memory = protocol.layout(decided, query.shape[3], query.dtype)
    scale = query.shape[3] ** -0.5 if scale is None else float(scale)
    # to the kernel, documents are data; and a plan with documents must not live as long as the binary
    variant = (plan_key, documents is not None, decided.config, lse is not None)
    return launch(group, decided, memory, query, key, value, out, lse, scale, variant)


def explain(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    layout: str = "contiguous",
    cu_seqlens: torch.Tensor | Sequence[int] | None = None,
    return_lse: bool = False,
    group: Group | None = None,
    out: torch.Tensor | None = None,
    config: Config | None = None,
) -> Plan:
    """The plan that `ring_attention` would execute with these arguments."""
    group = current(group)
    _check(group, query, key, value, out, layout, enable_gqa, scale, config)
    documents = documents_of(group, cu_seqlens, query.shape[2])
    out = torch.empty_like(query, memory_format=torch.contiguous_format) if out is None else out
    chosen = _choose(group, query, key, bool(is_causal), layout, documents, config)
    decided = plan(group, query, key, value, out, bool(is_causal), layout, documents, chosen)
    return replace(decided, reasons=(*decided.reasons, TUNABLE.origin(config, chosen)))
