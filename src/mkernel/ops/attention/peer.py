"""The schedule of mKernel's ring attention, for `mkernel.scale.validation`: `size` positions of 4 x 16 heads of 128,
without a mask.

There are 16 steps: a ring of the node's 8 GPUs, and again with the keys and values of the other node, which are sent
at the beginning. A step is three launches. In the first, some CTAs copy keys and values to the next GPU; the others,
joined by those when they are done, attend with 192 queries of a head each. The second merges results, the third is a
barrier of the node. So a step takes as long as the longer one of copying and attending, and the next one begins after
it.
"""

from __future__ import annotations

import numpy as np

from mkernel.scale.engine import Engine
from mkernel.scale.peer import SMS, Peer, claim

HEADS, DIM, QUERIES = 4 * 16, 128, 192
CHUNK, LAUNCHES = 256 * 1024, 3
# by the positions of a rank: CTAs that copy to the next GPU, and those that copy what the network has brought
COPYING = {768: (16, 8), 1536: (8, 12), 3072: (12, 8), 6144: (12, 8), 12288: (8, 12)}


def run(engine: Engine, peer: Peer, size: int) -> None:
    machine, rows = peer.machine, size // engine.ranks
    result = HEADS * rows * DIM * 2
    keys, blocks = 2 * result, HEADS * rows // QUERIES
    attend = 4 * QUERIES * rows * DIM / machine.sm_flops["attention"] + machine.tile_seconds
    copying, receiving = COPYING[rows]
    copy = keys / min(copying * machine.copy, machine.nvlink)
    lanes = engine.lanes("CTAs", SMS)
    _, landed = engine.network.send(np.full(-(-keys // CHUNK), engine.start), CHUNK, 1)
    for step in range(2 * engine.gpus_per_node):
        if step == engine.gpus_per_node:
            lanes.wait(landed.max(), "the network")
            lanes.work(keys / receiving / machine.copy, "copy")
        lanes.work(copy, "copy", slice(0, copying))
        claim(lanes, np.zeros(blocks), attend, "attend")
        lanes.wait(lanes.clock.max(), "the step")
        merge = 3 * result / machine.memory if step else 0.0
        lanes.work(merge + LAUNCHES * machine.launch_seconds, "merge")
