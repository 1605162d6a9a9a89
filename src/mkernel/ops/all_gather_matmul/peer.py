"""The schedule of mKernel's AllGather + GEMM, for `mkernel.scale.validation`: A has size x size elements, B size x
size/16.

Of 132 CTAs, 4 copy (2 for the smallest size), with three warps each, in strips of 256 rows x 128 columns. They store
the rank's own rows in all GPUs of the node, by multicast, and then what comes from the counterpart in the other node.
The other CTAs multiply the rows of their own node, of which a tile waits strip by strip, and then those of the other
node, of which it waits for whole rows. They go through bands of 12 row blocks, column by column: so the first tiles
need all rows of one rank, long before any of another. A rank's rows are sent to the other node at the beginning, 128 to
a request.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mkernel.scale.engine import Engine, Link
from mkernel.scale.peer import SMS, TILE_M, TILE_N, Peer, move, run_list

Array = Any
STRIP_ROWS, STRIP_COLUMNS, WARPS, BAND = 256, 128, 3, 12


def run(engine: Engine, peer: Peer, size: int) -> None:
    gpus = engine.gpus_per_node
    rows, strips = size // engine.ranks, size // STRIP_COLUMNS
    copying = 2 if size == 4096 else 4
    warps, ctas = engine.lanes("copying warps", WARPS * copying), engine.lanes("CTAs", SMS - copying)
    link, nbytes = Link(peer.multicast), STRIP_ROWS * STRIP_COLUMNS * 2
    _, landed = engine.network.send(np.full(rows // TILE_M, engine.start), TILE_M * size * 2, 1)

    def copy(ready: Array) -> Array:
        """When the last strip of each block of rows has arrived, if the strips are ready at these times."""
        seconds = WARPS * nbytes / peer.machine.copy
        done = move(warps, np.repeat(ready, strips), seconds, link, nbytes * (gpus - 1))
        return done.reshape(-1, strips).max(1) + peer.machine.nvlink_seconds

    seconds = peer.tile(size, SMS - copying)
    near = copy(np.zeros(rows // STRIP_ROWS)) - seconds  # a tile may begin before, strip by strip
    far = copy(landed.reshape(-1, STRIP_ROWS // TILE_M).max(1))
    blocks, columns = gpus * rows // TILE_M, size // engine.ranks // TILE_N
    for ready in (near, far):
        run_list(ctas, ready[_blocks(blocks, columns) * TILE_M % rows // STRIP_ROWS], seconds)


def _blocks(blocks: int, columns: int) -> Array:
    """The row block of each tile, in the order of the tiles."""
    tile, whole = np.arange(blocks * columns), blocks // BAND * BAND
    late = tile - whole * columns
    return np.where(late < 0, tile // (BAND * columns) * BAND + tile % BAND, whole + late % max(blocks - whole, 1))
