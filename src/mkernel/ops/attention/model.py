"""The model of ring_attention for `mkernel plan`: how its kernels carry out a plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mkernel.ops.attention import peer
from mkernel.ops.attention.plan import Plan
from mkernel.ops.attention.schedule import SYNC_MARK
from mkernel.scale.engine import Engine
from mkernel.scale.model import Model, Problem, Timed, Work

Array = Any


class Transfers:
    """The roles that move keys and values. They go as far ahead of the tasks as there are slots.

    arrived: by round, when everything that this rank's tiles see has arrived. freed: when this rank's tasks of a round
    are done, so that others may write to its slots. told: when the other nodes know.
    """

    def __init__(self, engine: Engine, plan: Any, problem: Problem, *, by_warps: bool):
        self.engine, self.plan = engine, plan
        c, (_, _, _, dim), machine = plan.config, problem.shape, engine.machine
        self.ctas = engine.lanes("CTAs", c.ctas)
        self.pushers = engine.lanes("push warps", c.intra_ctas) if by_warps else self.ctas
        self.first_pusher = 0 if by_warps else c.send_ctas
        self.rate = machine.warp_copy if by_warps else machine.copy
        rows = np.minimum(plan.part_rows - np.arange(plan.chunks) * c.chunk_rows, c.chunk_rows)
        self.sizes = rows * 2 * dim * problem.element
        self.arrived: list[float] = []
        self.freed, self.told = np.zeros(plan.rounds), np.zeros(plan.rounds)
        received = np.array([plan.sequences.keys_sent(source, engine.rank) for source in range(engine.ranks)])
        self.own = received[engine.rank] / max(received.sum(), 1)  # of the keys that this rank's rows see
        self.seen: Array = received > 0

    def enter(self) -> None:
        """Tell the other nodes that this rank has entered the launch, and move what there are slots for."""
        self.entered = self.engine.start
        if self.engine.nodes > 1:
            self.entered = self.engine.post(self.ctas, 0, 0.0, np.arange(1, self.engine.nodes)).max()
        for _ in range(min(self.plan.window, self.plan.rounds)):
            self.transfer()

    def free(self, index: int, last: int) -> None:
        """The slots of a round are free again, for another one. last: the CTA that has done the last task of it, which
        tells the others."""
        if self.engine.ranks == 1:
            return
        if index + self.plan.window < self.plan.rounds:
            if self.engine.nodes > 1:
                self.told[index] = self.engine.post(self.ctas, last, 0.0, np.arange(1, self.engine.nodes)).max()
            self.transfer()

    def transfer(self) -> None:
        """The roles `send` and `intra` in the next round."""
        engine, plan, index = self.engine, self.plan, len(self.arrived)
        nodes, chunks = engine.nodes, plan.chunks
        if engine.ranks == 1:
            self.arrived.append(0.0)
            return
        landed = np.full((nodes, chunks), engine.start)
        if nodes > 1:
            told = self.told[index - plan.window] if index >= plan.window else self.entered
            step = plan.config.send_ctas
            for first in range(step):
                self.ctas.wait(told, "slots", slice(first, first + 1))
                for chunk in range((first - index * chunks) % step, chunks, step):
                    landed[:, chunk] = self.send(first, chunk)
        self.arrived.append(self.push(index, landed, self.freed[index - plan.window] if index >= plan.window else 0.0))

    def send(self, lane: int, chunk: int) -> Array:
        """Stage a chunk and post it to all other nodes. Returns when that of the counterpart in the node so many before
        this one arrives."""
        which = slice(lane, lane + 1)
        self.ctas.work(self.sizes[chunk] / self.engine.machine.copy, "copy", which, index=chunk)
        arrived = self.engine.post(self.ctas, lane, self.sizes[chunk], np.arange(1, self.engine.nodes))
        return np.concatenate([[self.engine.start], arrived])

    def push(self, index: int, landed: Array, free: float) -> float:
        engine, plan, machine = self.engine, self.plan, self.engine.machine
        nodes, gpus, lanes = engine.nodes, engine.gpus_per_node, plan.config.intra_ctas
        node, local = engine.rank // gpus, engine.rank % gpus
        counterparts = (node - np.arange(nodes)) % nodes * gpus + local
        arrived = float(landed[1:][self.seen[counterparts[1:]]].max(initial=engine.start))
        if not lanes:
            return arrived
        # the ranks of a node are taken to need the same
        needed = self.seen.reshape(nodes, gpus).any(1)[(node - np.arange(nodes)) % nodes]
        items = np.arange(plan.chunks * nodes)
        for begin in range(0, len(items), lanes):
            item = items[begin : begin + lanes]
            chunk, offset = item % plan.chunks, item // plan.chunks
            which = self.first_pusher + (index * len(items) + item) % lanes
            source = np.where(offset == 0, 0, nodes - offset)  # nodes before this one
            self.pushers.wait(np.full(len(item), free + machine.nvlink_seconds), "slots", which)
            self.pushers.wait(landed[source, chunk], "the network", which)
            size = self.sizes[chunk] * (gpus - 1)
            self.pushers.work(size / self.rate, "copy", which, index=chunk)
            self.pushers.wait(engine.nvlink.carry(self.pushers.clock[which], size), "NVLink", which)
            times = np.where(needed[source], self.pushers.clock[which] + machine.nvlink_seconds, 0.0)
            arrived = max(arrived, float(times.max()))
        return arrived


class _Ring(Transfers):
    """A launch of ring_attention."""

    def __init__(self, engine: Engine, plan: Plan, problem: Problem):
        super().__init__(engine, plan, problem, by_warps=plan.hopper)
        c, dim = plan.config, problem.shape[3]
        self.block_seconds = 4 * c.tile_m * c.tile_n * dim / engine.machine.sm_flops["attention"]
        blocks = plan.sequences.key_blocks(engine.rank, c.tile_m, c.tile_n)
        self.costs = np.repeat(blocks / c.team_ctas, c.team_ctas)

    def run(self) -> None:
        tiles = self.tiles_of_rounds()
        self.enter()
        for index in range(self.plan.rounds):
            arrived, last = self.arrived[index], 0
            for lanes, entries, costs in tiles[index]:
                seconds = (costs + 1) * self.block_seconds
                own = seconds * self.own
                self.ctas.work(own, "attend", lanes, index=entries)
                self.ctas.wait(arrived, "keys", lanes)
                self.ctas.work(seconds - own, "attend", lanes, index=entries)
                latest = lanes[np.argmax(self.ctas.clock[lanes])]
                if self.ctas.clock[latest] > self.freed[index]:
                    self.freed[index], last = self.ctas.clock[latest], int(latest)
            self.freed[index] = max(self.freed[index], arrived)
            self.free(index, last)

    def tiles_of_rounds(self) -> list[list[tuple[Array, Array, Array]]]:
        """For each round, what the CTAs compute: (CTAs, entries of the schedule, key blocks) of the n-th tile of each
        CTA that has one."""
        words = self.plan.schedule.numpy()
        ctas = self.plan.config.ctas
        starts, lists = words[: ctas + 1], words % SYNC_MARK
        tiles = (len(words) - ctas - 1) // self.plan.rounds  # of a round
        found: list[list[tuple[Array, Array, Array]]] = [[] for _ in range(self.plan.rounds)]
        lane = np.repeat(np.arange(ctas), np.diff(starts))
        work = lists[ctas + 1 :]
        order = np.lexsort((np.arange(len(work)), lane, work // tiles))
        for index, part in enumerate(np.split(order, np.arange(1, self.plan.rounds) * tiles)):
            owners = lane[part]
            first = np.concatenate([[0], np.flatnonzero(np.diff(owners)) + 1])
            nth = np.arange(len(owners)) - np.repeat(first, np.diff([*first, len(owners)]))
            for i in range(int(nth.max(initial=-1)) + 1):
                chosen = nth == i
                costs = self.costs[work[part[chosen]] % len(self.costs)] / self.plan.parts
                found[index].append((owners[chosen], ctas + 1 + part[chosen], costs))
        return found


def run(engine: Engine, plan: Plan, problem: Problem) -> None:
    _Ring(engine, plan, problem).run()


def work(problem: Problem, nodes: int, gpus: int) -> Work:
    batch, heads, sequence, dim = problem.shape
    length = sequence // (nodes * gpus)
    kv = batch * (problem.options.get("kv_heads") or heads) * length * 2 * dim * problem.element
    causal = bool(problem.options.get("causal", True))
    return Work(
        flops=4.0 * batch * heads * length * sequence * dim / (2 if causal else 1),
        library="attention",
        memory=float(4 * batch * heads * length * dim * problem.element),
        nvlink=float((gpus - 1) * nodes * kv),
        network=float((nodes - 1) * kv),
    )


def candidates(problem: Problem, ranks: int) -> Sequence[int]:
    """A mask gives the last rank the most keys or, with zigzag, makes the ranks at the ends of a half differ."""
    if not problem.options.get("causal", True):
        return (0,)
    return sorted({0, ranks // 2, ranks - 1})


TIMED = (Timed("sm_flops.attention", (1, 16, 16384, 128), options={"causal": False}, library="attention"),)
MODEL = Model(run, work, candidates, peer.run, TIMED)
