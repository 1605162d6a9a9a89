"""The models of moe_dispatch_matmul and moe_ffn for `mkernel plan`: how their kernels carry out a plan.

Which token goes where is unknown before a launch. The model takes what is expected if every token names `topk` distinct
experts at random, as in the benchmarks; blocks of rows are in the classes of schedule.py. Stages that all CTAs of a
rank go through together (routing tables, counting, combining) are taken as one step.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from mkernel.ops.moe import peer
from mkernel.ops.moe.plan import DispatchPlan, FfnPlan
from mkernel.ops.moe.protocol import HEADER
from mkernel.ops.moe.schedule import MOST_BINS
from mkernel.ops.moe.workload import EXPERTS, SLOTS
from mkernel.scale.engine import Engine, Lanes
from mkernel.scale.model import Model, Problem, Timed, Work

Array = Any
WORD = 4  # bytes of an id or a weight


@dataclass(frozen=True)
class Routed:
    """What is expected of a balanced routing, for one rank. reaches_rank, reaches_node: how likely a token goes to a
    given rank, or node."""

    tokens: int
    topk: int
    experts: int
    ranks: int
    reaches_rank: float
    reaches_node: float

    @staticmethod
    def of(problem: Problem, nodes: int, gpus: int) -> Routed:
        ranks = nodes * gpus
        experts = problem.options.get("experts") or EXPERTS
        topk = problem.options.get("topk") or min(SLOTS, experts * ranks)
        everyone = experts * ranks

        def reaches(some: int) -> float:
            return 1 - math.prod(max(everyone - some - i, 0) / (everyone - i) for i in range(topk))

        tokens = problem.shape[0] // ranks
        return Routed(tokens, topk, experts, ranks, reaches(experts), reaches(experts * gpus))

    @property
    def rows(self) -> int:
        return self.tokens * self.topk

    @property
    def rows_of_source(self) -> float:
        """Rows of one expert that come from one rank."""
        return self.rows / self.experts / self.ranks


class _Dispatch:
    """The stages of a dispatch. ready: when the blocks of each class have their rows: see `classes`."""

    def __init__(self, engine: Engine, plan: DispatchPlan | FfnPlan, problem: Problem):
        self.engine, self.plan = engine, plan
        self.hidden = problem.shape[2]
        self.token_bytes = self.hidden * problem.element
        self.routed = Routed.of(problem, engine.nodes, engine.gpus_per_node)
        self.ctas = engine.lanes("CTAs", plan.config.ctas)
        self.row_bytes = self.routed.rows * self.token_bytes / engine.ranks  # of the rows of one source

    def run(self) -> tuple[Array, Array]:
        """Everything before the tiles. Returns (when the blocks of a class have their rows, the classes' shares)."""
        self.route()
        arrived = self.send() if self.engine.nodes > 1 else np.zeros((1, 1))
        return self.place(arrived)

    def route(self) -> None:
        """Stage tokens and exchange the tables of ids; then every rank counts all of them."""
        engine, machine, routed, ctas = self.engine, self.engine.machine, self.routed, self.ctas
        senders = self.plan.config.send_ctas
        others, count = slice(senders, None), self.plan.config.ctas - senders
        table, numbers = self.exchanged()
        arrived = engine.start
        if engine.nodes > 1:
            offsets = np.arange(1, engine.nodes)
            arrived = float(engine.post(ctas, 0, table, offsets).max())
            engine.post(ctas, senders, 0.0, offsets)  # that the node has entered the launch
        if engine.gpus_per_node > 1:
            ctas.work(routed.tokens * self.token_bytes / machine.place / count, "stage", others)
            # tables of all ranks but those that the network has brought to this one
            engine.nvlink.carry(engine.start, table * (engine.ranks - engine.nodes))
        ctas.wait(arrived, "routing tables")
        seconds = machine.routing_seconds + numbers / machine.count / count
        ctas.work(seconds, "count rows", others)
        ctas.wait(ctas.clock[others].max(), "counts")
        engine.marks["routed"] = float(ctas.clock.max())

    def exchanged(self) -> tuple[float, float]:
        """(bytes of the table that a rank sends to each other node, numbers that it counts afterwards)."""
        routed, has_weights = self.routed, isinstance(self.plan, FfnPlan)
        return WORD * (HEADER.value + routed.rows * (1 + has_weights)), float(routed.ranks * routed.rows)

    def send(self) -> Array:
        """The role `send`. Returns when the chunks of the counterparts in other nodes arrive: [nodes, chunks], by how
        many nodes they are before this one."""
        engine, routed, plan = self.engine, self.routed, self.plan
        nodes, chunks, senders = engine.nodes, plan.sizes.chunks, plan.config.send_ctas
        sizes = np.full(chunks, plan.sizes.chunk_rows * self.token_bytes * routed.reaches_node)
        arrived = np.zeros((nodes, chunks))
        for begin in range(0, chunks, senders):
            chunk = np.arange(begin, min(begin + senders, chunks))
            which = chunk - begin
            for offset in range(1, nodes):
                seconds = sizes[chunk] / engine.machine.place + engine.machine.post_seconds
                self.ctas.work(seconds, "copy", which, index=chunk)
                accepted, landed = engine.network.send(self.ctas.clock[which], sizes[chunk], offset)
                self.ctas.wait(accepted, "the network", which)
                arrived[offset, chunk] = landed
        return arrived

    def place(self, arrived: Array) -> tuple[Array, Array]:
        """The role `intra`: this rank's own tokens, those of its node, and those of other nodes."""
        engine, machine, copying = self.engine, self.engine.machine, self.plan.copying
        gpus, ranks, routed = engine.gpus_per_node, engine.ranks, self.routed
        first = self.plan.config.send_ctas
        fetched = routed.tokens * routed.reaches_rank * self.token_bytes  # of one source, over NVLink
        own = slice(first, first + copying.intra_ctas)
        self.ctas.work(self.row_bytes / copying.intra_ctas / machine.place, "place own rows", own)
        ready = [float(self.ctas.clock[own].max())]
        near = first + (np.arange(copying.near_intra_ctas) + copying.far_intra_ctas) % copying.intra_ctas
        if gpus > 1:
            seconds = (gpus - 1) * self.row_bytes / copying.near_intra_ctas / machine.place
            done = engine.nvlink.carry(self.ctas.clock[near].min(), (gpus - 1) * fetched)
            self.ctas.work(seconds, "place rows of the node", near)
            self.ctas.wait(done, "NVLink", near)
        ready.append(max(float(self.ctas.clock[near].max()), ready[0]))
        shares = [1 / ranks, (gpus - 1) / ranks]
        if engine.nodes > 1:
            bins, late = self.bins()
            ready += self.place_far(arrived, fetched, bins)
            far, ends = (ranks - gpus) / ranks, min(1.0, late)
            shares += [far * (1 - ends) / bins] * bins
            shares[-1] += far * ends
        return np.array(ready), np.array(shares)

    def place_far(self, arrived: Array, fetched: float, bins: int) -> list[float]:
        engine, machine, copying = self.engine, self.engine.machine, self.plan.copying
        gpus, chunks = engine.gpus_per_node, arrived.shape[1]
        lanes = slice(self.plan.config.send_ctas, self.plan.config.send_ctas + copying.far_intra_ctas)
        times = np.sort(arrived[1:].ravel())  # a chunk of a rank of each other node, for all ranks of that node
        seconds = gpus * self.row_bytes / chunks / machine.place / copying.far_intra_ctas
        linked = engine.nvlink.carry(times, gpus * fetched / chunks)
        place = np.arange(len(times))
        begin = np.maximum.accumulate(np.maximum(linked, self.ctas.clock[lanes].min()) - place * seconds)
        done = begin + (place + 1) * seconds
        self.ctas.wait(done[-1] - len(times) * seconds, "the network", lanes)
        self.ctas.work(len(times) * seconds, "place rows of other nodes", lanes)
        # chunks of all nodes come in turn, so the parts of all sources are complete at about the same time
        return [float(done[math.ceil(len(done) * (i + 1) / bins) - 1]) for i in range(bins)]

    def bins(self) -> tuple[int, float]:
        """Into how many parts schedule.py divides the rows of a source, and the share of blocks that hold the end of
        one."""
        blocks = self.routed.rows / self.plan.config.tile_m
        wanted = 8 if isinstance(self.plan, FfnPlan) else 4
        bins = min(max(int(blocks // (wanted * max(self.routed.experts, 1))), 1), MOST_BINS.value)
        return bins, self.plan.config.tile_m / max(self.routed.rows_of_source, 1e-9)

    def blocks(self) -> float:
        """Blocks of rows, in tiles of full height: the last one of an expert is partial, and half of those count
        half."""
        rows, tile_m = self.routed.rows / self.routed.experts, self.plan.config.tile_m
        if rows < tile_m / 2:
            return self.routed.experts * 0.5
        return self.routed.experts * (rows / tile_m + 0.25)

    def tile(self, columns: int, depth: int, element: int, factor: float = 1.0) -> float:
        """Seconds of a tile, at the speed of the tensor cores or of memory, if there are few rows for each matrix."""
        c, machine, routed = self.plan.config, self.engine.machine, self.routed
        multiplied = factor * machine.grouped * machine.tile(c.tile_m, c.tile_n, depth)
        weights = routed.experts * columns * depth * element
        read = weights / machine.memory * c.ctas / (self.blocks() * math.ceil(columns / c.tile_n))
        return max(multiplied, read)


def _take_tiles(ctas: Lanes, ready: Array, counts: Array, seconds: float) -> float:
    """Give out tiles, class by class, to the CTAs as they become free. Returns when the last one is done."""
    times = np.repeat(np.maximum.accumulate(ready), counts)
    free = [(clock, lane) for lane, clock in enumerate(ctas.clock.tolist())]
    heapq.heapify(free)
    begin, taken = ctas.clock.copy(), np.zeros(len(ctas.clock))
    last = float(ctas.clock.max())
    for time in times.tolist():
        clock, lane = free[0]
        last = max(clock, time) + seconds
        taken[lane] += 1
        heapq.heapreplace(free, (last, lane))
    end = begin.copy()
    for clock, lane in free:
        end[lane] = clock
    ctas.wait(end - taken * seconds, "rows")
    ctas.work(taken * seconds, "multiply")
    return last


def run_dispatch(engine: Engine, plan: DispatchPlan, problem: Problem) -> None:
    _, out, hidden = problem.shape
    dispatch = _Dispatch(engine, plan, problem)
    ready, shares = dispatch.run()
    tiles = dispatch.blocks() * math.ceil(out / plan.config.tile_n)
    counts = np.diff(np.rint(np.cumsum([0.0, *shares]) * tiles)).astype(int)
    _take_tiles(dispatch.ctas, ready, counts, dispatch.tile(out, hidden, problem.element))


def run_ffn(engine: Engine, plan: FfnPlan, problem: Problem) -> None:
    """Both GEMMs as tiles of one, then the combine: partial sums for other nodes cross the network while half of the
    node's own blocks are computed."""
    _, inter, hidden = problem.shape
    dispatch = _Dispatch(engine, plan, problem)
    machine, routed, ctas = engine.machine, dispatch.routed, dispatch.ctas
    ready, shares = dispatch.run()
    c = plan.config
    columns = math.ceil(2 * inter / c.tile_n), math.ceil(hidden / c.tile_n)
    first = dispatch.tile(2 * inter, hidden, problem.element, machine.gated)
    second = dispatch.tile(hidden, inter, problem.element, machine.gated)
    seconds = (columns[0] * first + columns[1] * second) / sum(columns)
    tiles = dispatch.blocks() * sum(columns)
    postponed = shares[:2] / 2 if engine.nodes > 1 else shares * 0
    early = shares.copy()
    early[:2] -= postponed[:2] if engine.nodes > 1 else 0
    counts = np.diff(np.rint(np.cumsum([0.0, *early]) * tiles)).astype(int)
    _take_tiles(ctas, ready, counts, seconds)
    token, lanes = dispatch.token_bytes, c.ctas
    nodes, gpus = engine.nodes, engine.gpus_per_node
    returned = engine.start
    if nodes > 1:
        far = (nodes - 1) * gpus / engine.ranks
        sums = (nodes - 1) * gpus * routed.tokens * routed.reaches_rank * token  # of this rank's rows
        relayed = (nodes - 1) * routed.tokens * routed.reaches_node * token
        ctas.work((routed.rows * far * token + sums) / lanes / machine.place, "sum rows")
        done = engine.nvlink.carry(float(ctas.clock.max()), sums * (gpus - 1) / gpus)
        ctas.work((sums + relayed) / lanes / machine.place, "sum rows")
        chunk = relayed / (nodes - 1) / plan.sizes.chunks
        at = np.linspace(float(done), float(ctas.clock.max()), plan.sizes.chunks * (nodes - 1))
        _, landed = engine.network.send(at, chunk, 1 + np.arange(len(at)) % (nodes - 1))
        returned = float(landed.max())
        _take_tiles(ctas, np.zeros(1), np.array([round(float(postponed.sum()) * tiles)]), seconds)
    near = gpus * routed.tokens * routed.reaches_rank * token
    ctas.work((routed.rows * gpus / engine.ranks * token + near) / lanes / machine.place, "sum rows")
    done = engine.nvlink.carry(float(ctas.clock.max()), near * (gpus - 1) / gpus)
    ctas.wait(done, "NVLink")
    ctas.wait(returned, "the network")
    ctas.work((near + nodes * routed.tokens * token) / lanes / machine.place, "sum rows")


def _work(problem: Problem, nodes: int, gpus: int, gemms: int) -> Work:
    _, out, hidden = problem.shape
    routed = Routed.of(problem, nodes, gpus)
    token = hidden * problem.element
    ways = 1 if gemms == 1 else 2
    rows = routed.rows * token
    other = routed.ranks * routed.tokens * routed.reaches_rank * token  # partial sums of the tokens that came
    return Work(
        flops=2.0 * gemms * routed.rows * hidden * out,
        library="grouped" if gemms == 1 else "gated",
        memory=float((gemms * routed.experts * hidden * out + routed.rows * (hidden + out)) * problem.element),
        nvlink=ways * (nodes * gpus - nodes) * routed.tokens * routed.reaches_rank * token,
        network=ways * (nodes - 1) * routed.tokens * routed.reaches_node * token,
        collectives=ways,
        # the link, gathering rows, the library; then the activation in two, weights, zeros, adding rows up, the link
        # again, stacking sums and adding them
        kernels=3 if gemms == 1 else 12,
        host_network=ways * (nodes - 1) * gpus * routed.tokens * routed.reaches_rank * token,
        placed=2 * rows if gemms == 1 else 2 * rows + 3 * other,
        moved=0.0 if gemms == 1 else 5 * rows + other,
    )


def work_of_dispatch(problem: Problem, nodes: int, gpus: int) -> Work:
    return _work(problem, nodes, gpus, 1)


def work_of_ffn(problem: Problem, nodes: int, gpus: int) -> Work:
    return _work(problem, nodes, gpus, 3)


MANY_TOKENS = (8192, 2048, 7168)
DISPATCH_MATMUL = Model(
    run_dispatch, work_of_dispatch, peer=peer.run_dispatch, timed=(Timed(None, MANY_TOKENS, library="grouped"),)
)
FFN = Model(run_ffn, work_of_ffn, peer=peer.run_ffn, timed=(Timed(None, MANY_TOKENS, library="gated"),))
