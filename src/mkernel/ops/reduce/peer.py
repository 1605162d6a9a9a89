"""The schedules of mKernel's GEMM + ReduceScatter and GEMM + AllReduce, for `mkernel.scale.validation`: the result has
size x size elements, and each of 16 ranks multiplies size/16 of the depth.

Both divide the result's rows among the 8 GPUs of a node, not among all 16: a GPU sends the sum of its node to its
counterpart in the other one, and both add the two. So reduce-scatter leaves every row on two GPUs, and sends twice as
much as ours. CTAs take tiles row by row: a row of tiles of every GPU, then the next one.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mkernel.scale.engine import Engine, Lanes, Link, serve
from mkernel.scale.peer import SMS, TILE_BYTES, TILE_M, TILE_N, Peer, claim, move

Array = Any
# by size: CTAs that multiply, send, and reduce; tiles of a request
SCATTER = {
    2048: (112, 10, 10, 2), 4096: (116, 8, 8, 4), 8192: (118, 6, 8, 4), 16384: (120, 4, 8, 4), 32768: (120, 4, 8, 8),
    65536: (124, 2, 6, 32),
}  # fmt: skip
# by size: CTAs that multiply, sum up within the node, send, and publish; tiles of a request
ALL_REDUCE = {
    2048: (112, 14, 3, 3, 4), 4096: (108, 14, 5, 5, 4), 8192: (100, 14, 9, 9, 4), 16384: (84, 14, 17, 17, 4),
    32768: (84, 14, 17, 17, 32),
}  # fmt: skip
RECYCLED = 8  # with so few requests, all CTAs publish


def _multiply(lanes: Lanes, count: int, tiles: int, seconds: float, link: Link | None, nbytes: float) -> Array:
    """Tiles, dealt in turn to the first `count` lanes. Returns when each has been stored."""
    done = np.empty(tiles)
    for first in range(0, tiles, count):
        tile = np.arange(first, min(first + count, tiles))
        which = tile - first
        lanes.work(seconds, "multiply", which)
        if link is not None:
            lanes.wait(link.carry(lanes.clock[which], nbytes), "NVLink", which)
        done[tile] = lanes.clock[which]
    return done


def _send(engine: Engine, senders: int, ready: Array, in_row: int, nbytes: int) -> Array:
    """Requests that may be sent at these times; those of a row are one CTA's. Returns when they arrive."""
    posted, seconds = np.empty(len(ready)), engine.machine.post_seconds
    for sender in range(senders):
        own = np.arange(len(ready)) // in_row % senders == sender
        if own.any():
            posted[own] = serve(ready[own], seconds, engine.start)
    return engine.network.send(posted, nbytes, 1)[1]


def run_reduce_scatter(engine: Engine, peer: Peer, size: int) -> None:
    """CTAs that multiply add their tiles in the memory of those GPUs whose rows they are. When all 8 GPUs have added
    the tiles of a request, it is sent. CTAs that reduce add what comes; those that have multiplied join them."""
    gpus = engine.gpus_per_node
    multiplying, senders, reducing, tiles = SCATTER[size]
    rows, columns = size // gpus // TILE_M, size // TILE_N
    tiles = min(tiles, columns)
    lanes = engine.lanes("CTAs", multiplying + reducing)
    seconds = peer.tile(size // engine.ranks, multiplying) + peer.machine.pushed_seconds
    stored = _multiply(
        lanes, multiplying, rows * gpus * columns, seconds, Link(peer.scattered), TILE_BYTES * (gpus - 1) / gpus
    )  # fmt: skip
    # a GPU begins a row with its own part, so the others are done with that at different times
    ready = stored.reshape(rows, gpus, columns // tiles, tiles).max((1, 3)).ravel() + peer.machine.nvlink_seconds
    landed = _send(engine, senders, ready, columns // tiles, tiles * TILE_BYTES)
    claim(lanes, landed, tiles * TILE_BYTES / peer.machine.copy, "reduce")


def run_all_reduce(engine: Engine, peer: Peer, size: int) -> None:
    """CTAs that multiply store tiles locally. Of the tiles of a GPU's rows, others read the sum of the node through the
    switch, and send it. What comes is added, and published to the node by multicast. At the end, the ranks of the node
    and then the nodes wait for each other."""
    gpus, machine = engine.gpus_per_node, peer.machine
    multiplying, summing, senders, publishing, tiles = ALL_REDUCE[size]
    rows, columns = size // gpus // TILE_M, size // TILE_N
    lanes = engine.lanes("CTAs", multiplying)
    stored = _multiply(
        lanes, multiplying, rows * gpus * columns, peer.tile(size // engine.ranks, multiplying), None, 0.0
    )
    # all GPUs take the parts of a row in the same order, so that the one with the last part is the slowest
    ready = stored.reshape(rows, gpus, -1, tiles)[:, -1].max(-1).ravel() + machine.nvlink_seconds
    sums = engine.lanes("summing CTAs", summing)
    seconds, moved = TILE_BYTES / machine.copy, TILE_BYTES * (gpus - 1)
    summed = move(sums, np.repeat(ready, tiles), seconds, Link(peer.scattered), moved)
    landed = _send(engine, senders, summed.reshape(-1, tiles).max(1), columns // tiles, tiles * TILE_BYTES)
    publishers = engine.lanes("publishing CTAs", publishing if len(landed) > RECYCLED else SMS)
    published = claim(publishers, np.sort(landed), tiles * seconds, "publish")
    # sums load the link from a GPU, and what is published the one to it
    through = Link(peer.multicast).carry(published, tiles * moved).max() + machine.nvlink_seconds
    _, over = engine.network.send(np.array([through]), 4, 1)
    publishers.wait(over, "the other node", np.array([0]))
