"""The model of all_gather_matmul for `mkernel plan`: how its kernels carry out a plan."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np

from mkernel.lang.order import arrival_order, swizzle_tile
from mkernel.lang.roles import other_tiles_of, own_tiles_of
from mkernel.ops.all_gather_matmul import peer
from mkernel.ops.all_gather_matmul.order import destination_at, forwarded_at
from mkernel.ops.all_gather_matmul.plan import Plan
from mkernel.runtime.config import Config
from mkernel.scale.engine import Engine, Lanes, in_slabs
from mkernel.scale.evaluate import call
from mkernel.scale.model import Model, Problem, Timed, Work, tiles_of_teams

Array = Any


def run(engine: Engine, plan: Plan, problem: Problem) -> None:
    m_total, n, k = problem.shape
    m = m_total // engine.ranks
    ctas = engine.lanes("CTAs", plan.config.ctas)
    if plan.few_rows:
        _run_few_rows(engine, plan, problem, ctas)
    elif plan.hopper:
        pushed = _push(engine, plan, m, k * problem.element)
        _multiply_on_hopper(engine, plan, (m, n, k), ctas, pushed)
    else:
        arrived = _transfer(engine, plan, m, k * problem.element, ctas)
        _multiply(engine, plan, (m, n, k), ctas, _blocks_of(plan, m, arrived))


# -- transfers: arrays of when a chunk is where it is needed, [nodes, 2, chunks]


def _rows_of(chunks: int, chunk_rows: int, m: int) -> Array:
    return np.minimum(m - np.arange(chunks) * chunk_rows, chunk_rows)


def _transfer(engine: Engine, plan: Plan, m: int, row_bytes: int, ctas: Lanes) -> Array:
    """The roles `send` and `intra` of transfer.py. Returns when the chunks of a rank `i` nodes before this one arrive:
    [i, 0] those of this rank's counterpart there, [i, 1] those of the other ranks of that node. (For i = 0: of this
    rank's peers.)"""
    c, nodes, machine = plan.config, engine.nodes, engine.machine
    sizes = _rows_of(plan.chunks, c.chunk_rows, m) * row_bytes
    arrived = np.full((nodes, 2, plan.chunks), engine.start)
    offsets = call(destination_at, np.arange(1, nodes), NODES=nodes)
    for sent in range(plan.chunks if c.send_ctas else 0):
        sender = sent % c.send_ctas
        which = slice(sender, sender + 1)
        if not plan.access.rows.direct:
            ctas.work(sizes[sent] / machine.copy, "copy", which, index=sent)
        arrived[offsets, 0, sent] = engine.post(ctas, sender, sizes[sent], offsets)
    peers = engine.gpus_per_node - 1
    if c.intra_ctas == 0:
        arrived[:, 1] = arrived[:, 0]
        return arrived
    link = engine.link(c.intra_ctas)
    items = np.arange(plan.chunks * nodes)
    for begin in range(0, len(items), c.intra_ctas):
        item = items[begin : begin + c.intra_ctas]
        chunk, offset = call(forwarded_at, item, plan.chunks, NODES=nodes)
        # `spread_rows` counts nodes from this one on, `arrived` those before it
        source = np.where(offset == 0, 0, nodes - offset)
        lanes = c.send_ctas + np.arange(len(item))
        ctas.wait(np.where(offset == 0, 0.0, arrived[source, 0, chunk]), "the network", lanes)
        ctas.work(sizes[chunk] * peers / machine.copy, "copy", lanes, index=chunk)
        done = link.carry(ctas.clock[lanes], sizes[chunk] * peers, np.arange(len(item)))
        ctas.wait(done, "NVLink", lanes)
        arrived[source, 1, chunk] = ctas.clock[lanes] + machine.nvlink_seconds
    return arrived


def _push(engine: Engine, plan: Plan, m: int, row_bytes: int) -> Array:
    """The push warps of hopper.py. Returns when the chunks of every other rank arrive."""
    c, machine = plan.config, engine.machine
    pushers = min(c.ctas, plan.chunks)
    warps = engine.lanes("push warps", pushers)
    link = engine.link(pushers)
    peers = engine.ranks - 1
    sizes = _rows_of(plan.chunks, c.chunk_rows, m) * row_bytes * peers
    pushed = np.zeros(plan.chunks)
    for first in range(0, plan.chunks if peers else 0, pushers):
        chunk = np.arange(first, min(first + pushers, plan.chunks))
        which = chunk - first
        warps.work(sizes[chunk] / machine.warp_copy, "copy", which, index=chunk)
        warps.wait(link.carry(warps.clock[which], sizes[chunk], which), "NVLink", which)
        pushed[chunk] = warps.clock[which] + machine.nvlink_seconds
    return pushed


def _blocks_of(plan: Plan, m: int, arrived: Array) -> Array:
    """When the row blocks of a tile's height have arrived, from when the chunks have: [..., blocks]."""
    c = plan.config
    row = np.arange(0, m, c.tile_m)
    first, last = row // c.chunk_rows, (np.minimum(row + c.tile_m, m) - 1) // c.chunk_rows
    return np.stack([arrived[..., a : b + 1].max(-1) for a, b in zip(first, last)], axis=-1)


# -- tiles


def tiles_of_others(
    plan: Plan, rank: int, cluster: tuple[int, int], blocks: int, column_blocks: int
) -> Iterator[tuple[Array, Array, Array, Array]]:
    """The tiles of other ranks' rows (of all ranks' if STAGED) that kernel.py computes on a cluster of (nodes, GPUs per
    node), some steps at a time: (counts, tile, source, row block), arrays of [steps, CTAs]. The first counts[i] of CTA
    i are there; the others mean nothing."""
    c, (nodes, gpus) = plan.config, cluster
    helpers = c.send_ctas + c.intra_ctas
    skipped = 0 if plan.access.rows.staged else 1
    others = nodes * gpus - skipped
    before = skipped * (blocks * column_blocks - min(c.join_tiles * helpers, blocks * column_blocks))
    tiles = blocks * column_blocks * others
    first, end, step = call(other_tiles_of, np.arange(c.ctas), helpers, before, tiles, ctas=c.ctas)
    counts = np.maximum(-(-(end - first) // step), 0)
    for place in in_slabs(int(counts.max(initial=0)), c.ctas):
        tile = np.minimum(first + place * step, tiles - 1)
        nth, _ = call(swizzle_tile, tile, blocks * others, column_blocks, GROUP=c.group_m)
        source, block = call(
            arrival_order, nth + blocks * skipped, rank, blocks, WORLD_SIZE=nodes * gpus, RANKS_PER_NODE=gpus
        )
        yield np.clip(counts - place[0, 0], 0, len(place)), tile, source, block


def _multiply(engine: Engine, plan: Plan, sizes: tuple[int, int, int], ctas: Lanes, ready: Array) -> None:
    """The compute role of kernel.py. ready: see `_transfer`, for row blocks."""
    c, nodes, gpus = plan.config, engine.nodes, engine.gpus_per_node
    m, n, k = sizes
    helpers = c.send_ctas + c.intra_ctas
    blocks, column_blocks = math.ceil(m / c.tile_m), math.ceil(n / c.tile_n)
    tiles = blocks * column_blocks
    seconds = engine.machine.tile(c.tile_m, c.tile_n, k)
    if not plan.access.rows.staged:
        left = min(c.join_tiles * helpers, tiles)
        first, end, step = call(own_tiles_of, np.arange(c.ctas), helpers, tiles, left, ctas=c.ctas)
        counts = np.maximum(-(-(end - first) // step), 0)
        for place in in_slabs(int(counts.max()), c.ctas):
            taken = np.clip(counts - place[0, 0], 0, len(place))
            ctas.run(np.zeros(place.shape), seconds, taken, "multiply", "rows", index=first + place * step)
    for counts, tile, source, block in tiles_of_others(plan, engine.rank, (nodes, gpus), blocks, column_blocks):
        node = (engine.rank // gpus - source // gpus) % nodes
        far = (source - engine.rank) % gpus != 0
        ctas.run(ready[node, far.astype(int), block], seconds, counts, "multiply", "rows", index=tile)


def _multiply_on_hopper(
    engine: Engine, plan: Plan, sizes: tuple[int, int, int], ctas: Lanes, pushed: Array
) -> None:  # fmt: skip
    """The other warps of hopper.py, of one node."""
    from mkernel.ops.all_gather_matmul.hopper import _tile_at

    c = plan.config
    m, n, k = sizes
    comm = SimpleNamespace(context=engine.rank, WORLD_SIZE=engine.ranks)
    kernel_call = SimpleNamespace(gather=SimpleNamespace(m=m), n=n, GROUP=c.group_m, TILE_M=c.tile_m, TILE_N=c.tile_n)
    tiles = math.ceil(m / c.tile_m) * math.ceil(n / c.tile_n) * engine.ranks
    counts = np.maximum(-(-(tiles - np.arange(c.ctas)) // c.ctas), 0)
    ready = _blocks_of(plan, m, pushed)
    for place in in_slabs(int(counts.max()), c.ctas):
        index = np.minimum(np.arange(c.ctas) + place * c.ctas, tiles - 1)
        _, block, _, own = call(_tile_at, comm, kernel_call, index)
        times = np.where(own, 0.0, ready[block])
        ctas.run(
            times, engine.machine.tile(c.tile_m, c.tile_n, k), np.clip(counts - place[0, 0], 0, len(place)),
            "multiply", "rows", index=index,
        )  # fmt: skip


def _run_few_rows(engine: Engine, plan: Plan, problem: Problem, ctas: Lanes) -> None:
    """The kernel of few_rows.py: all CTAs push chunks, then teams of them multiply at the speed of memory. Tiles cover
    the rows of all ranks, so they wait for the last chunk."""
    m_total, n, k = problem.shape
    c, machine = plan.config, engine.machine
    if engine.ranks > 1:
        link = engine.link(c.ctas)
        sizes = _rows_of(plan.chunks, c.chunk_rows, m_total // engine.ranks) * k * problem.element * (engine.ranks - 1)
        for first in range(0, plan.chunks, c.ctas):
            chunk = np.arange(first, min(first + c.ctas, plan.chunks))
            which = chunk - first
            ctas.work(sizes[chunk] / machine.copy, "copy", which, index=chunk)
            ctas.wait(link.carry(ctas.clock[which], sizes[chunk], which), "NVLink", which)
        ctas.wait(ctas.clock.max() + machine.nvlink_seconds, "rows")
    read = (m_total * k + n * k + m_total * n) * problem.element / machine.memory
    multiplied = 2 * m_total * n * k / machine.sm_flops["gemm"] / c.ctas
    tiles = tiles_of_teams(plan.config, math.ceil(m_total / c.tile_m) * math.ceil(n / c.tile_n))
    for lanes, tile in tiles:
        ctas.work(max(read, multiplied) / len(tiles) + machine.tile_seconds, "multiply", lanes, index=tile)


def work(problem: Problem, nodes: int, gpus: int) -> Work:
    m_total, n, k = problem.shape
    own = m_total // (nodes * gpus) * k * problem.element
    return Work(
        flops=2.0 * m_total * n * k,
        library="gemm",
        memory=float((m_total * k + n * k + m_total * n) * problem.element),
        nvlink=float((gpus - 1) * nodes * own),
        network=float((nodes - 1) * own),
    )


TIMED = (
    Timed("launch_seconds", (16, 128, 128)),
    Timed("sm_flops.gemm", (8192, 8192, 8192), library="gemm"),
    Timed("tile_seconds", (8192, 8192, 1024)),
    Timed("tile_rates.128x128", (8192, 8192, 8192), config=Config(tile_m=128, tile_n=128)),
    Timed("tile_rates.64x128", (8192, 8192, 8192), config=Config(tile_m=64, tile_n=128)),
    # one CTA copies all rows, which takes longer than to multiply them
    Timed("copy", (16384, 2048, 8192), ranks=2, config=Config(intra_ctas=1, join_tiles=0)),
)
MODEL = Model(run, work, peer=peer.run, timed=TIMED)
