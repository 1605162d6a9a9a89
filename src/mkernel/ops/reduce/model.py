"""The models of matmul_reduce_scatter and matmul_all_reduce for `mkernel plan`: how their kernels carry out a plan."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from mkernel.ops.reduce import peer
from mkernel.ops.reduce.all_reduce.order import FEWEST_WITH_HOMES, count_rounds, home_of, round_at, round_of
from mkernel.ops.reduce.call import Plan
from mkernel.ops.reduce.reduce_scatter.order import deal_tiles, tile_at
from mkernel.scale.engine import Engine, Shares, Whole, in_slabs
from mkernel.scale.evaluate import call
from mkernel.scale.machine import TILE_ELEMENTS
from mkernel.scale.model import Model, Problem, Timed, Work, tiles_of_teams

Array = Any


def _run_few_rows(engine: Engine, plan: Plan, problem: Problem) -> None:
    """few_rows.py and sliced.py: tiles at the speed of memory. After each, everybody sends the parts of it that others
    own, adds up its own and, for all-reduce, reads what the others own."""
    m, n, k_total = problem.shape
    machine, ranks, c = engine.machine, engine.ranks, plan.config
    ctas, link = engine.lanes("CTAs", c.ctas), engine.link(c.ctas)
    k = k_total // ranks
    read = (m * k + k * n) * problem.element / machine.memory
    multiplied = 2 * m * n * k / machine.sm_flops["gemm"] / c.ctas
    tiles = tiles_of_teams(c, plan.tiles)
    moved = m * n * problem.element * (ranks - 1) / ranks / c.ctas / len(tiles)
    adding = (ranks - 1) * machine.partial_seconds / ranks + moved / machine.copy

    def move(kind: str, lanes: Array, tile: Array) -> None:
        ctas.work(moved / machine.copy, kind, lanes, index=tile)
        reached = link.carry(ctas.clock[lanes], moved, lanes)
        ctas.wait(reached + machine.nvlink_seconds, "NVLink", lanes)

    for lanes, tile in tiles:
        ctas.work(max(read, multiplied) / len(tiles) + machine.tile_seconds, "multiply", lanes, index=tile)
        if ranks == 1:
            continue
        move("push", lanes, tile)
        ctas.work(adding, "reduce", lanes, index=tile)
        if plan.sliced:
            move("gather", lanes, tile)
            ctas.work(adding, "store", lanes)


def of_tile(engine: Engine, plan: Plan) -> tuple[float, float]:
    """(seconds to push a tile, and to add a peer's): more for larger tiles."""
    size = plan.config.tile_m * plan.config.tile_n / TILE_ELEMENTS
    return engine.machine.pushed_seconds * size, engine.machine.partial_seconds * size


# -- reduce-scatter


def tiles_of_scatter(plan: Plan, cluster: tuple[int, int]) -> Iterator[tuple[Array, Array, Array, Array]]:
    """The tiles that CTAs take on a cluster of (nodes, GPUs per node), the n-th of each at a time: (CTAs, node offset,
    rank offset, tile), see `tile_at`."""
    nodes, gpus = cluster
    ctas = plan.config.ctas
    cta = np.arange(ctas)
    dealt = call(deal_tiles, plan.tiles, WORLD_SIZE=nodes * gpus, cta=cta, ctas=ctas)
    rounds, early, late = (np.broadcast_to(part, ctas) for part in dealt)
    length = rounds * nodes * gpus + early + late
    for place in in_slabs(int(length.max()), ctas):
        node, rank, tile = call(
            tile_at, place, plan.tiles, rounds, early, WORLD_SIZE=nodes * gpus, RANKS_PER_NODE=gpus, cta=cta, ctas=ctas
        )
        for i in range(len(place)):
            lanes = cta[place[i, 0] < length]
            yield lanes, node[i, lanes], rank[i, lanes], tile[i, lanes]


class _Scatter:
    """A launch of matmul_reduce_scatter. Arrays are indexed by how many nodes the owner of a tile is behind this one,
    and by the tile.

    pushed: when the last partial that this rank has pushed for a tile is signalled. All ranks of the node push theirs
    at the same time to the one that reduces the tile, so that is when it has all of them.
    summed: when the last sum of another node arrives, for this rank's own tiles.
    due: the pending signal of each CTA, as an index into `pushed`, or -1, and when its stores have reached the peer.
    """

    def __init__(self, engine: Engine, plan: Plan, problem: Problem):
        self.engine, self.plan = engine, plan
        c = plan.config
        self.ctas = engine.lanes("CTAs", c.ctas)
        self.bytes = c.tile_m * c.tile_n * problem.element
        self.seconds = engine.machine.tile(c.tile_m, c.tile_n, problem.shape[2] // engine.ranks)
        self.pushing, self.adding = of_tile(engine, plan)
        self.pushed = np.zeros(engine.nodes * plan.tiles)
        self.summed = np.zeros(plan.tiles)
        self.link = engine.link(c.ctas)
        self.due = np.full(c.ctas, -1)
        self.reached = np.zeros(c.ctas)

    def run(self) -> None:
        nodes, gpus = self.engine.nodes, self.engine.gpus_per_node
        for lanes, node, rank, tile in tiles_of_scatter(self.plan, (nodes, gpus)):
            self.end_tiles(lanes, node, rank, tile)
        self.signal(np.arange(self.plan.config.ctas))

    def end_tiles(self, lanes: Array, node: Array, rank: Array, tile: Array) -> None:
        """One tile of each of these CTAs: of the rows of the rank `rank` behind this one, `node` nodes behind."""
        self.ctas.work(self.seconds, "multiply", lanes, index=tile)
        if not self.plan.hopper:
            self.signal(lanes)
        is_pushed = rank != 0
        if is_pushed.any():
            self.push(lanes[is_pushed], (node * self.plan.tiles + tile)[is_pushed])
        for own, step in ((False, self.send), (True, self.store)):
            chosen = ~is_pushed & ((node == 0) == own)
            if chosen.any():
                step(lanes[chosen], node[chosen], tile[chosen])

    def push(self, lanes: Array, index: Array) -> None:
        machine = self.engine.machine
        self.ctas.work(self.pushing, "push", lanes, index=index % self.plan.tiles)
        self.reached[lanes] = self.link.carry(self.ctas.clock[lanes], self.bytes, lanes) + machine.nvlink_seconds
        self.due[lanes] = index
        if self.plan.hopper:  # a warp of its own signals
            np.maximum.at(self.pushed, index, self.reached[lanes])
            self.due[lanes] = -1

    def signal(self, lanes: Array) -> None:
        """Send the signals of the partials that these CTAs have pushed last."""
        pending = lanes[self.due[lanes] >= 0]
        if len(pending):
            self.ctas.wait(self.reached[pending] - self.engine.machine.nvlink_seconds, "NVLink", pending)
            index = self.due[pending]
            time = np.maximum(self.reached[pending], self.ctas.clock[pending])
            np.maximum.at(self.pushed, index, time)  # CTAs may push partials of one tile at the same step
            self.due[pending] = -1

    def reduce(self, lanes: Array, index: Array) -> None:
        """Add the partials that the node has pushed."""
        self.ctas.wait(self.pushed[index], "partials", lanes)
        own = index % self.plan.tiles
        self.ctas.work((self.engine.gpus_per_node - 1) * self.adding, "reduce", lanes, index=own)

    def send(self, lanes: Array, node: Array, tile: Array) -> None:
        """The node's sum of a tile, to its owner."""
        self.reduce(lanes, node * self.plan.tiles + tile)
        self.ctas.work(self.engine.machine.post_seconds, "post", lanes)
        accepted, arrived = self.engine.network.send(self.ctas.clock[lanes], self.bytes, node)
        self.ctas.wait(accepted, "the network", lanes)
        np.maximum.at(self.summed, tile, arrived)

    def store(self, lanes: Array, node: Array, tile: Array) -> None:
        """The sum of a tile of this rank's own rows."""
        self.reduce(lanes, tile)
        self.ctas.wait(self.summed[tile], "the network", lanes)
        self.ctas.work((self.engine.nodes - 1) * self.adding, "reduce", lanes)


def run_reduce_scatter(engine: Engine, plan: Plan, problem: Problem) -> None:
    if plan.few_rows:
        _run_few_rows(engine, plan, problem)
    else:
        _Scatter(engine, plan, problem).run()


def work_of_reduce_scatter(problem: Problem, nodes: int, gpus: int) -> Work:
    m_total, n, k_total = problem.shape
    ranks = nodes * gpus
    k, part = k_total // ranks, m_total // ranks * n * problem.element
    return Work(
        flops=2.0 * m_total * n * k,
        library="gemm",
        memory=float((m_total * k + n * k + m_total * n) * problem.element),
        nvlink=float((gpus - 1) * nodes * part),
        network=float((nodes - 1) * part),
    )


# -- all-reduce


class _Reduce:
    """A launch of matmul_all_reduce: two_level.py, and hopper.py, in which warps of their own signal and gather. Arrays
    are indexed by block and CTA.

    pushed: when the last partial that this rank has pushed in a block is signalled; all ranks push at the same time.
    summed: when the last sum of another node arrives for this rank's tile of a block. With homes (see home.py), while
        only sums are on their way: when the one that this rank has sent arrives at the tile's home.
    received: when the finished tile of a block arrives from its home.
    finished: when this rank's tile of a block can be read by the others, and theirs by this one.
    """

    def __init__(self, engine: Engine, plan: Plan, problem: Problem):
        self.engine, self.plan = engine, plan
        c, m = plan.config, engine.machine
        self.ctas = engine.lanes("CTAs", c.ctas)
        self.gather_lanes = engine.lanes("gather warps", c.ctas) if plan.hopper else self.ctas
        self.bytes = c.tile_m * c.tile_n * problem.element
        self.seconds = m.tile(c.tile_m, c.tile_n, problem.shape[2] // engine.ranks)
        self.pushing, self.adding = of_tile(engine, plan)
        self.rounds = np.broadcast_to(call(count_rounds, plan.tiles, cta=np.arange(c.ctas), ctas=c.ctas), c.ctas)
        self.blocks = -(-int(self.rounds.max()) // engine.gpus_per_node)
        self.pushed, self.summed, self.received, self.finished = (np.zeros((self.blocks, c.ctas)) for _ in range(4))
        self.link: Shares | Whole = engine.link(c.ctas)
        self.has_homes = engine.nodes >= FEWEST_WITH_HOMES.value
        self.lag = 0 if plan.hopper else 3 if self.has_homes else engine.nodes

    def run(self) -> None:
        """Block by block: the tiles of the block, and then what remains of earlier blocks. The last steps, for which
        there are no more tiles, are those of CTAs that have as many blocks; the others take them earlier."""
        for block in range(self.blocks + self.lag):
            self.multiply(block)
            if self.engine.nodes > 1:
                self.finish_later(block - 1)
            if self.has_homes:
                self.receive(block - 2)
            self.gather(block - self.lag)

    def multiply(self, block: int) -> None:
        gpus, c = self.engine.gpus_per_node, self.plan.config
        cta = np.arange(c.ctas)
        local = self.engine.rank % gpus
        for place in range(block * gpus, min((block + 1) * gpus, int(self.rounds.max()))):
            lanes = cta[place < self.rounds]
            taken, owner = call(round_at, place, self.rounds, local, RANKS_PER_NODE=gpus, cta=cta, ctas=c.ctas)
            tile = taken * c.ctas + cta
            is_own = (owner == local)[lanes]
            self.ctas.work(self.seconds, "multiply", lanes, index=tile[lanes])
            self.push(lanes[~is_own], block, tile)
            self.reduce(lanes[is_own], block, tile)

    def tile_of(self, block: int) -> tuple[Array, Array]:
        """The CTAs of which this rank owns a tile of a block, and that tile of each CTA."""
        gpus, c = self.engine.gpus_per_node, self.plan.config
        cta = np.arange(c.ctas)
        own = call(round_of, block, self.engine.rank % gpus, RANKS_PER_NODE=gpus, cta=cta, ctas=c.ctas)
        return cta[(own < self.rounds) & (block >= 0)], own * c.ctas + cta

    def push(self, lanes: Array, block: int, tile: Array) -> None:
        machine = self.engine.machine
        self.ctas.work(self.pushing, "push", lanes, index=tile[lanes])
        reached = self.link.carry(self.ctas.clock[lanes], self.bytes, lanes)
        if not self.plan.hopper:
            self.ctas.wait(reached, "NVLink", lanes)
        self.pushed[block, lanes] = np.maximum(self.pushed[block, lanes], reached + machine.nvlink_seconds)

    def reduce(self, lanes: Array, block: int, tile: Array) -> None:
        machine, gpus = self.engine.machine, self.engine.gpus_per_node
        self.ctas.wait(self.pushed[block, lanes], "partials", lanes)
        self.ctas.work((gpus - 1) * self.adding, "reduce", lanes, index=tile[lanes])
        if self.engine.nodes == 1:
            self.finish(lanes, block)
            return
        if self.has_homes:
            lanes = lanes[self.homes_behind(lanes, block) > 0]
        for offset in [self.homes_behind(lanes, block)] if self.has_homes else range(1, self.engine.nodes):
            self.ctas.work(machine.post_seconds, "post", lanes)
            accepted, arrived = self.engine.network.send(self.ctas.clock[lanes], self.bytes, offset)
            self.ctas.wait(accepted, "the network", lanes)
            self.summed[block, lanes] = np.maximum(self.summed[block, lanes], arrived)

    def finish(self, lanes: Array, block: int) -> None:
        """A finished tile is stored where peers read it."""
        self.ctas.work(self.pushing, "store", lanes)
        reached = self.ctas.clock[lanes]
        if self.plan.hopper:  # what peers read crosses the link, too
            reached = self.link.carry(reached, self.bytes * (self.engine.gpus_per_node - 1), lanes)
        self.finished[block, lanes] = reached + self.engine.machine.nvlink_seconds

    def homes_behind(self, lanes: Array, block: int) -> Array:
        """How many nodes behind this one the homes of a block's tiles are."""
        c, nodes = self.plan.config, self.engine.nodes
        homes = call(home_of, block, NODES=nodes, cta=lanes, ctas=c.ctas)
        return (homes - self.engine.rank // self.engine.gpus_per_node) % nodes

    def finish_at_home(self, lanes: Array, block: int, tile: Array) -> None:
        """The tiles of which this node is the home. Of as many CTAs as there are nodes, one has such a tile. What it
        receives, its neighbours have sent elsewhere, and what it sends, they receive."""
        nodes, machine, network = self.engine.nodes, self.engine.machine, self.engine.network
        behind = self.homes_behind(lanes, block)
        neighbours = (lanes + block) // nodes
        is_home = behind == 0
        # a block of fewer CTAs than nodes has few homes, and they receive more than the others
        homes = int(is_home.sum())
        surplus = max(homes * (nodes - 1) - (len(lanes) - homes), 0) * self.bytes / network.card.rate
        summed = np.zeros(int(neighbours.max()) + 1)
        np.maximum.at(summed, neighbours, self.summed[block, lanes])
        summed += surplus
        adding = nodes * self.adding + self.pushing
        sending = np.arange(1, nodes)
        # where no neighbour has its home here: as if one had, and sent at the rate of the network
        received = (
            summed[neighbours] + adding + (nodes - behind) * self.bytes / network.card.rate + machine.network_seconds
        )
        own = lanes[is_home]
        if len(own):
            self.ctas.wait(summed[neighbours[is_home]], "the network", own)
            self.ctas.work(nodes * self.adding, "reduce", own, index=tile[own])
            self.finish(own, block)
            posted = self.ctas.clock[own][:, None] + sending * machine.post_seconds
            accepted, arrived = network.send(posted, self.bytes, np.broadcast_to(sending, posted.shape))
            self.ctas.work((nodes - 1) * machine.post_seconds, "post", own)
            self.ctas.wait(accepted[:, -1], "the network", own)
            place = np.full(len(summed), -1)
            place[neighbours[is_home]] = np.arange(len(own))
            at = place[neighbours]
            known = (at >= 0) & ~is_home
            received[known] = arrived[at[known], nodes - behind[known] - 1]
        self.received[block, lanes] = received

    def receive(self, block: int) -> None:
        """Finished tiles that come from their homes."""
        lanes, _ = self.tile_of(block)
        if not len(lanes):
            return
        away = lanes[self.homes_behind(lanes, block) > 0]
        machine = self.engine.machine
        self.ctas.wait(self.received[block, away], "the network", away)
        self.ctas.work(self.pushing, "store", away)
        self.finished[block, away] = self.ctas.clock[away] + machine.nvlink_seconds

    def finish_later(self, block: int) -> None:
        """This rank's own tiles of a block, for which the nodes have sent their sums."""
        lanes, tile = self.tile_of(block)
        if not len(lanes):
            return
        if self.has_homes:
            self.finish_at_home(lanes, block, tile)
            return
        self.ctas.wait(self.summed[block, lanes], "the network", lanes)
        self.ctas.work(self.engine.nodes * self.adding, "reduce", lanes, index=tile[lanes])
        self.finish(lanes, block)

    def gather(self, block: int) -> None:
        """Read the tiles of a block that the others have finished."""
        gpus, cta = self.engine.gpus_per_node, np.arange(self.plan.config.ctas)
        if gpus == 1 or not 0 <= block < self.blocks:
            return
        owned = np.zeros(len(cta))
        owned[self.tile_of(block)[0]] = 1
        taken = np.clip(self.rounds - block * gpus, 0, gpus)
        lanes = cta[taken > 0]
        nbytes = ((taken - owned) * self.bytes)[lanes]
        machine, readers = self.engine.machine, self.gather_lanes
        # all ranks finish theirs at the same time, those of the last block in other CTAs
        ready = np.where(owned, self.finished[block], self.finished[block].max())
        readers.wait(ready[lanes], "finished tiles", lanes)
        rate = machine.warp_copy if self.plan.hopper else machine.copy
        readers.work(nbytes / rate, "gather", lanes, index=block)
        if not self.plan.hopper:
            readers.wait(self.link.carry(readers.clock[lanes], nbytes, lanes), "NVLink", lanes)


def run_all_reduce(engine: Engine, plan: Plan, problem: Problem) -> None:
    if plan.few_rows or plan.sliced:
        _run_few_rows(engine, plan, problem)
    else:
        _Reduce(engine, plan, problem).run()


def work_of_all_reduce(problem: Problem, nodes: int, gpus: int) -> Work:
    m, n, k_total = problem.shape
    k, result = k_total // (nodes * gpus), m * n * problem.element
    return Work(
        flops=2.0 * m * n * k,
        library="gemm",
        memory=float((m * k + n * k + m * n) * problem.element),
        nvlink=2.0 * (gpus - 1) / gpus * result,
        # at the least: sums to their owners among the nodes, and back
        network=2.0 * (nodes - 1) / nodes * result / gpus,
        collectives=2,
        kernels=3,
    )


REDUCE_SCATTER = Model(run_reduce_scatter, work_of_reduce_scatter, peer=peer.run_reduce_scatter)
ALL_REDUCE = Model(
    run_all_reduce, work_of_all_reduce, peer=peer.run_all_reduce,
    timed=(Timed("nvlink_seconds", (64, 1024, 1024), ranks=2),),  # little but signals
)  # fmt: skip
