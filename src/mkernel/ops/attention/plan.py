"""The plan of a ring_attention call: tiles, rounds, CTAs per role, the schedule, and which kernel runs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import triton

from mkernel.ops.attention.lengths import Lengths
from mkernel.ops.attention.schedule import SYNC_MARK, Helpers, scheduled, sync_pays
from mkernel.ops.attention.sequences import Pattern, Sequences
from mkernel.runtime import planning
from mkernel.runtime.config import Config, Settings
from mkernel.runtime.errors import ArgumentError
from mkernel.runtime.gpus import capability
from mkernel.runtime.group import Group
from mkernel.runtime.operands import describable, has_descriptors, matmul_precision

CHUNK_BYTES = 256 * 1024
HOPPER_TILE_M = 128  # queries per tile in the Gluon kernel
MOST_SHARED_TILES = 512  # words that count the CTAs of a tile
LEAST_SPAN = 4  # key blocks that are worth a CTA of their own
LEAST_TILE_M = 16  # of a product on tensor cores
MANY_NODES = 4  # from here on, the schedule depends on the buffer for other ranks' keys: modelled, see docs/scale.md
WARP_PUSH_RATE = 3e9  # bytes/s that one pushing warp of the Gluon kernel writes, summed over peers; estimated


@dataclass(frozen=True, eq=False)
class RoundsPlan:
    """What the plans of ring_attention and of its gradient have in common. `str(plan)` explains it."""

    op: ClassVar[str]
    config: Settings
    kernel: str  # "triton" or "gluon"
    sequences: Sequences
    padded: int  # keys of a unit, rounded up to whole blocks
    slots: int  # slots per round on a rank
    width: int  # columns of the slots
    parts: int  # rounds per unit
    part_rows: int  # keys of a panel
    window: int  # rounds that have slots at the same time
    rounds: int
    chunks: int  # per panel
    precision: str
    schedule: torch.Tensor
    spans: torch.Tensor | None  # only if PACKED: see `Mask`
    places: torch.Tensor | None  # only if ranks hold different numbers of positions: see `Mask`
    reasons: tuple[str, ...]

    @property
    def hopper(self) -> bool:
        """Whether the call runs the Gluon kernel for Hopper."""
        return self.kernel == "gluon"

    @property
    def credits(self) -> bool:
        """Whether the call reuses slots, so that other ranks need credits to write to them."""
        return self.sequences.size > 1 and self.rounds > self.window

    def __str__(self) -> str:
        c = self.config
        head = (
            f"{self.op}: {self.kernel} kernel, tiles of {c.tile_m} queries x {c.tile_n} keys, {c.ctas} CTAs "
            f"({c.send_ctas} send, {c.intra_ctas} intra), {self.rounds} rounds of {self.chunks} chunks of "
            f"{c.chunk_rows} keys, slots for {self.window} rounds"
        )
        return "\n".join([head, *(f"- {reason}" for reason in self.reasons)])


@dataclass(frozen=True, eq=False)
class Plan(RoundsPlan):
    """What a call of ring_attention will do, and why."""

    op = "ring_attention"
    uses_tma: bool  # tensors are accessed through tensor descriptors
    span_keys: int  # keys of a panel that one CTA attends to: see merge.py
    syncs_grid: bool  # the schedule may have grid syncs; the same on all ranks, so that they share one binary


@dataclass(frozen=True)
class Tiles:
    """Tiles and chunks of a call. tile_n, chunk_rows and steps must be the same on all ranks: they determine where in a
    slot a key is."""

    tile_m: int
    tile_n: int
    stages: int
    warps: int
    chunk_rows: int
    steps: int


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def tiles_of(group: Group, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, config: Config | None) -> Tiles:
    """The given tiles and chunks, or defaults. Only tile_m and warps depend on what may differ between ranks, which is
    the number of queries."""
    dim = max(query.shape[3], value.shape[3])
    if group.target.type != "cuda":
        tile_m, tile_n, stages, warps = 32, 32, 1, 4
    elif query.dtype == torch.float32:
        tile_m, tile_n, stages, warps = (
            (32, 32, 2, 8) if dim == 64 else (32, 16, 2, 8) if dim <= 128 else (16, 16, 2, 8)
        )
    elif has_descriptors(group.target):
        tile_m, tile_n, stages, warps = (128, 128, 2, 8) if dim <= 128 else (64, 64, 2, 8)
    else:
        tile_m, tile_n, stages, warps = (128, 64, 2, 8) if dim <= 128 else (64, 32, 2, 8)
    if query.shape[2] < tile_m:  # few queries, as in decoding
        tile_m, warps = max(triton.next_power_of_2(query.shape[2]), LEAST_TILE_M), min(warps, 4)
    return completed(group, key, config, (tile_m, tile_n, stages, warps))


def completed(group: Group, key: torch.Tensor, config: Config | None, defaults: tuple[int, int, int, int]) -> Tiles:
    """The given tiles and chunks; what is not given follows from the defaults: tile_m, tile_n, stages, warps."""
    pick = planning.chooser(config)
    dim, element = key.shape[3], key.element_size()
    tile_m, tile_n, stages, warps = map(pick, ("tile_m", "tile_n", "stages", "warps"), defaults)
    chunk_rows = max(CHUNK_BYTES // (2 * dim * element), tile_n) if group.target.type == "cuda" else tile_n
    units = key.shape[0] * key.shape[1]
    slots = group.size - 1 if group.nodes == 1 else group.size
    return Tiles(
        tile_m=tile_m,
        tile_n=tile_n,
        stages=stages,
        warps=warps,
        chunk_rows=round_up(pick("chunk_rows", chunk_rows), tile_n),
        steps=pick("steps", max(2, math.ceil(min(2, units) * slots / max(units, 1)))),
    )


def cut_rounds(units: int, padded: int, slots: int, tiles: Tiles) -> tuple[int, int, int]:
    """(parts, part_rows, window): a round moves a whole unit if the buffer holds two units, else a part of one."""
    buffer_rows = tiles.steps * units * padded  # of keys, and as many of values
    parts = 1
    if min(2, units) * slots * padded > buffer_rows:
        most = buffer_rows // (2 * slots) // tiles.tile_n * tiles.tile_n
        if most == 0:
            least = math.ceil(2 * slots * tiles.tile_n / (units * padded))
            raise ArgumentError(
                f"config.steps is {tiles.steps}, but must be at least {least} for {units} heads of {padded} keys: "
                f"the buffer must hold two blocks of {tiles.tile_n} keys and values from every rank"
            )
        parts = math.ceil(padded / most)
    part_rows = round_up(math.ceil(padded / parts), tiles.tile_n)
    parts = math.ceil(padded / part_rows)
    return parts, part_rows, min(units * parts, buffer_rows // (slots * part_rows))


def _why_not_gluon(
    group: Group, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, uses_tma: bool, parts: int,
    softcap: float, lengths: Lengths | None, config: Config | None,
) -> str | None:  # fmt: skip
    """Why the call cannot run the Gluon kernel; None if it can."""
    if group.target.type != "cuda" or capability(group.target)[0] != 9:
        return "the Gluon kernel runs on Hopper GPUs only"
    if query.dtype == torch.float32:
        return "the Gluon kernel does not support fp32"
    if not uses_tma:
        return "the Gluon kernel needs TMA for all tensors"
    if softcap:
        return "the Gluon kernel does not support softcap"
    if lengths is not None:
        return "the Gluon kernel needs the same number of positions on every rank, in pieces of the same size"
    if key.shape[2] != query.shape[2]:
        return "the Gluon kernel needs as many queries as keys"
    if value.shape[3] != query.shape[3]:
        return "the Gluon kernel needs values with the head dimension of queries"
    if parts > 1:
        return "the Gluon kernel does not support heads in several parts"
    fixed = ("tile_m", "tile_n", "stages", "warps", "team_ctas")
    chosen = [name for name in fixed if config and getattr(config, name) is not None]
    if chosen:
        return f"the Gluon kernel has a fixed tile, but the configuration sets {', '.join(chosen)}"
    return None


@dataclass(frozen=True)
class _Work:
    """The work of a rank, and an estimate of how long all of its CTAs together take for it."""

    costs: list[int]  # key blocks of each tile of queries of a head
    blocks: int  # key blocks of all tiles, plus one per tile for its start and end
    tiles: int
    block_seconds: float
    compute_seconds: float
    pushed: int  # bytes to ranks of the node
    link: float  # bytes/s


def _work(
    group: Group, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sequences: Sequences, tile_m: int,
    tile_n: int,
) -> _Work:  # fmt: skip
    batch, heads = query.shape[:2]
    dims = key.shape[3] + value.shape[3]
    gpus = group.gpus_per_node
    costs = sequences.key_blocks(group.rank, tile_m, tile_n)
    blocks = int(costs.sum() + len(costs)) * heads * batch
    block_seconds = 2 * tile_m * tile_n * dims / (0.8 * planning.CTA_RATE[query.dtype])
    node = [group.node * gpus + i for i in range(gpus) if i != group.local_rank]
    sources = range(group.local_rank, group.size, gpus)  # ranks whose keys this rank pushes to its node
    keys = sum(sequences.keys_sent(source, peer) for source in sources for peer in node) * batch * key.shape[1]
    return _Work(
        costs=costs.tolist(),
        blocks=blocks,
        tiles=batch * heads * len(costs),
        block_seconds=block_seconds,
        compute_seconds=blocks * block_seconds / group.world.launcher.ctas(group.world_rank),
        pushed=keys * dims * query.element_size(),
        link=group.world.links.nvlink * 1e9 if group.world.links.nvlink else planning.NVLINK_RATE,
    )


def _resolve(
    group: Group, dim: int, tiles: Tiles, tile_m: int, work: _Work, chunks: int, hopper: bool, config: Config | None,
    *, spans: int,
) -> tuple[Settings, float]:  # fmt: skip
    """(settings, estimated seconds of pushing): how many CTAs have which role. chunks: of all rounds together. spans:
    into how many the keys of a tile can be divided at most."""
    most, nodes, gpus = group.world.launcher.ctas(group.world_rank), group.nodes, group.gpus_per_node
    pick = planning.chooser(config)
    send_ctas = pick("send_ctas", 1 if nodes > 1 else 0)
    team = 1
    if hopper:  # one warp of each CTA pushes while the others compute
        rate = WARP_PUSH_RATE
        ctas = pick("ctas", min(most, max(work.tiles, chunks if gpus > 1 else 1) + send_ctas))
        intra_ctas = pick("intra_ctas", ctas - send_ctas if gpus > 1 else 0)
    else:
        rate = planning.push_rate(gpus - 1)
        copiers = planning.copiers_for(work.pushed, rate, work.compute_seconds, work.link, most) if gpus > 1 else 0
        intra_ctas = pick("intra_ctas", copiers)
        team = min(pick("team_ctas", _team(work, most - send_ctas - intra_ctas)), planning.largest_team(spans))
        ctas = pick("ctas", min(most, max(work.tiles, 1) * team + send_ctas + intra_ctas))
    resolved = Settings(
        tile_m=tile_m, tile_n=tiles.tile_n, tile_k=triton.next_power_of_2(dim), group_m=1,
        stages=tiles.stages, warps=tiles.warps, ctas=ctas, send_ctas=send_ctas, intra_ctas=intra_ctas, join_tiles=0,
        chunk_rows=tiles.chunk_rows, copy_bytes=pick("copy_bytes", 32768 if group.target.type == "cuda" else 4096),
        steps=tiles.steps, team_ctas=team,
    )  # fmt: skip
    return resolved, work.pushed / min(rate * max(intra_ctas, 1), work.link)


def _team(work: _Work, ctas: int) -> int:
    """How many of the CTAs share the keys of each tile."""
    most = min(ctas // max(work.tiles, 1), max(work.costs, default=0) // LEAST_SPAN)
    return planning.largest_team(max(most, 1))


def pairs_pay(group: Group, costs: list[int], window: int, ctas: int) -> bool:
    """Whether CTAs should take the tiles of a unit in pairs. costs: of all of them. Pairs occupy half as many CTAs for
    as long as two tiles take, and the buffer has slots for `window` units at a time. With fewer nodes than MANY_NODES,
    CTAs always take pairs: that is what was measured."""
    if group.nodes < MANY_NODES or len(costs) < 2:
        return True
    ordered = sorted(costs)
    pairs = [short + long for short, long in zip(ordered, reversed(ordered))]

    def rate(tiles: int, longest: int) -> float:
        return min(window, ctas / tiles) / max(longest, 1)

    return rate(-(-len(costs) // 2), max(pairs)) >= 0.95 * rate(len(costs), ordered[-1])


def _tma_access(group: Group, tensors: dict[str, torch.Tensor]) -> tuple[bool, list[str]]:
    """(whether all tensors can be accessed through tensor descriptors, reasons if not)"""
    if not has_descriptors(group.target):
        return False, ["the device has no tensor descriptors (TMA): tensors are accessed through pointers"]
    unaligned = [name for name, tensor in tensors.items() if tensor.numel() and not describable(tensor)]
    if unaligned:
        rule = "rows are not contiguous and 16-byte aligned: all tensors are accessed through pointers"
        return False, [f"{', '.join(unaligned)}: {rule}"]
    return True, []


def spans_of(group: Group, sequences: Sequences) -> torch.Tensor | None:
    """`Mask.spans`: what each rank sees, then what each row of this rank sees; None unless the sequence is packed, or
    there is a window."""
    if not sequences.pattern.has_spans:
        return None
    ranges = [edge for rank in range(sequences.size) for edge in sequences.span(rank)]
    starts, ends = sequences.seen(group.rank)
    return group.world.memory.upload(group.world_rank, [*ranges, *starts.tolist(), *ends.tolist()])


def places_of(group: Group, sequences: Sequences) -> torch.Tensor | None:
    """`Mask.places`: which keys each rank holds; None unless ranks hold different numbers of them."""
    if sequences.pieces is None:
        return None
    edges = [edge for pieces in sequences.pieces for piece in pieces for edge in piece]
    return group.world.memory.upload(group.world_rank, edges)


def plan(
    group: Group, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor,
    pattern: Pattern, softcap: float, config: Config | None,
) -> Plan:  # fmt: skip
    """Decide how to run a call. The decision depends only on shapes, strides, alignment, the pattern and the group."""
    batch, heads, rows, dim = query.shape
    kv_heads, length = key.shape[1], pattern.longest(key.shape[2])
    units = batch * kv_heads
    size, nodes, gpus = group.size, group.nodes, group.gpus_per_node
    element, width = query.element_size(), max(dim, value.shape[3])
    tiles = tiles_of(group, query, key, value, config)
    sequences = Sequences(size, length, pattern, None if rows == length else rows)

    padded = round_up(length, tiles.tile_n)
    slots = max(size - 1 if nodes == 1 else size, 1)
    whole = size == 1 or pattern.is_empty(query, key)
    parts, part_rows, window = (1, padded, units) if whole else cut_rounds(units, padded, slots, tiles)
    rounds = units * parts
    chunks = math.ceil(part_rows / tiles.chunk_rows)

    uses_tma, tma_reasons = _tma_access(group, dict(query=query, key=key, value=value, out=out))
    if uses_tma and size > 1 and value.shape[3] != dim:
        uses_tma = False
        tma_reasons = ["keys and values have different head dimensions: all tensors are accessed through pointers"]
    why_not = _why_not_gluon(group, query, key, value, uses_tma, parts, softcap, pattern.lengths, config)
    hopper = why_not is None
    reasons = ["Gluon: a Hopper GPU, 16-bit floats, TMA for all" if hopper else f"Triton: {why_not}", *tma_reasons]
    if size > 1:
        mib = window * slots * part_rows * 2 * width * element / 2**20
        reasons.append(
            f"the buffer for other ranks' keys and values takes {mib:.3g} MiB: slots for {window} of {rounds} rounds"
            + (f"; a head's keys come in {parts} parts, its state is kept in between" if parts > 1 else "")
        )
    tile_m = HOPPER_TILE_M if hopper else tiles.tile_m
    work = _work(group, query, key, value, sequences, tile_m, tiles.tile_n)
    spans = padded // tiles.tile_n if parts == 1 and work.tiles <= MOST_SHARED_TILES else 1
    resolved, push_seconds = _resolve(group, dim, tiles, tile_m, work, units * chunks, hopper, config, spans=spans)
    team = resolved.team_ctas
    if team > 1:
        reasons.append(f"{team} CTAs share the keys of each of the {work.tiles} tiles, and the last one merges")
    if gpus > 1:
        reasons.append(
            f"{work.pushed} bytes are pushed over NVLink by {planning.count_of_ctas(resolved.intra_ctas)}: estimated "
            f"{push_seconds * 1e3:.3g} ms, during {work.compute_seconds * 1e3:.3g} ms of compute"
        )
    planning.check_tile(
        resolved,
        query.dtype,
        uses_tma,
        columns=max(resolved.tile_n, resolved.tile_k, triton.next_power_of_2(width)),
        staged=(tiles.tile_n,) * 2,
    )
    planning.check(
        resolved, max_ctas=group.world.launcher.ctas(group.world_rank), least_send=1 if nodes > 1 else 0,
        least_intra=1 if gpus > 1 else 0, copiers_compute=hopper,
    )  # fmt: skip
    # Helpers become free when everything is pushed, and the last rounds cannot be pushed before their slots are free.
    # Rather let them idle for a while than be late: the whole launch would wait for their tiles.
    ready = max(
        1.25 * push_seconds / work.block_seconds, work.blocks / resolved.ctas * (rounds - window) / max(rounds, 1)
    )
    helpers = resolved.send_ctas + (0 if hopper else resolved.intra_ctas)
    unit_bytes = size * length * 2 * dim * element
    syncs_grid = hopper and not pattern.has_spans and sync_pays(unit_bytes)
    costs, group_heads = [-(-cost // team) for cost in work.costs for _ in range(team)], heads // max(kv_heads, 1)
    in_pairs = pairs_pay(group, costs * group_heads, window, resolved.ctas)
    if not in_pairs:
        reasons.append(f"many nodes: the tiles of {window} heads in pairs would leave CTAs without work: one by one")
    schedule = scheduled(
        costs, group_heads, units, parts, resolved.ctas,
        Helpers(helpers, ready, max(rounds - window, 0)), syncs_grid, in_pairs,
    )  # fmt: skip
    if max(schedule, default=0) >= SYNC_MARK:
        reasons.append(
            f"CTAs wait for each other now and then, to share keys in L2: those of a head take {unit_bytes} bytes"
        )
    return Plan(
        config=resolved, kernel="gluon" if hopper else "triton", uses_tma=uses_tma, sequences=sequences, padded=padded,
        slots=slots, width=width, parts=parts, part_rows=part_rows, window=window,
        span_keys=round_up(math.ceil(padded / team), tiles.tile_n), rounds=rounds, chunks=chunks,
        precision=matmul_precision(query.dtype), schedule=group.world.memory.upload(group.world_rank, schedule),
        syncs_grid=syncs_grid, spans=spans_of(group, sequences), places=places_of(group, sequences),
        reasons=tuple(reasons),
    )  # fmt: skip
