"""The model of ring_attention_backward for `mkernel plan`: how its kernels carry out a plan."""

from __future__ import annotations

from typing import Any

import numpy as np

from mkernel.ops.attention.backward.plan import DKV_PRODUCTS, DQ_PRODUCTS, Plan
from mkernel.ops.attention.model import Transfers, candidates
from mkernel.scale.engine import Engine
from mkernel.scale.machine import TILE_ELEMENTS
from mkernel.scale.model import Model, Problem, Timed, Work

Array = Any
KIND = "attention_backward"
FLOAT = 4  # bytes of an element of a partial


class _Gradients(Transfers):
    """A launch. By round: pushed: when the last partial of this rank is signalled; all ranks push theirs alike. summed:
    when the last sum of another node arrives. added: when this rank's reductions are done."""

    def __init__(self, engine: Engine, plan: Plan, problem: Problem):
        super().__init__(engine, plan, problem, by_warps=plan.hopper)
        c, (_, heads, _, dim), machine = plan.config, problem.shape, engine.machine
        self.product = 2 * c.tile_m * c.tile_n * dim / machine.sm_flops[KIND]
        group = heads // (problem.options.get("kv_heads") or heads)
        blocks = plan.sequences.key_blocks(engine.rank, c.tile_m, c.tile_n)
        self.queries = np.tile(1.0 + DQ_PRODUCTS * blocks, group) / plan.parts
        self.keys = 0.1 + DKV_PRODUCTS * group * self.tiles_that_see()
        self.costs = np.concatenate([self.queries, self.keys])
        self.bytes = plan.tiles // plan.blocks * c.tile_n * (c.tile_k + plan.value_columns) * FLOAT  # of a task
        self.adding = machine.partial_seconds * self.bytes / (TILE_ELEMENTS * 2)
        several = engine.ranks > 1
        self.reductions = (plan.blocks if several else 0, (engine.nodes - 1) * plan.blocks)
        self.pushed, self.summed, self.added = (np.zeros(plan.rounds) for _ in range(3))
        self.link = engine.link(c.ctas)
        words = plan.schedule.numpy()
        self.lane = np.repeat(np.arange(c.ctas), np.diff(words[: c.ctas + 1]))  # of every task
        self.tasks: Array = words[c.ctas + 1 :]
        self.by_task = np.argsort(self.tasks)

    def tiles_that_see(self) -> Array:
        """How many tiles of this rank's queries see each block of keys of a round, those of rank 0 first. In the Gluon
        kernel, tiles have 64 queries for it. If a unit takes several rounds, that is the average."""
        plan = self.plan
        rows = plan.config.tile_n if plan.hopper else plan.config.tile_m
        ranges = plan.ranges.numpy().reshape(self.engine.ranks, -1, 4)
        tiles = np.maximum(-(-ranges[:, :, 1] // rows) - ranges[:, :, 0] // rows, 0)
        if tiles.shape[1] != plan.blocks:
            tiles = np.repeat(tiles.sum(1, keepdims=True) / (plan.parts * plan.blocks), plan.blocks, 1)
        return tiles.ravel()

    def run(self) -> None:
        """The batches of schedule.py, in its order."""
        self.enter()
        rounds, (own, others) = self.plan.rounds, self.reductions
        first = len(self.queries) + len(self.keys)
        window = self.plan.window
        lag = min(window - 1, 1)
        last = min(window - 1, 2) if others else lag
        for step in range(rounds + last):
            if step < rounds:
                self.compute(step)
            if others and lag <= step < rounds + lag:
                self.reduce_for_others(step - lag, self.lanes_of(step - lag, first + own, first + own + others))
            if own and last <= step:
                self.reduce_own(step - last, self.lanes_of(step - last, first, first + own))

    def lanes_of(self, index: int, first: int, end: int) -> list[tuple[Array, Array, Array]]:
        """Tasks first..end-1 of a round: the n-th of each CTA, as (CTAs, numbers, entries of the schedule), for all
        n."""
        base = index * (len(self.queries) + len(self.keys) + sum(self.reductions))
        low, high = np.searchsorted(self.tasks, [base + first, base + end], sorter=self.by_task)
        chosen = np.sort(self.by_task[low:high])  # in the order of each CTA's list
        owners, numbers = self.lane[chosen], self.tasks[chosen] - base
        starts = np.concatenate([[0], np.flatnonzero(np.diff(owners)) + 1]) if len(owners) else np.zeros(0, int)
        nth = np.arange(len(owners)) - np.repeat(starts, np.diff([*starts, len(owners)]))
        order = np.argsort(nth, kind="stable")
        ends = np.cumsum(np.bincount(nth))[:-1]
        parts = (owners[order], numbers[order], (self.plan.config.ctas + 1 + chosen)[order])
        return list(zip(*(np.split(part, ends) for part in parts))) if len(owners) else []

    def compute(self, index: int) -> None:
        """Tiles of dq, and blocks of keys, whose partials are pushed."""
        engine, plan, arrived, last = self.engine, self.plan, self.arrived[index], 0
        writable = self.added[index - plan.window] if index >= plan.window else 0.0
        for lanes, numbers, entries in self.lanes_of(index, 0, len(self.queries) + len(self.keys)):
            is_query = numbers < len(self.queries)
            block = np.maximum(numbers - len(self.queries), 0)
            seconds = self.costs[numbers] * self.product
            is_own = ~is_query & (block // plan.blocks == engine.rank)
            early = np.where(is_own, seconds, np.where(is_query, seconds * self.own, 0.0))
            self.ctas.work(early, "attend", lanes, index=entries)
            self.ctas.wait(np.where(is_own, 0.0, arrived), "keys", lanes)
            self.ctas.work(seconds - early, "attend", lanes, index=entries)
            pushes = lanes[~is_query & ~is_own]
            if len(pushes):
                self.push_partials(index, pushes, writable)
            latest = lanes[np.argmax(self.ctas.clock[lanes])]
            if self.ctas.clock[latest] > self.freed[index]:
                self.freed[index], last = self.ctas.clock[latest], int(latest)
        self.freed[index] = max(self.freed[index], arrived)
        self.free(index, last)

    def push_partials(self, index: int, lanes: Array, writable: float) -> None:
        """Of as many nodes, one part stays on this rank: it adds them up itself."""
        gpus, machine = self.engine.gpus_per_node, self.engine.machine
        self.ctas.wait(writable, "reductions", lanes)
        self.ctas.work(self.bytes / (TILE_ELEMENTS * 2) * machine.pushed_seconds, "push", lanes)
        done = self.link.carry(self.ctas.clock[lanes], self.bytes * (gpus - 1) / gpus, lanes)
        self.ctas.wait(done, "NVLink", lanes)
        self.pushed[index] = max(self.pushed[index], float(done.max()) + machine.nvlink_seconds)

    def reduce_for_others(self, index: int, batch: list[tuple[Array, Array, Array]]) -> None:
        """The node's sums of other nodes' blocks, which then cross the network."""
        gpus, plan, machine = self.engine.gpus_per_node, self.plan, self.engine.machine
        first = len(self.queries) + len(self.keys) + self.reductions[0]
        for lanes, numbers, entries in batch:
            self.ctas.wait(self.pushed[index], "partials", lanes)
            self.ctas.work(gpus * self.adding + machine.post_seconds, "reduce", lanes, index=entries)
            accepted, arrived = self.engine.network.send(
                self.ctas.clock[lanes], self.bytes, 1 + (numbers - first) // plan.blocks
            )
            self.ctas.wait(accepted, "the network", lanes)
            self.summed[index] = max(self.summed[index], float(arrived.max()))

    def reduce_own(self, index: int, batch: list[tuple[Array, Array, Array]]) -> None:
        nodes = self.engine.nodes
        terms = self.engine.gpus_per_node + nodes - 1
        for lanes, _, entries in batch:
            self.ctas.wait(self.pushed[index], "partials", lanes)
            self.ctas.wait(self.summed[index], "the network", lanes)
            self.ctas.work(terms * self.adding, "reduce", lanes, index=entries)
            self.added[index] = max(self.added[index], float(self.ctas.clock[lanes].max()))
        if nodes > 1 and index + self.plan.window < self.plan.rounds:  # others may use the slots of sums again
            last = max((lanes[np.argmax(self.ctas.clock[lanes])] for lanes, _, _ in batch), key=self.ctas.clock.item)
            self.engine.post(self.ctas, int(last), 0.0, np.arange(1, nodes))


def run(engine: Engine, plan: Plan, problem: Problem) -> None:
    _Gradients(engine, plan, problem).run()


def work(problem: Problem, nodes: int, gpus: int) -> Work:
    batch, heads, sequence, dim = problem.shape
    length = sequence // (nodes * gpus)
    elements = batch * (problem.options.get("kv_heads") or heads) * length * 2 * dim
    moved = elements * (problem.element + FLOAT)  # keys and values one way, their gradients the other
    causal = bool(problem.options.get("causal", True))
    return Work(
        flops=10.0 * batch * heads * length * sequence * dim / (2 if causal else 1),
        library=KIND,
        memory=float(8 * batch * heads * length * dim * problem.element),
        nvlink=float((gpus - 1) * nodes * moved),
        network=float((nodes - 1) * moved),
        collectives=2,
        kernels=3,
    )


TIMED = (Timed(f"sm_flops.{KIND}", (4, 16, 4096, 128), options={"causal": False}, library=KIND),)
MODEL = Model(run, work, candidates, timed=TIMED)
