"""Plans: tiles, chunks, CTAs of each role, and how matrices are read."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace

import torch

from mkernel.ops.moe.grouped import WeightLayout, short_tile
from mkernel.ops.moe.routing import table_words
from mkernel.ops.moe.sizes import Sizes, row_stride_of
from mkernel.runtime import planning
from mkernel.runtime.config import Config, Settings
from mkernel.runtime.errors import ArgumentError
from mkernel.runtime.gpus import Target
from mkernel.runtime.group import Group
from mkernel.runtime.operands import matmul_precision

PLACE_RATE = 20e9  # bytes/s at which one CTA places rows while a GEMM runs; measured on an H200

LEAST_TILE_N = 16  # of a configuration
MANY_NODES = 4  # from here on, few tokens go to all nodes: modelled, see docs/scale.md

# Default number of row blocks in a group of moe_ffn: about as many as an expert has in a class (see schedule.py) if
# ranks have thousands of tokens. On an H200 with 4 ranks and 8192 tokens of 7168 elements, groups of 8 blocks took
# 14.95 ms, groups of 4 took 14.11 ms.
FFN_GROUP = 4

# Warps per CTA of moe_combine on a GPU. It is bound by memory latency, and more warps have more loads in flight. On an
# H200 with 4 ranks and tokens of 4096 elements, 16384 tokens took 1.88 ms with 8 warps and 1.43 ms with 16; 4096 tokens
# took 0.54 and 0.41 ms.
COMBINE_WARPS = 16
# what fits in registers with the rows of 8 slots at a time
COMBINE_BYTES = {torch.bfloat16: 16384, torch.float16: 16384, torch.float32: 8192}


def tile_height(device: Target, dtype: torch.dtype, config: Config | None) -> int:
    """The rows of a block. It does not depend on matrices, so that it is known before a graph is run."""
    return planning.chooser(config)("tile_m", planning.default_tiles(device, dtype, 0, True).tile_m)


def tile_width(tiles: planning.TileDefaults, tile_m: int) -> int:
    """The columns of a tile whose height is that of an earlier dispatch: as many as the default tile has, unless these
    are more sums."""
    return max(min(tiles.tile_n, tiles.tile_m * tiles.tile_n // tile_m), LEAST_TILE_N)


@dataclass(frozen=True)
class Allocation:
    """The bytes that a call allocates on this rank. `own` and `result` are tensors of the call; the workspace is in
    the symmetric heap, and later calls use it again."""

    result: int
    own: int  # rows and activations, except results
    tables: int  # of the routing
    workspace: int

    @property
    def total(self) -> int:
        return self.result + self.own + self.tables + self.workspace

    def __str__(self) -> str:
        parts = [
            f"{_in_bytes(size)} {what}"
            for size, what in ((self.result, "result"), (self.own, "rows and activations"), (self.tables, "routing"))
            if size
        ]
        return f"allocates {', '.join(parts)}; its workspace, kept for later calls, has {_in_bytes(self.workspace)}"


def _in_bytes(size: int) -> str:
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size >= 1 << power:
            return f"{size / (1 << power):.3g} {unit}"
    return f"{size} bytes"


def bytes_of(rows: int, columns: int, dtype: torch.dtype) -> int:
    """The bytes of rows in memory of a launch."""
    return rows * row_stride_of(columns, dtype) * dtype.itemsize


def bytes_of_tables(sizes: Sizes) -> int:
    return 4 * table_words(sizes.world_size, sizes.max_tokens, sizes.k, sizes.experts, sizes.capacity)


# -- dispatch


@dataclass(frozen=True)
class Copying:
    """The copies of a dispatch, and the CTAs that make them: those that send tokens to other nodes, and those that
    place rows."""

    sent: int  # bytes
    placed: int  # bytes
    send_ctas: int
    intra_ctas: int
    own_intra_ctas: int  # of the intra CTAs, how many place rows of this rank's tokens row by row; 0: all, by chunk
    near_intra_ctas: int  # of the intra CTAs, how many also fetch tokens from this node
    far_intra_ctas: int  # and how many from other nodes
    reached: float  # the part of the nodes that a token is taken to go to

    @staticmethod
    def of(group: Group, sizes: Sizes, row_bytes: int, pick: Callable[[str, int], int]) -> Copying:
        """Choose the CTAs for the copies of a dispatch.

        If the rank is alone, half of the CTAs place rows, in the order of the tiles. This keeps the memory busy (33
        CTAs of an H200 place 1.7 TB/s, 128 place 3.2), and the others multiply the first blocks meanwhile. Otherwise
        all CTAs except those that send place rows of their own rank's tokens: there is nothing to multiply before, and
        all of them compute afterwards. Rows from the node arrive at the rate of NVLink, rows from other nodes at the
        rate of the network. So only as many CTAs send, or wait for such rows, as it takes to keep up with these links,
        assuming that nearly all tokens are needed on every rank; with MANY_NODES or more, that tokens go to nodes at
        random, so that a token that arrives makes more rows.
        """
        max_ctas = pick("ctas", group.world.launcher.ctas(group.world_rank))
        token_bytes = sizes.max_tokens * row_bytes
        bytes_per_source = sizes.expected_rows * row_bytes / sizes.world_size
        nvlink = (group.world.links.nvlink or planning.NVLINK_RATE / 1e9) * 1e9
        network = (group.world.links.network or planning.NETWORK_RATE / 1e9) * 1e9

        reached = 1 - (1 - 1 / sizes.nodes) ** sizes.k if sizes.nodes >= MANY_NODES else 1.0  # nodes that a token needs

        def ctas_for(rate: float) -> int:
            return math.ceil(rate / token_bytes * bytes_per_source / PLACE_RATE)

        senders = min(math.ceil(2 * network / PLACE_RATE), max_ctas // 4, sizes.chunks)
        send_ctas = pick("send_ctas", max(senders, 1) if sizes.nodes > 1 else 0)
        intra_ctas = pick("intra_ctas", min(max(max_ctas - send_ctas - 1, 1), sizes.chunks * sizes.ranks_per_node))
        return Copying(
            (sizes.nodes - 1) * token_bytes,
            sizes.expected_rows * row_bytes,
            send_ctas,
            intra_ctas,
            min(intra_ctas, max(max_ctas // 2, 1)) if sizes.world_size == 1 else 0,
            max(min(ctas_for(nvlink), intra_ctas), 1),
            max(min(ctas_for(1.5 * network * sizes.ranks_per_node / reached), max_ctas // 4, intra_ctas), 1),
            reached,
        )

    def __str__(self) -> str:
        if self.own_intra_ctas:
            ctas = planning.count_of_ctas(self.own_intra_ctas)
            return f"{self.placed} bytes are placed by {ctas}, in the order of the tiles,"
        why = ""
        if self.reached < 1:
            why = f": with many nodes, a token goes to about {self.reached:.0%} of them, and makes more rows on each"
        return (
            f"{self.sent} bytes are sent by {planning.count_of_ctas(self.send_ctas)}, and {self.placed} bytes are "
            f"placed by {self.intra_ctas} ({self.near_intra_ctas} of them fetch tokens from the node, "
            f"{self.far_intra_ctas} from other nodes{why})"
        )


def _settings(
    group: Group, sizes: Sizes, tiles: planning.TileDefaults, copying: Copying, dtype: torch.dtype, uses_tma: bool,
    pick: Callable[[str, int], int],
) -> Settings:  # fmt: skip
    """The checked configuration of a launch that dispatches. uses_tma: matrices are read through descriptors."""
    max_ctas = group.world.launcher.ctas(group.world_rank)
    resolved = Settings(
        tile_m=pick("tile_m", tiles.tile_m), tile_n=pick("tile_n", tiles.tile_n), tile_k=pick("tile_k", tiles.tile_k),
        group_m=pick("group_m", tiles.group_m), stages=pick("stages", tiles.stages), warps=pick("warps", tiles.warps),
        ctas=pick("ctas", max_ctas), send_ctas=copying.send_ctas, intra_ctas=copying.intra_ctas, join_tiles=0,
        chunk_rows=sizes.chunk_rows, copy_bytes=pick("copy_bytes", tiles.copy_bytes),
    )  # fmt: skip
    planning.check_tile(resolved, dtype, uses_tma)
    planning.check(resolved, max_ctas=max_ctas, least_send=1 if group.nodes > 1 else 0, least_intra=1)
    return resolved


@dataclass(frozen=True, eq=False)
class Dispatching:
    """What the plans of launches that dispatch have in common. `str(plan)` explains it."""

    config: Settings
    sizes: Sizes
    copying: Copying
    row_stride: int
    reasons: tuple[str, ...]
    _: KW_ONLY
    memory: Allocation | None = None  # of `mk.explain`

    def _explained(self, op: str, afterwards: str = "") -> str:
        """afterwards: what CTAs that copy do when their transfers are done; without it, there are no tiles."""
        c, s = self.config, self.sizes
        tiles = f"tiles {c.tile_m}x{c.tile_n}x{c.tile_k}, " if afterwards else ""
        then = f", which {afterwards} when their transfers are done" if afterwards else ""
        head = (
            f"{op}: {tiles}{c.ctas} CTAs ({c.send_ctas} send, {c.intra_ctas} intra{then}), chunks of {c.chunk_rows} "
            f"tokens, capacity {s.capacity} rows for {s.experts} experts"
        )
        return "\n".join([head, *(f"- {reason}" for reason in self.reasons)])


# -- moe_dispatch_matmul


@dataclass(frozen=True, eq=False)
class DispatchPlan(Dispatching):
    """What a call of moe_dispatch_matmul will do, and why."""

    short_m: int  # blocks of at most this many rows use tiles of this height
    weights: WeightLayout
    precision: str
    _: KW_ONLY
    op: str = "moe_dispatch_matmul"

    def __str__(self) -> str:
        return self._explained(self.op, "compute")


def plan_dispatch(
    group: Group, x: torch.Tensor, w: torch.Tensor, sizes: Sizes, config: Config | None, row_bytes: int | None = None
) -> DispatchPlan:
    """Plan a call of moe_dispatch_matmul. Depends only on shapes, strides, alignment and the group. row_bytes: those of
    a token, if it has more than its elements."""
    hidden, n = w.shape[1], w.shape[2]
    row_bytes = row_bytes or hidden * x.element_size()
    reasons = []
    weights = WeightLayout.of(w)
    if not weights.uses_tma:
        reasons.append("w has no contiguous, 16-byte aligned rows: it is read through pointers")
    defaults = planning.default_tiles(group.target, x.dtype, n, weights.uses_tma)
    pick = planning.chooser(config)
    tile_m, tile_n = pick("tile_m", defaults.tile_m), pick("tile_n", defaults.tile_n)
    max_ctas = group.world.launcher.ctas(group.world_rank)
    tiles = (math.ceil(sizes.expected_rows / tile_m) + sizes.experts) * math.ceil(n / tile_n)
    compute_seconds = tiles * 2 * tile_m * tile_n * hidden / planning.CTA_RATE[x.dtype] / max_ctas
    copying = Copying.of(group, sizes, row_bytes, pick)
    reasons.append(
        f"{copying} while about {tiles} tiles are computed, if the routing is balanced: estimated "
        f"{compute_seconds * 1e3:.3g} ms"
    )
    short_m = short_tile(group.target, tile_m)
    if short_m < tile_m:
        reasons.append(
            f"blocks of at most {short_m} rows, such as the last block of an expert, use tiles of that height"
        )
    return DispatchPlan(
        config=_settings(group, sizes, defaults, copying, x.dtype, weights.uses_tma, pick),
        sizes=sizes,
        copying=copying,
        row_stride=row_stride_of(hidden, x.dtype),
        short_m=short_m,
        weights=weights,
        precision=matmul_precision(x.dtype),
        reasons=tuple(reasons),
    )


# -- moe_dispatch


@dataclass(frozen=True, eq=False)
class RowsPlan(Dispatching):
    """What a call of moe_dispatch will do, and why."""

    def __str__(self) -> str:
        return self._explained("moe_dispatch")


def plan_rows(group: Group, x: torch.Tensor, sizes: Sizes, config: Config | None) -> RowsPlan:
    """Plan a dispatch without a GEMM. Depends only on shapes, strides, alignment and the group."""
    defaults = planning.default_tiles(group.target, x.dtype, 1, True)
    pick = planning.chooser(config)
    copying = Copying.of(group, sizes, x.shape[1] * x.element_size(), pick)
    return RowsPlan(
        config=_settings(group, sizes, defaults, copying, x.dtype, True, pick),
        sizes=sizes,
        copying=copying,
        row_stride=row_stride_of(x.shape[1], x.dtype),
        reasons=(f"{copying}, if the routing is balanced",),
    )


# -- moe_combine


@dataclass(frozen=True, eq=False)
class CombinePlan:
    """What a call of moe_combine will do, and why. `str(plan)` explains it."""

    ctas: int
    warps: int
    copy_bytes: int
    row_stride: int
    chunks: int
    chunk_rows: int
    reasons: tuple[str, ...] = ()
    memory: Allocation | None = None  # of `mk.explain`

    def __str__(self) -> str:
        head = (
            f"moe_combine: {self.ctas} CTAs, {self.chunks} chunks of {self.chunk_rows} tokens per rank, "
            f"{self.copy_bytes} bytes at a time"
        )
        return "\n".join([head, *(f"- {reason}" for reason in self.reasons)])


def plan_combine(group: Group, y: torch.Tensor, sizes: Sizes, config: Config | None) -> CombinePlan:
    """Plan a call of moe_combine."""
    given = config or Config()
    cuda = group.target.type == "cuda"
    max_ctas = group.world.launcher.ctas(group.world_rank)
    ctas = max_ctas if given.ctas is None else given.ctas
    copy_bytes = given.copy_bytes if given.copy_bytes is not None else COMBINE_BYTES[y.dtype] if cuda else 1024
    if not 1 <= ctas <= max_ctas:
        raise ArgumentError(
            f"config.ctas is {ctas}, but must be 1 to {max_ctas}: CTAs wait for each other, and no more of this rank "
            f"can be resident at the same time"
        )
    return CombinePlan(
        ctas=ctas,
        warps=given.warps or (COMBINE_WARPS if cuda else 4),
        copy_bytes=copy_bytes,
        row_stride=row_stride_of(y.shape[1], y.dtype),
        chunks=sizes.chunks,
        chunk_rows=sizes.chunk_rows,
    )


# -- moe_ffn


@dataclass(frozen=True, eq=False)
class FfnPlan(Dispatching):
    """What a call of moe_ffn will do, and why."""

    gate_up: WeightLayout
    down: WeightLayout
    precision: str
    _: KW_ONLY
    op: str = "moe_ffn"

    def __str__(self) -> str:
        return self._explained(self.op, "compute and combine")


def plan_ffn(
    group: Group, x: torch.Tensor, w_gate_up: torch.Tensor, w_down: torch.Tensor, sizes: Sizes, config: Config | None,
    row_bytes: int | None = None,
) -> FfnPlan:  # fmt: skip
    """Plan a call of moe_ffn. Depends only on shapes, strides, alignment and the group. row_bytes: those of a token, if
    it has more than its elements."""
    hidden, inter = w_down.shape[2], w_down.shape[1]
    row_bytes = row_bytes or hidden * x.element_size()
    reasons = []
    gate_up, down = WeightLayout.of_halves(w_gate_up), WeightLayout.of(w_down)
    for name, weights in (("w_gate_up", gate_up), ("w_down", down)):
        if not weights.uses_tma:
            reasons.append(f"{name} has no contiguous, 16-byte aligned rows: it is read through pointers")
    both = gate_up.uses_tma and down.uses_tma
    defaults = planning.default_tiles(group.target, x.dtype, hidden, both)
    defaults = replace(defaults, group_m=min(defaults.group_m, FFN_GROUP))
    pick = planning.chooser(config)
    tile_n = pick("tile_n", defaults.tile_n)
    if tile_n < 32:
        raise ArgumentError(
            f"config.tile_n must be at least 32, because half of a tile is gate and half is up; got {tile_n}"
        )
    max_ctas = group.world.launcher.ctas(group.world_rank)
    seconds = 6 * sizes.expected_rows * hidden * inter / planning.CTA_RATE[x.dtype] / max_ctas
    copying = Copying.of(group, sizes, row_bytes, pick)
    reasons.append(f"{copying}, if the routing is balanced; the GEMMs are estimated to take {seconds * 1e3:.3g} ms")
    return FfnPlan(
        config=_settings(group, sizes, defaults, copying, x.dtype, both, pick),
        sizes=sizes,
        copying=copying,
        row_stride=row_stride_of(hidden, x.dtype),
        gate_up=gate_up,
        down=down,
        precision=matmul_precision(x.dtype),
        reasons=tuple(reasons),
    )
