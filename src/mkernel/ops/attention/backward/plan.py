"""The plan of a ring_attention_backward call: tiles, rounds, CTAs per role, and the schedule."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
import triton

from mkernel.ops.attention.backward.choice import HOPPER_ROWS, HOPPER_STAGES, HOPPER_TILE, kernel_of
from mkernel.ops.attention.backward.protocol import OP
from mkernel.ops.attention.backward.schedule import Tasks, scheduled
from mkernel.ops.attention.plan import (
    WARP_PUSH_RATE,
    RoundsPlan,
    Tiles,
    completed,
    cut_rounds,
    places_of,
    round_up,
    spans_of,
)
from mkernel.ops.attention.schedule import Helpers
from mkernel.ops.attention.sequences import Pattern, Sequences
from mkernel.runtime import planning
from mkernel.runtime.config import Config, Settings
from mkernel.runtime.errors import ArgumentError
from mkernel.runtime.group import Group
from mkernel.runtime.operands import has_descriptors, matmul_precision

DQ_PRODUCTS, DKV_PRODUCTS = 3, 4  # products of a tile of queries with a block of keys


@dataclass(frozen=True, eq=False)
class Plan(RoundsPlan):
    """What a call will do, and why."""

    op = OP
    nodes: int
    value_columns: int  # columns of values, rounded up to a power of two
    tiles: int  # blocks of tile_n keys of a panel
    blocks: int  # tasks that they are: the Gluon kernel computes two with each
    ranges: torch.Tensor  # see `ranges_of`


def tiles_of(group: Group, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, config: Config | None) -> Tiles:
    """The given tiles and chunks, or defaults. Depends on nothing that differs between ranks."""
    dim = max(query.shape[3], value.shape[3])
    if group.target.type != "cuda":
        tile_m, tile_n, stages, warps = 32, 32, 1, 4
    elif query.dtype == torch.float32:
        tile_m, tile_n, stages, warps = (32, 32, 1, 8) if dim == 64 else (16, 16, 1, 8)
    elif dim == 64 and not has_descriptors(group.target):  # an older GPU, on which a square tile spills
        tile_m, tile_n, stages, warps = 64, 32, 2, 8
    else:
        tile_m, tile_n, stages, warps = (64, 64, 2, 8) if dim <= 128 else (32, 32, 1, 8)
    return completed(group, key, config, (tile_m, tile_n, stages, warps))


def ranges_of(sequences: Sequences, rank: int, tile_n: int) -> np.ndarray:
    """[source, block, 4]: for each block of tile_n keys of each source, the rows first..end-1 of this rank that see
    some of them, and the rows full..full_end-1 that see all of them. Both ends of what a row sees grow with the row."""
    starts, ends = sequences.seen(rank)
    blocks = math.ceil(sequences.length / tile_n)
    key = np.arange(blocks) * tile_n
    key_end = key + tile_n  # a block that reaches beyond the last key is seen as a whole by no row
    found = np.zeros((sequences.size, blocks, 4), dtype=np.int64)
    for source in range(sequences.size):
        lower, upper = sequences.keys_below(starts, source), sequences.keys_below(ends, source)
        found[source, :, 0] = np.searchsorted(upper, key, side="right")
        found[source, :, 1] = np.searchsorted(lower, key_end, side="left")
        found[source, :, 2] = np.searchsorted(upper, key_end, side="left")
        found[source, :, 3] = np.searchsorted(lower, key, side="right")
    return found


def _tasks(
    group: Group, sequences: Sequences, ranges: np.ndarray, tiles: Tiles, rows: int, blocks: int, heads: int
) -> Tasks:  # fmt: skip
    """The tasks of a round, with costs in products of a tile. rows: queries that a block of keys goes through at a
    time. blocks: of keys, in a panel. heads: of queries, per head of keys. If a unit takes several rounds, costs have
    no meaning, and only their number counts."""
    keys_of_tiles = sequences.key_blocks(group.rank, tiles.tile_m, tiles.tile_n)
    queries = [1.0 + DQ_PRODUCTS * count for count in keys_of_tiles.tolist()] * heads
    first, end = ranges[:, :, 0] // rows, -(-ranges[:, :, 1] // rows)
    costs = 0.1 + DKV_PRODUCTS * heads * np.maximum(end - first, 0)
    keys = costs.ravel().tolist() if costs.shape[1] == blocks else [1.0] * (sequences.size * blocks)
    several = sequences.size > 1
    return Tasks(queries, keys, own=blocks if several else 0, others=(group.nodes - 1) * blocks)


def _resolve(
    group: Group, query: torch.Tensor, value: torch.Tensor, tiles: Tiles, sequences: Sequences, tasks: Tasks,
    units: int, hopper: bool, config: Config | None,
) -> tuple[Settings, float, list[str]]:  # fmt: skip
    """(settings, when the copying CTAs are free, in products of a tile, and reasons): how many CTAs have which role."""
    gpus, nodes = group.gpus_per_node, group.nodes
    dims = query.shape[3] + value.shape[3]
    most = group.world.launcher.ctas(group.world_rank)
    pick = planning.chooser(config)
    product = tiles.tile_m * tiles.tile_n * dims / (0.6 * planning.CTA_RATE[query.dtype])  # seconds, estimated
    products = (sum(tasks.queries) + sum(tasks.keys)) * units
    node = [group.node * gpus + i for i in range(gpus) if i != group.local_rank]
    sources = range(group.local_rank, group.size, gpus)  # ranks whose keys this rank pushes to its node
    keys = sum(sequences.keys_sent(source, peer) for source in sources for peer in node) * units
    pushed = keys * dims * query.element_size()
    link = group.world.links.nvlink * 1e9 if group.world.links.nvlink else planning.NVLINK_RATE
    seconds = products * product / most
    send_ctas = pick("send_ctas", 1 if nodes > 1 else 0)
    wanted = max(len(tasks) * units, 1) + send_ctas
    if hopper:  # one warp of each CTA pushes while the others compute
        rate = WARP_PUSH_RATE
        ctas = pick("ctas", min(most, wanted))
        intra_ctas = pick("intra_ctas", ctas - send_ctas if gpus > 1 else 0)
    else:
        rate = planning.push_rate(max(gpus - 1, 1))
        copiers = planning.copiers_for(pushed, rate, seconds, link, most) if gpus > 1 else 0
        intra_ctas = pick("intra_ctas", copiers)
        ctas = pick("ctas", min(most, wanted + intra_ctas))
    settings = Settings(
        tile_m=tiles.tile_m, tile_n=tiles.tile_n, tile_k=triton.next_power_of_2(query.shape[3]), group_m=1,
        stages=tiles.stages, warps=tiles.warps, ctas=ctas, send_ctas=send_ctas, intra_ctas=intra_ctas, join_tiles=0,
        chunk_rows=tiles.chunk_rows, copy_bytes=pick("copy_bytes", 32768 if group.target.type == "cuda" else 4096),
        steps=tiles.steps,
    )  # fmt: skip
    push_seconds = pushed / min(rate * max(intra_ctas, 1), link)
    reasons = []
    if gpus > 1:
        reasons.append(
            f"{pushed} bytes of keys and values are pushed over NVLink by {planning.count_of_ctas(intra_ctas)}: "
            f"estimated {push_seconds * 1e3:.3g} ms, during {seconds * 1e3:.3g} ms of compute"
        )
    return settings, 1.25 * push_seconds / product, reasons


def plan(
    group: Group, inputs: dict[str, torch.Tensor], pattern: Pattern, softcap: float, config: Config | None
) -> Plan:  # fmt: skip
    """Decide how to run a call. The decision depends only on shapes, strides, alignment, the pattern and the group.

    inputs: dout, query, key, value and out.
    """
    query, key, value = (inputs[name] for name in ("query", "key", "value"))
    batch, heads, rows, _ = query.shape
    kv_heads, length = key.shape[1], pattern.longest(key.shape[2])
    units, size, nodes = batch * kv_heads, group.size, group.nodes
    width, value_columns = max(query.shape[3], value.shape[3]), triton.next_power_of_2(value.shape[3])
    tiles = tiles_of(group, query, key, value, config)
    sequences = Sequences(size, length, pattern, None if rows == length else rows)

    padded = round_up(length, tiles.tile_n)
    slots = max(size - 1 if nodes == 1 else size, 1)
    whole = size == 1 or pattern.is_empty(query, key)
    parts, part_rows, window = (1, padded, units) if whole else cut_rounds(units, padded, slots, tiles)
    chosen, why = kernel_of(group, inputs, length, parts, softcap, config)
    hopper = chosen == "gluon"
    if hopper:
        tiles = replace(tiles, tile_m=HOPPER_TILE, tile_n=HOPPER_ROWS, stages=HOPPER_STAGES, warps=4)
    rounds, block_keys = units * parts, HOPPER_TILE if hopper else tiles.tile_n
    blocks = math.ceil(part_rows / block_keys)
    ranges = ranges_of(sequences, group.rank, block_keys)
    tasks = _tasks(
        group, sequences, ranges, tiles, HOPPER_ROWS if hopper else tiles.tile_m, blocks, heads // max(kv_heads, 1)
    )  # fmt: skip
    settings, free, reasons = _resolve(group, query, value, tiles, sequences, tasks, units, hopper, config)
    _check(group, settings, value_columns, query.dtype, hopper)
    if size > 1:
        keys = window * slots * part_rows * 2 * width * query.element_size() / 2**20
        partials = window * (size + nodes - 1) * part_rows * (settings.tile_k + value_columns) * 4 / 2**20
        reasons.append(
            f"the buffers take {keys:.3g} MiB for other ranks' keys and values and {partials:.3g} MiB for partials of "
            f"their gradients: slots for {window} of {rounds} rounds"
            + (f"; a head's keys come in {parts} parts, sums of dq are kept in between" if parts > 1 else "")
        )
    helpers = settings.send_ctas + (0 if hopper else settings.intra_ctas)
    # the last rounds cannot be pushed before their slots are free
    work = (sum(tasks.queries) + sum(tasks.keys)) * units / settings.ctas
    ready = max(free, work * (rounds - window) / max(rounds, 1))
    schedule = scheduled(
        tasks, rounds, parts, window, settings.ctas, Helpers(helpers, ready, max(rounds - window, 0))
    )  # fmt: skip
    upload = group.world.memory.upload
    return Plan(
        config=settings, kernel=chosen, sequences=sequences, nodes=nodes, padded=padded, slots=slots, width=width,
        value_columns=value_columns, parts=parts, part_rows=part_rows, tiles=part_rows // tiles.tile_n, blocks=blocks,
        window=window, rounds=rounds, chunks=math.ceil(part_rows / tiles.chunk_rows),
        precision=matmul_precision(query.dtype), schedule=upload(group.world_rank, schedule),
        ranges=upload(group.world_rank, ranges.ravel().tolist()), spans=spans_of(group, sequences),
        places=places_of(group, sequences), reasons=(why, *reasons),
    )  # fmt: skip


def _check(group: Group, settings: Settings, value_columns: int, dtype: torch.dtype, hopper: bool) -> None:
    """Refuse settings that could not run."""
    if not hopper:  # which has fixed tiles
        columns = 2 * max(settings.tile_m, settings.tile_n, settings.tile_k, value_columns)  # two sums at a time
        if settings.tile_n * columns > planning.REGISTERS:
            raise ArgumentError(
                f"config.tile_n is {settings.tile_n}, but dk and dv of a block of keys, 2 x {settings.tile_n} x "
                f"{settings.tile_k}, must fit into the {planning.REGISTERS} registers of a CTA, and so must its "
                f"scores: with tile_m={settings.tile_m}, tile_n may be at most {planning.REGISTERS // columns}"
            )
        planning.check_tile(settings, dtype, False, columns=columns, staged=(settings.tile_m,) * 2)
    planning.check(
        settings, max_ctas=group.world.launcher.ctas(group.world_rank), least_send=1 if group.nodes > 1 else 0,
        least_intra=1 if group.gpus_per_node > 1 else 0, copiers_compute=hopper,
    )  # fmt: skip
