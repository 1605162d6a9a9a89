"""What the mixture-of-experts operators share on the host: sizes, tables, the handle, checks of arguments."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mkernel.lang import routing as words
from mkernel.runtime import planning
from mkernel.runtime.config import Config, Settings
from mkernel.runtime.errors import ArgumentError
from mkernel.runtime.group import Group, Workspace
from mkernel.runtime.heap import ALIGNMENT
from mkernel.runtime.matmul import check_tensor
from mkernel.runtime.operands import BYTES, DTYPES, descriptor, has_descriptors
from mkernel.runtime.world import Array

MOST_SLOTS = 16
MOST_MATES = 64  # ranks of a node: each has a bit in lang/combining.py
WEIGHT_DTYPES = (*DTYPES, torch.float64)  # of the weights of a token's experts, which become fp32
LINE = 64  # bytes that rows in a workspace are aligned to
OWN_SIGNALS = 8


def _up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def power_above(number: int) -> int:
    """The smallest power of two that is at least `number`."""
    return 1 << max(number - 1, 0).bit_length()


@dataclass(frozen=True)
class Routing:
    """The sizes of a call. most_tokens, k and chunk_rows are the same on every rank."""

    size: int
    gpus: int
    tokens: int  # of this rank
    most_tokens: int  # of any rank
    k: int
    experts: int  # of this rank
    room: int  # rows that this rank has room for
    chunk_rows: int

    @property
    def nodes(self) -> int:
        return self.size // self.gpus

    @property
    def slots(self) -> int:
        return power_above(self.k)

    @property
    def ranks(self) -> int:
        return power_above(self.size + 1)

    @property
    def chunks(self) -> int:
        return math.ceil(self.most_tokens / self.chunk_rows)

    @property
    def expected_rows(self) -> int:
        """Rows of this rank, if every rank gets its share."""
        return min(self.most_tokens * self.k, self.room)

    def table_words(self, weights: bool) -> int:
        return _up(words.HEADER.value + self.most_tokens * self.k * (2 if weights else 1), 16)

    def constants(self) -> dict[str, int]:
        """What kernels know of it when they are compiled."""
        return dict(K=self.k, SLOTS=self.slots, SIZE=self.size, GPUS=self.gpus, RANKS=self.ranks, CHUNK=self.chunk_rows)

    def signal_words(self, per_rank: int) -> int:
        """Signals of a workspace with so many arrivals of each rank."""
        return self.size + self.nodes + OWN_SIGNALS + 2 * self.size * per_rank

    def signals_of(self, workspace: Workspace) -> int:
        """Words of one half of the arrival signals. That is the workspace's, not the call's, so that the
        halves stay where they are when sizes change."""
        return (workspace.signal_words - self.size - self.nodes - OWN_SIGNALS) // 2


def row_stride_of(columns: int, dtype: torch.dtype) -> int:
    """Elements from one row to the next in a workspace."""
    return _up(columns * dtype.itemsize, LINE) // dtype.itemsize


@dataclass(frozen=True)
class Areas:
    """Where the parts of a half begin, in bytes from the start of the half."""

    begin: dict[str, int]
    sizes: dict[str, int]
    nbytes: int

    @staticmethod
    def of(**sizes: int) -> Areas:
        begin, at = {}, 0
        for name, size in sizes.items():
            begin[name] = at
            at += _up(size, ALIGNMENT)
        return Areas(begin, sizes, max(at, ALIGNMENT))

    def arrays(self, workspace: Workspace, routing: Routing, signals: Sequence[str]) -> list[Array]:
        """What a call keeps in the workspace. signals: what arrives of each rank, beside its table, in chunks."""
        begin, half = 8 * (routing.size + routing.nodes + OWN_SIGNALS), routing.signals_of(workspace)
        arrays = [
            Array("entered", 0, (routing.size,), 8),
            Array("node_entered", 8 * routing.size, (routing.nodes,), 8),
            Array("own", 8 * (routing.size + routing.nodes), (OWN_SIGNALS,), 8),
            Array("routed", begin, (2, routing.size), 8, (half, 1)),
        ]
        each = routing.size * routing.chunks
        for i, name in enumerate(signals):
            start = begin + 8 * (routing.size + i * each)
            arrays.append(Array(name, start, (2, routing.size, routing.chunks), 8, (half, routing.chunks, 1)))
        for name, start in self.begin.items():
            arrays += workspace.buffers(start, name, 1, self.sizes[name])
        return arrays

    def at(self, workspace: Workspace, name: str, item: int) -> int:
        """Where a part of the first half begins, in items of so many bytes from the start of the segment."""
        return (workspace.data_start + self.begin[name]) // item


def surroundings(
    group: Group, workspace: Workspace, routing: Routing, areas: Areas, dtype: torch.dtype, row_stride: int,
    weighted: bool, copy_bytes: int,
) -> dict[str, Any]:  # fmt: skip
    """What all kernels are told about sizes and places. `weighted`: routing tables have weights beside ids."""
    element = dtype.itemsize
    link = group.world.links.nvlink
    paced = link is not None and group.gpus_per_node > 1
    return dict(
        context=workspace.context,
        tokens=routing.tokens, most_tokens=routing.most_tokens, chunks=routing.chunks,
        signals=routing.signals_of(workspace), nanoseconds_per_mib=round(2**20 / link) if paced and link else 0,
        **{f"{name}_at": areas.at(workspace, name, 4 if name == "tables" else element) for name in areas.begin},
        half_words=workspace.half_bytes // 4, table_words=routing.table_words(weighted), row_stride=row_stride,
        half=workspace.half_bytes // element, DTYPE=DTYPES[dtype], **routing.constants(), PACED=paced,
        COPY_ROWS=4, COPY_COLUMNS=max(copy_bytes // element // 4, 1),
    )  # fmt: skip


def dispatching(
    x: torch.Tensor, topk_ids: torch.Tensor, routing: Routing, c: Settings, copying: Copying
) -> dict[str, Any]:
    """What kernels that dispatch are told besides."""
    return dict(
        x=x, x_stride=x.stride(0), x_column_stride=x.stride(1),
        ids=topk_ids, ids_stride=topk_ids.stride(0), ids_column_stride=topk_ids.stride(1),
        experts=routing.experts, room=routing.room, hidden=x.shape[1],
        SENDERS=c.send_ctas, INTRAS=c.intra_ctas,
        NEAR_INTRAS=copying.near_intra_ctas, FAR_INTRAS=copying.far_intra_ctas,
        TILE_M=c.tile_m, TILE_N=c.tile_n, TILE_K=c.tile_k, GROUP=c.group_m,
    )  # fmt: skip


def tables(group: Group, **sizes: int) -> dict[str, torch.Tensor]:
    """Tables of 32-bit numbers in the memory of this rank, uninitialised."""
    rounded = {name: _up(max(size, 1), 16) for name, size in sizes.items()}
    memory = group.world.empty(group.world_rank, (sum(rounded.values()),), torch.float32).view(torch.int32)
    return {
        name: part[: max(sizes[name], 1)]
        for name, part in zip(rounded, torch.split(memory, list(rounded.values())), strict=True)
    }


def routing_tables(group: Group, routing: Routing, tile_m: int, counters: int = 1) -> dict[str, torch.Tensor]:
    """The tables that lang/routing.py fills."""
    everyone = routing.size * routing.most_tokens
    segments = routing.experts * routing.size
    blocks = most_blocks(routing, tile_m)
    return tables(
        group,
        positions=everyone * routing.k,
        destinations=everyone * routing.k,
        everyones_ids=everyone * routing.k,
        counts=segments,
        above=routing.size * routing.ranks,
        bases=segments + 1,
        first_blocks=routing.experts + 1,
        expert_counts=routing.experts,
        placed=blocks * counters,
        slots=everyone,
        departed=(routing.nodes - 1) * routing.most_tokens,
        unsorted=blocks * words.ENTRY.value,
        schedule=blocks * words.ENTRY.value,
        summary=words.SUMMARY.value + 2 * routing.ranks,
        row_source=routing.room,
        row_token=routing.room,
    )


def most_blocks(routing: Routing, tile_m: int) -> int:
    """Blocks of rows that there can be: every expert may have one that is not full."""
    return routing.room // tile_m + routing.experts


@dataclass(frozen=True, eq=False)
class Handle:
    """Where the rows of a dispatch came from, and so where results go back to.

    Row i of y, for i below the sum of `counts`, is token `token[i]` of rank `source[i]`. Rows are grouped by
    expert; `counts[e]` rows belong to the e-th expert of this rank. All three are on the rank's device, and
    on a GPU they are there when the call is done, not when it returns. Rows of y beyond them are not written.
    """

    group: Group
    counts: torch.Tensor  # [experts]
    source: torch.Tensor  # [capacity]
    token: torch.Tensor  # [capacity]
    routing: Routing
    tables: dict[str, torch.Tensor]

    @property
    def capacity(self) -> int:
        return self.routing.room


def rows_of_tile(group: Group, rows: int, columns: int, dtype: torch.dtype, tile_m: int) -> torch.Tensor:
    """A result of the grouped GEMM, [rows, columns]: rows are aligned, and tile_m more lie in front of the
    first one (see lang/grouped.py)."""
    whole = group.world.empty(group.world_rank, (tile_m + rows, row_stride_of(columns, dtype)), dtype)
    return whole[tile_m:, :columns]


def rows_descriptor(rows: torch.Tensor, tile_m: int, tile_n: int) -> Any:
    """The descriptor that lang/grouped.py stores through, of what `rows_of_tile` gave."""
    stride = rows.stride(0)
    whole = rows.as_strided((rows.shape[0] + tile_m, stride), (stride, 1), 0)  # with what lies in front
    block = [1, tile_m, tile_n]
    return descriptor(whole, [rows.shape[0] + 1, tile_m, rows.shape[1]], [stride, stride, 1], block)


def short_tile(device: torch.device, tile_m: int) -> int:
    """The height of a tile for a block that fills only half of one: tile_m if nothing would be won. Hopper's tensor
    cores multiply 64 rows at least."""
    least = 64 if device.type == "cuda" else 8
    return max(tile_m // 2, min(least, tile_m))


def how_read(w: torch.Tensor) -> tuple[bool, bool]:
    """(through a descriptor, of the transposed matrices) of [experts, k, n]."""

    def good(rows: torch.Tensor) -> bool:
        size = rows.element_size()
        strides = [rows.stride(i) * size for i in (0, 1) if rows.shape[i] > 1]
        return (
            rows.numel() > 0
            and rows.stride(2) == 1
            and rows.data_ptr() % BYTES == 0
            and all(stride > 0 and stride % BYTES == 0 for stride in strides)
        )

    if good(w):
        return True, False
    return good(w.transpose(1, 2)), good(w.transpose(1, 2))


def matrices_descriptor(w: torch.Tensor, transposed: bool, tile_k: int, tile_n: int) -> Any:
    """The descriptor that lang/grouped.py reads matrices through."""
    rows = w.transpose(1, 2) if transposed else w
    block = [1, tile_n, tile_k] if transposed else [1, tile_k, tile_n]
    return descriptor(rows, list(rows.shape), list(rows.stride()), block)


# -- arguments


def check_tokens(op: str, group: Group, x: torch.Tensor, topk_ids: torch.Tensor) -> None:
    """Refuse tokens and ids that can not be routed."""
    if not has_descriptors(group.device):
        raise ArgumentError(f"{op} needs tensor descriptors (TMA), which {group.device} does not have: Hopper or newer")
    check_tensor(op, group, "x", x, 2)
    check_tensor(op, group, "topk_ids", topk_ids, 2)
    if x.dtype not in DTYPES:
        raise ArgumentError(f"x has dtype {x.dtype}; supported are {', '.join(str(d) for d in DTYPES)}")
    if topk_ids.dtype not in (torch.int32, torch.int64):
        raise ArgumentError(f"topk_ids has dtype {topk_ids.dtype}; it must be torch.int32 or torch.int64")
    if topk_ids.shape[0] != x.shape[0]:
        raise ArgumentError(f"topk_ids has {topk_ids.shape[0]} rows, but x has {x.shape[0]} tokens")
    if group.gpus_per_node > MOST_MATES:
        raise ArgumentError(
            f"{op} takes nodes of at most {MOST_MATES} ranks, and this group's have {group.gpus_per_node}: "
            f"cut them with mk.init(gpus_per_node=...)"
        )
    if not 1 <= topk_ids.shape[1] <= MOST_SLOTS:
        raise ArgumentError(f"topk_ids has {topk_ids.shape[1]} experts for each token; it must be 1 to {MOST_SLOTS}")
    if x.shape[1] < 1:
        raise ArgumentError(f"x has shape {tuple(x.shape)}: tokens must have 1 element or more")


def check_matrices(op: str, group: Group, name: str, w: Any, dtype: torch.dtype, rows: int, of: str) -> None:
    """Refuse matrices that do not fit to rows of so many elements."""
    check_tensor(op, group, name, w, 3)
    if w.dtype != dtype:
        raise ArgumentError(f"{name} has dtype {w.dtype}, but x has {dtype}: they must be the same")
    if w.shape[1] != rows:
        raise ArgumentError(f"{name} is {tuple(w.shape)}: its second dimension ({w.shape[1]}) must be {of} ({rows})")
    if w.shape[2] < 1:
        raise ArgumentError(f"{name} is {tuple(w.shape)}: matrices must have 1 column or more")


def check_weights(topk_weights: torch.Tensor, tokens: int, k: int) -> None:
    if topk_weights.dtype not in WEIGHT_DTYPES:
        raise ArgumentError(
            f"topk_weights has dtype {topk_weights.dtype}; it must be a floating point type of 16 bits or more: "
            f"{', '.join(map(str, WEIGHT_DTYPES))}"
        )
    if tuple(topk_weights.shape) != (tokens, k):
        raise ArgumentError(f"topk_weights is {tuple(topk_weights.shape)}, but must be {(tokens, k)}: tokens x k")


def check_bounds(tokens: int, capacity: int | None, max_tokens: int | None) -> None:
    for name, value in (("capacity", capacity), ("max_tokens", max_tokens)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**31):
            raise ArgumentError(f"{name} must be a whole number, 0 or more, and less than 2**31; got {value!r}")
    if max_tokens is not None and tokens > max_tokens:
        raise ArgumentError(f"x has {tokens} tokens, more than the {max_tokens} that max_tokens declares")


def chunk_rows_of(group: Group, most_tokens: int, k: int, config: Config | None) -> int:
    """Tokens of a chunk: a power of two, from what is the same on every rank. A CTA keeps all their ids."""
    given = config.chunk_rows if config is not None else None
    if given is None:
        return planning.rows_per_chunk(most_tokens, 32 if group.device.type == "cuda" else 8)
    most = planning.REGISTERS // power_above(k)
    if given & (given - 1) or given > most:
        raise ArgumentError(
            f"config.chunk_rows must be a power of two for this operator, and at most {most} with {k} experts for each "
            f"token; got {given}"
        )
    return given


def agree(
    op: str, group: Group, x: torch.Tensor, topk_ids: torch.Tensor, experts: int, capacity: int | None,
    max_tokens: int | None, config: Config | None, choose: Callable[[int], Config | None], **more: Any,
) -> Routing:  # fmt: skip
    """The sizes of a call, those that must be the same on every rank made so. Without max_tokens the ranks
    tell each other how many tokens they have: at every call, because the others' may have changed when this
    rank's have not. `choose` gives the configuration of a call in which no rank has more than so many: the given one,
    or a tuned one whose chunks are the same on every rank."""
    tokens, k = topk_ids.shape
    alike = dict(hidden=x.shape[1], k=k, dtype=x.dtype, max_tokens=max_tokens, **more)
    if max_tokens is not None:
        total, most = group.size * max_tokens, max(max_tokens, 1)
        routing = sized(group, topk_ids, experts, capacity, most, total, choose(most))
        group.agree(op, **alike, chunk_rows=routing.chunk_rows)
        return routing
    # chunks follow from how many tokens there are: ranks compare where they take them from
    chunk_rows = "tuned" if config is None else config.chunk_rows or "default"
    everyones = group.tell(op, tokens, **alike, chunk_rows=chunk_rows)
    most = max(*everyones, 1)
    return sized(group, topk_ids, experts, capacity, most, sum(everyones), choose(most))


def sized(
    group: Group, topk_ids: torch.Tensor, experts: int, capacity: int | None, most: int, total: int,
    config: Config | None,
) -> Routing:  # fmt: skip
    """The sizes of a call in which no rank has more than `most` tokens, and all have `total`."""
    tokens, k = topk_ids.shape
    if capacity is None:
        capacity = total * k if experts else 0  # all ids of all tokens may name experts of this rank, or one of them
    return Routing(
        group.size, group.gpus_per_node, tokens, most, k, experts, capacity, chunk_rows_of(group, most, k, config)
    )


PLACE_RATE = 20e9  # bytes/s of rows that one CTA places beside a GEMM; measured on an H200


@dataclass(frozen=True)
class Copying:
    """What the way there costs, and who takes care of it: CTAs that send tokens to other nodes, and that place rows."""

    sent: int  # bytes
    placed: int
    send_ctas: int
    intra_ctas: int
    near_intra_ctas: int  # of the intra CTAs, those that also fetch tokens of this node
    far_intra_ctas: int  # and of other nodes

    @staticmethod
    def of(group: Group, routing: Routing, row_bytes: int, pick: Callable[[str, int], int]) -> Copying:
        """All CTAs but those that send place the rows of their own rank: nobody can multiply before, and all do
        afterwards. Rows of the node come at the pace of NVLink, those of other nodes at the network's; so only as many
        CTAs wait for them, and send, as are needed to keep pace, if nearly all tokens are needed everywhere."""
        most = pick("ctas", group.world.ctas(group.world_rank))
        tokens = routing.most_tokens * row_bytes
        of_a_rank = routing.expected_rows * row_bytes / routing.size
        nvlink = (group.world.links.nvlink or planning.NVLINK_RATE / 1e9) * 1e9
        network = (group.world.links.network or planning.NETWORK_RATE / 1e9) * 1e9

        def keep_pace(rate: float) -> int:
            return math.ceil(rate / tokens * of_a_rank / PLACE_RATE)

        senders = min(math.ceil(2 * network / PLACE_RATE), most // 4, routing.chunks)
        send_ctas = pick("send_ctas", max(senders, 1) if routing.nodes > 1 else 0)
        intra_ctas = pick("intra_ctas", min(max(most - send_ctas - 1, 1), routing.chunks * routing.gpus))
        return Copying(
            (routing.nodes - 1) * tokens,
            routing.expected_rows * row_bytes,
            send_ctas,
            intra_ctas,
            max(min(keep_pace(nvlink), intra_ctas), 1),
            max(min(keep_pace(1.5 * network * routing.gpus), most // 4, intra_ctas), 1),
        )

    def __str__(self) -> str:
        return (
            f"{self.send_ctas} CTAs send {self.sent} bytes and {self.intra_ctas} place {self.placed} "
            f"({self.near_intra_ctas} of them what comes from the node, {self.far_intra_ctas} from other nodes)"
        )


def settings(
    group: Group, routing: Routing, tiles: planning.TileDefaults, copying: Copying, ctas: int,
    dtype: torch.dtype, described: bool, pick: Callable[[str, int], int],
) -> Settings:  # fmt: skip
    """The configuration of a launch that dispatches; checked. `described`: matrices are read through descriptors."""
    resolved = Settings(
        tile_m=pick("tile_m", tiles.tile_m), tile_n=pick("tile_n", tiles.tile_n), tile_k=pick("tile_k", tiles.tile_k),
        group_m=pick("group_m", tiles.group_m), stages=pick("stages", tiles.stages), warps=pick("warps", tiles.warps),
        ctas=ctas, send_ctas=copying.send_ctas, intra_ctas=copying.intra_ctas, join_tiles=0,
        chunk_rows=routing.chunk_rows, copy_bytes=pick("copy_bytes", tiles.copy_bytes),
    )  # fmt: skip
    most = group.world.ctas(group.world_rank)
    planning.check_tile(resolved, dtype, described)
    planning.check(resolved, max_ctas=most, least_send=1 if group.nodes > 1 else 0, least_intra=1)
    return resolved


def check_config(op: str, config: Config | None) -> None:
    """Refuse what is no configuration of an operator that dispatches."""
    planning.check_given(config)
    if config is not None and config.join_tiles is not None:
        raise ArgumentError(f"config.join_tiles means nothing to {op}: a tile is computed by whoever is free")
