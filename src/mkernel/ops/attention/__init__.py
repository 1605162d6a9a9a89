"""ring_attention: attention over a sequence that is cut over the ranks, in one kernel per rank.

What it computes. Every rank holds its part of the sequence: query, key and value [batch, heads, length,
dim]. The result on each rank is the attention of its queries over the keys and values of all ranks, as
F.scaled_dot_product_attention would give for the whole sequence. Where the parts lie in the sequence
(contiguous, zigzag) and who sees whom (causal, packed documents): mask.py.

How the work is cut. A *unit* is one batch and one head of keys. Everything goes unit by unit: a rank
sends unit 0 to all others, then unit 1, and so on, and attends in the same order. The running maximum, sum
and product of a tile of queries stay in registers while it goes through the keys of all ranks. The other
way, rank by rank as in a ring, would need all keys of one rank, for all heads, before any of the next: the
state of every tile would have to be stored and loaded at each step. Unit by unit, a few units in flight
are enough to overlap, so the buffer can be small without costing anything. With 4 ranks, 64 units
and 3072 keys each on an H200, a unit takes 119 us to compute and 42 us on its way (estimated).

Who does what. One persistent launch per rank; a CTA takes its role from its program id:

- `send` (only with several nodes): copies the rank's chunks of keys and values into a slot of its own and
  asks the network to write them to the rank of the same local index in every node that needs them.
- `intra`: pushes the rank's chunks to the ranks of its node that need them, and then those that arrive
  from other nodes, so a chunk crosses between two nodes once.
- `compute`: tiles of queries, in the order of a schedule that the host makes: a tile goes to the CTA that
  would be done first if every key block took as long as any other. Each tile starts with the rank's own
  keys, which are read where the caller has them.
- send and intra CTAs join the compute when they are done; the schedule says when that will be. In the kernel for
  Hopper intra is a warp of each CTA instead (hopper.py).

What is signalled: see protocol.py. A round is a unit, or, where the buffer is too small for two units
of all ranks, a part of a unit's keys; then a tile's state is kept in fp32 in `partial` between two
parts, by the CTA that owns the tile. What nobody's causal mask or document lets see is neither sent nor
computed.

Why buffers are safe. There are no two halves: a rank writes to a peer in epoch e only when the peer has
entered e. It has left e-1 then, so it has read all that was sent to it before: every chunk that is sent is
waited for by a tile (the one that sees it; in packed sequences one tile of each round waits for all that
its rank gets), or by an intra CTA that passes it on. For the same reason nothing of an older epoch is in
flight, and the slot in which chunks were staged for the network may be written. Within an epoch, round t
uses the slots of round t - window, and is written only when the reader has freed that round: all its
tiles of the round are done, and all its chunks that were to be passed on.

Why it cannot deadlock. All CTAs of a launch are resident: the plan refuses more than fit. Say that all
rounds before t end. Then round t - window is freed everywhere, since a tile or a chunk of it waits only
for chunks of its own round and for earlier rounds to be freed, and compute CTAs take their tiles in the
order of rounds. So round t is sent, passed on, and computed: all rounds end. A CTA that sends first must not
have tiles that this needs: it gets only tiles of the last `window` rounds, which nobody has to free for
anything to be sent. (Where the window holds all rounds, nothing waits for a tile at all, and a launch with one
copying CTA ends even if its CTAs run one after the other.) Waits have a timeout all the same.

What it costs. FLOPs 4*length*dim for each query, head and rank that is seen; each rank writes its keys and
values (gpus-1)*nodes times over NVLink and nodes-1 times over the network, at most. Workspace: `steps`
times the keys and values of one rank; two steps by default, more if a rank has fewer units than there are
other ranks, since the state would have to be stored then. Beside it, where units are cut in
parts, one fp32 state for the rows of one unit.

How exact it is. Scores, sums and products are accumulated in fp32; weights are rounded to the input's
dtype before they are multiplied with the values, as in every flash attention. A result is a weighted mean
of values: its error is at most about eps times the largest |value| that the row sees, whatever the length,
and the tests ask for 3 eps (weights, their sum and the result are rounded). fp32 is multiplied as fp32.
The order of the sum over the keys depends on the rank, not on the schedule: the same input gives the
same bits.

Ways that lost. Steps by rank with partial sums: above. Two halves of the workspace, as in
all_gather_matmul: a rank would have to wait for a late peer's keys anyway. Handing out tiles by an atomic
counter would balance as well as the schedule, but the warps of the Hopper kernel would have to tell each
other. Waiting for chunk after chunk: see poll_all_arrived.

Where to read on: mask.py (who sees whom), protocol.py (the workspace and its signals), transfer.py (send and intra),
softmax.py and kernel.py (the Triton kernel), hopper.py and hopper_load.py (the Gluon kernel). On the host:
sequences.py, schedule.py and plan.py (what will be done), call.py and launch.py (what a kernel is told).
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
PACKED_PLANS_KEPT = 32  # such a plan holds 16 bytes of device memory for every row
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
        query: [batch, heads, seq_local, dim], this rank's part of the sequence; dim 64, 96, 128 or 256.
            The same shapes and dtype on every rank, any strides.
        key, value: [batch, kv_heads, seq_local, dim].
        is_causal: a position sees only itself and those before it, in the whole sequence.
        scale: what scores are multiplied with, greater than 0; dim**-0.5 by default.
        enable_gqa: heads may be a multiple of kv_heads; that many heads in a row share one.
        layout: "contiguous": rank r holds positions r*seq_local and on. "zigzag": of 2*world equal
            pieces of the sequence it holds pieces r and 2*world-1-r (see `mk.to_zigzag`), so that
            causal work is the same on all ranks.
        cu_seqlens: boundaries of packed documents in the whole sequence, from 0 to world*seq_local, the
            same on every rank; a document may span ranks. A position sees only its own document. They are
            read by the host: a tensor on a GPU costs a synchronisation.
        return_lse: also return the log-sum-exp of the scores of each row.
        group: the group that holds the sequence; the current one by default.
        out: where to put the result; must not overlap query, key or value.
        config: tiles, chunks, CTAs, and `steps`: how much memory is used for what comes from other ranks.

    Returns:
        [batch, heads, seq_local, dim], in query's dtype; with return_lse a pair (result, lse), lse
        [batch, heads, seq_local] in fp32, natural logarithm. A row that sees no key gives zeros and -inf.

    Raises:
        ArgumentError: before anything is launched.
        CommTimeout: a peer did not come within the group's timeout. On a GPU, where calls return
            before they are done, the next call on the group or `group.synchronize()` raises it.
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
    """Refuse what can not be computed, naming the argument and the rule."""
    planning.check_given(config)
    for name in ("tile_k", "group_m", "join_tiles"):
        if config is not None and getattr(config, name) is not None:
            raise ArgumentError(f"config.{name} means nothing to ring_attention: leave it out")
    if config is not None and config.steps == 0:
        raise ArgumentError("config.steps must be at least 1; got 0")
    given = dict(query=query, key=key, value=value) | ({} if out is None else dict(out=out))
    for name, tensor in given.items():
        if isinstance(tensor, torch.Tensor) and tensor.dim() != 4:
            raise ArgumentError(f"{name} must be [batch, heads, seq_local, dim], got shape {tuple(tensor.shape)}")
        check_tensor("ring_attention", group, name, tensor, dimensions=4)
        if query.dtype not in DTYPES:
            raise ArgumentError(f"query has dtype {query.dtype}; supported are {', '.join(str(d) for d in DTYPES)}")
        if tensor.dtype != query.dtype:
            raise ArgumentError(f"{name} has dtype {tensor.dtype}, but query has {query.dtype}: they must be the same")
    batch, heads, length, dim = query.shape
    if dim not in HEAD_DIMS:
        raise ArgumentError(
            f"query has head dimension {dim}; supported are {', '.join(map(str, HEAD_DIMS))}. "
            f"Pad query, key and value with zeros to one of them, and give scale={dim}**-0.5"
        )
    if key.shape != value.shape:
        raise ArgumentError(f"key is {tuple(key.shape)} and value is {tuple(value.shape)}: they must be the same")
    if (key.shape[0], key.shape[2], key.shape[3]) != (batch, length, dim):
        raise ArgumentError(
            f"key is {tuple(key.shape)} and query is {tuple(query.shape)}: batch, seq_local and dim must be the same"
        )
    if key.shape[1] != heads:
        if not enable_gqa:
            raise ArgumentError(
                f"query has {heads} heads and key has {key.shape[1]}: they must be the same, or give enable_gqa=True"
            )
        if key.shape[1] == 0 or heads % key.shape[1]:
            raise ArgumentError(f"query has {heads} heads, which is no multiple of key's {key.shape[1]}")
    if layout not in LAYOUTS:
        raise ArgumentError(f"layout must be one of {', '.join(map(repr, LAYOUTS))}; got {layout!r}")
    if layout == "zigzag" and length % 2:
        raise ArgumentError(
            f"seq_local is {length}, but must be even for layout='zigzag': a rank holds two equal pieces"
        )
    if group.size * length >= 2**31:
        raise ArgumentError(f"the sequence has {group.size * length} positions; there may be at most {2**31 - 1}")
    if scale is not None and not (
        isinstance(scale, (int, float)) and not isinstance(scale, bool) and 1e-30 < scale < 1e30
    ):
        raise ArgumentError(
            f"scale must be a number greater than 0 and finite; got {scale!r}. For a negative one, negate query"
        )
    if out is not None:
        check_out(out, tuple(query.shape), "as query", query.dtype, dict(query=query, key=key, value=value))


def _choose(
    group: Group, query: torch.Tensor, key: torch.Tensor, is_causal: bool, layout: str,
    documents: tuple[int, ...] | None, given: Config | None,
) -> Config | None:  # fmt: skip
    """The configuration of a call: the same on every rank, as all that it follows from is. Packed documents can be
    cut in any way, so that nothing is tuned for them."""
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
    """The launch of a call whose arguments are in order. Collective when the workspace must grow."""
    config = _choose(group, query, key, is_causal, layout, documents, config)
    layouts = tuple(layout_of(tensor) for tensor in (query, key, value, out))
    cut = ("ring_attention", layouts, is_causal, layout, config, matmul_precision(query.dtype))
    decided = group.planned(
        # documents may be others at every call, and such a plan has memory of its own: it stays on its stream
        (*cut, documents, group.world.launcher.stream_key(group.world_rank) if documents is not None else None),
        lambda: plan(group, query, key, value, out, is_causal, layout, documents, config),
        kept=PLANS_KEPT if documents is None else PACKED_PLANS_KEPT,
    )
    group.keep_if_captured(decided)
    memory = protocol.layout(decided, query.shape[3], query.dtype)
    scale = query.shape[3] ** -0.5 if scale is None else float(scale)
    # documents are data to the kernel, and their plans shall not be kept for as long as its binary
    variant = (cut, documents is not None, decided.config, lse is not None)
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
    """The plan that `ring_attention` with these arguments would carry out."""
    group = current(group)
    _check(group, query, key, value, out, layout, enable_gqa, scale, config)
    documents = documents_of(group, cu_seqlens, query.shape[2])
    out = torch.empty_like(query, memory_format=torch.contiguous_format) if out is None else out
    chosen = _choose(group, query, key, bool(is_causal), layout, documents, config)
    decided = plan(group, query, key, value, out, bool(is_causal), layout, documents, chosen)
    return replace(decided, reasons=(*decided.reasons, TUNABLE.origin(config, chosen)))
