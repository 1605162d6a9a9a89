"""The model takes the steps that the kernels take, in their order: seen in traces of the simulator, CTA by CTA."""

import dataclasses
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np
import pytest
import torch
import triton
from support.reduce_reference import choose
from support.workloads import workload_of

import mkernel as mk
from mkernel import operators
from mkernel.lang import order
from mkernel.lang.order import arrival_order
from mkernel.ops.all_gather_matmul import order as gather_order
from mkernel.ops.all_gather_matmul.model import tiles_of_others
from mkernel.ops.attention import transfer
from mkernel.ops.reduce.all_reduce import two_level
from mkernel.ops.reduce.model import tiles_of_scatter
from mkernel.ops.reduce.reduce_scatter import order as scatter_order
from mkernel.ops.reduce.reduce_scatter.order import tile_at
from mkernel.scale.engine import Engine, Network
from mkernel.scale.machine import load
from mkernel.scale.model import Problem
from mkernel.sim.scheduler import Options

RANK = 1
CLUSTERS = [(1, 3), (2, 2), (4, 1), (4, 2)]
HELPERS = mk.Config(send_ctas=2, intra_ctas=2)
# what a trace calls what the model does; everything else is no event
EVENTS = {"multiply": "tile", "attend": "tile", "push": "push", "reduce": "reduce", "gather": "gather"}


@dataclass(frozen=True)
class Call:
    """A call, with its shape on so many ranks."""

    op: str
    rows: tuple[int, ...]
    options: dict[str, Any] = field(default_factory=dict)
    config: mk.Config | None = None
    ctas: int = 5

    def shape(self, ranks):
        return tuple(
            size * ranks if name in operators.find(self.op).shared else size
            for name, size in zip(operators.find(self.op).dimensions, self.rows)
        )


GATHER = Call("all_gather_matmul", (64, 96, 32))
GATHER_BY_TWO = Call("all_gather_matmul", (64, 96, 32), config=HELPERS, ctas=6)
SCATTER = Call("matmul_reduce_scatter", (64, 96, 32))
REDUCE = Call("matmul_all_reduce", (200, 96, 32))
REDUCE_LONGER = Call("matmul_all_reduce", (200, 192, 32))
ATTEND = Call("ring_attention", (1, 4, 64, 64), dict(causal=False), HELPERS, ctas=6)
ATTEND_CAUSAL = Call("ring_attention", (1, 4, 64, 64), dict(causal=True, zigzag=True))
BACKWARD = Call("ring_attention_backward", (1, 4, 64, 64), dict(causal=False), HELPERS, ctas=6)
DISPATCH = Call("moe_dispatch_matmul", (32, 16, 16), dict(experts=2, topk=3))
HOPPER = [
    Call("all_gather_matmul", (384, 512, 64), ctas=4),
    Call("matmul_reduce_scatter", (256, 512, 64), ctas=4),
    Call("matmul_all_reduce", (1024, 512, 64), ctas=4),
    Call("ring_attention", (1, 2, 256, 128), dict(causal=False), ctas=3),
    Call("ring_attention_backward", (1, 2, 256, 64), dict(causal=False), ctas=3),
]
FFN = Call("moe_ffn", (32, 16, 16), dict(experts=2, topk=3))


def traced(call, cluster, replace=None, dtype=torch.float32, capability=None, always=False):
    """(plan, trace) of a call in the simulator. always: it takes its configuration in one node, too."""
    nodes, gpus = cluster

    def on_rank(group):
        made = workload_of(call.op).make(group, call.shape(group.size), dtype, **call.options)
        config = call.config if nodes > 1 or always else None
        plan = made.tried.explain(config)
        with mk.trace() as trace:
            made.run(config)
        return plan, trace

    options = Options(ctas=call.ctas, races=False, replace=replace or {}, capability=capability)
    return mk.spawn(on_rank, nodes=nodes, gpus_per_node=gpus, device="cpu", sim=options)[RANK]


def modelled(call, cluster, plan):
    engine = Engine(load("h200-cx7"), *cluster, rank=RANK, timeline=True)
    problem = Problem(call.shape(engine.ranks), 4, call.options)
    operators.find(call.op).load("model").run(engine, plan, problem)
    return engine


def steps_of(engine, plan):
    """By CTA: what it does in the model, as (event, index). A task that begins with the rank's own keys is one."""
    found = defaultdict(list)
    for span in engine.spans:
        for cta, index in zip(span.which.tolist(), span.index.tolist()):
            kind = EVENTS.get(span.kind)
            if span.kind == "copy":
                kind = "send" if cta < plan.config.send_ctas else "push"
            if kind and index >= 0 and not (span.kind == "attend" and found[cta][-1:] == [(kind, index)]):
                found[cta].append((kind, index))
    return found


def in_order(trace):
    """Events of the rank, for each CTA in the order of its program."""
    return sorted((event for event in trace.events if event.rank == RANK), key=lambda event: (event.end, event.start))


def events_of(trace, cluster):
    """By CTA: what it did in the simulator."""
    # one that is alone in its node has nobody to gather from
    kinds = {*EVENTS.values(), "send"} - ({"gather"} if cluster[1] == 1 else set())
    found = defaultdict(list)
    for event in in_order(trace):
        if event.kind in kinds:
            found[event.cta].append((event.kind, event.index))
    return found


def requests_of(trace, cluster):
    """(number of requests, how many nodes on the bytes go and how many these are)."""
    nodes, gpus = cluster
    sent = [one for one in trace.transfers if one.source == RANK]
    targets: Counter[int] = Counter()
    for one in sent:
        targets[(one.target - RANK) // gpus % nodes] += one.nbytes
    return len(sent), {offset: size for offset, size in targets.items() if size}


def nodes_in_order(trace, cluster):
    """How many nodes on the requests go, in the order in which they were posted."""
    nodes, gpus = cluster
    sent = sorted((one for one in trace.transfers if one.source == RANK), key=lambda one: one.ticket)
    return [(one.target - RANK) // gpus % nodes for one in sent]


class Posted(Counter[int]):
    """Bytes, by how many nodes on they go. order: of the requests."""

    order: list[int]


@pytest.fixture
def posted(monkeypatch):
    """What the model sends."""
    found = Posted()
    found.order = []
    send = Network.send

    def sends(self, at, nbytes, offset):
        sizes, offsets = (np.broadcast_to(each, np.shape(at)).ravel().tolist() for each in (nbytes, offset))
        for size, each in zip(sizes, offsets):
            found[each] += size
        found.order += offsets
        return send(self, at, nbytes, offset)

    monkeypatch.setattr(Network, "send", sends)
    return found


@pytest.mark.parametrize("cluster", CLUSTERS, ids=str)
@pytest.mark.parametrize("call", [GATHER, GATHER_BY_TWO, SCATTER, REDUCE, ATTEND, BACKWARD], ids=lambda call: call.op)
def test_every_step_of_every_cta(call, cluster, posted):
    """Tiles, chunks, reductions and what is gathered, by number and in order; and what is posted, to which node."""
    plan, trace = traced(call, cluster)
    engine = modelled(call, cluster, plan)
    assert steps_of(engine, plan) == events_of(trace, cluster)
    assert (engine.network.requests, posted) == requests_of(trace, cluster)


def test_in_which_order_requests_go_to_nodes(posted):
    """Those of the only CTA that sends: by how many nodes on they go. A kernel with another order is seen."""
    cluster = (4, 2)
    plan, trace = traced(GATHER, cluster)
    modelled(GATHER, cluster, plan)
    assert len(posted.order) == plan.chunks * 3
    assert posted.order == nodes_in_order(trace, cluster)
    _, trace = traced(GATHER, cluster, {gather_order.destination_at: nearest_node_first})
    assert posted.order != nodes_in_order(trace, cluster)


FEW_ROWS = mk.Config(tile_m=16, tile_n=16, tile_k=16, team_ctas=2)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(("op", "rows", "ctas"), [
    ("all_gather_matmul", 17, 8), ("all_gather_matmul", 5, 32), ("matmul_reduce_scatter", 17, 8),
    ("matmul_reduce_scatter", 5, 32),
])  # fmt: skip
def test_every_step_of_the_kernels_for_few_rows(op, rows, ctas, ranks):
    """CTAs that compute several tiles each, alone, and teams of two with a tile at most."""
    call, cluster = Call(op, (rows, 48, 32), config=FEW_ROWS, ctas=ctas), (1, ranks)
    plan, trace = traced(call, cluster, always=True)
    assert plan.few_rows
    assert steps_of(modelled(call, cluster, plan), plan) == events_of(trace, cluster)
    other = dataclasses.replace(plan, config=dataclasses.replace(plan.config, team_ctas=3 - plan.config.team_ctas))
    assert steps_of(modelled(call, cluster, other), other) != events_of(trace, cluster)


def test_every_step_of_an_all_reduce_in_slices(monkeypatch):
    choose("sliced", monkeypatch)
    call = Call("matmul_all_reduce", (33, 200, 32), config=mk.Config(tile_m=16, tile_n=128, tile_k=16), ctas=8)
    plan, trace = traced(call, (1, 2), always=True)
    assert plan.sliced
    assert steps_of(modelled(call, (1, 2), plan), plan) == events_of(trace, (1, 2))
    for steps in events_of(trace, (1, 2)).values():
        assert [kind for kind, _ in steps] == ["tile", "push", "reduce", "gather"]


def whose_tiles(trace):
    """By CTA: (whose rows, number) of every tile."""
    found = defaultdict(list)
    for event in in_order(trace):
        if event.kind == "tile":
            found[event.cta].append((event.peer, event.index))
    return found


def tiles_of_gather(plan, cluster):
    found = defaultdict(list)
    for counts, tile, source, _ in tiles_of_others(plan, RANK, cluster, blocks=2, column_blocks=3):
        for step in range(len(tile)):
            for cta in range(plan.config.ctas):
                if step < counts[cta]:
                    found[cta].append((source[step, cta], tile[step, cta]))
    return found


def without_own(tiles):
    return {cta: [each for each in listed if each[0] != RANK] for cta, listed in tiles.items()}


@pytest.mark.parametrize("cluster", CLUSTERS, ids=str)
def test_whose_rows_all_gather_matmul_takes(cluster):
    plan, trace = traced(GATHER, cluster)
    modelled = tiles_of_gather(plan, cluster)
    assert sum(map(len, modelled.values())) == 6 * (cluster[0] * cluster[1] - 1)
    found = without_own(whose_tiles(trace))
    assert found == {cta: modelled[cta] for cta in found}


@pytest.mark.parametrize("cluster", CLUSTERS, ids=str)
def test_for_whom_matmul_reduce_scatter_multiplies(cluster):
    nodes, gpus = cluster
    plan, trace = traced(SCATTER, cluster)
    modelled = defaultdict(list)
    for lanes, node, rank, tile in tiles_of_scatter(plan, cluster):
        for i, cta in enumerate(lanes):
            owner = (RANK // gpus + node[i]) % nodes * gpus + (RANK + rank[i]) % gpus
            modelled[cta].append((owner, tile[i]))
    assert sum(map(len, modelled.values())) == 6 * nodes * gpus
    assert whose_tiles(trace) == modelled


@pytest.mark.parametrize("op", ["ring_attention", "ring_attention_backward"])
def test_with_a_mask(op):
    """The same steps; but of what a mask hides nothing is sent, which the model leaves out."""
    call, cluster = Call(op, ATTEND_CAUSAL.rows, ATTEND_CAUSAL.options), (2, 2)
    plan, trace = traced(call, cluster)
    engine = modelled(call, cluster, plan)
    assert steps_of(engine, plan) == events_of(trace, cluster)
    assert engine.network.requests > requests_of(trace, cluster)[0]


@pytest.mark.parametrize("call", HOPPER, ids=lambda call: call.op)
def test_every_step_of_the_kernels_for_hopper(call):
    """In these, warps of their own push chunks and gather finished tiles."""
    plan, trace = traced(call, (1, 2), dtype=torch.bfloat16, capability=(9, 0))
    assert plan.hopper
    engine = modelled(call, (1, 2), plan)
    warps = {"push warps": "intra", "gather warps": "intra", "CTAs": "tiles"}
    steps, events = defaultdict(list), defaultdict(list)
    for span in engine.spans:
        for cta, index in zip(span.which.tolist(), span.index.tolist()):
            kind = "push" if span.kind == "copy" else EVENTS.get(span.kind)
            lane = steps[warps[span.lanes], cta]
            if kind and index >= 0 and not (span.kind == "attend" and lane[-1:] == [(kind, index)]):
                lane.append((kind, index))
    for event in in_order(trace):
        if event.kind == "gather":  # the model gathers a whole block, of which there is one tile of the other rank
            events[event.lane, event.cta].append(("gather", event.index // (2 * plan.config.ctas)))
        elif event.kind in EVENTS.values():
            events[event.lane, event.cta].append((event.kind, event.index))
    assert {lane: listed for lane, listed in steps.items() if listed} == events


def joined(found):
    return {cta: [kind for kind, _ in groupby(kinds)] for cta, kinds in found.items()}


def modelled_stages(engine):
    """By CTA: the stages of a dispatch in the model."""
    found = defaultdict(list)
    for span in engine.spans:
        for cta in span.which.tolist():
            if span.kind in ("stage", "copy") or span.kind.startswith("place"):
                found[cta].append(span.kind)
    return joined(found)


def traced_stages(trace, gpus):
    """By CTA: the stages of a dispatch in the simulator."""
    found = defaultdict(list)
    for event in in_order(trace):
        if event.kind == "gather" and event.lane == "intra":
            near = event.peer // gpus == RANK // gpus
            places = "own rows" if event.peer == RANK else "rows of the node" if near else "rows of other nodes"
            found[event.cta].append(f"place {places}")
        elif event.kind in ("push", "send") and event.lane != "tiles":
            found[event.cta].append({"push": "stage", "send": "copy"}[event.kind])
    return joined(found)


@pytest.mark.parametrize("cluster", [(2, 2), (4, 2)], ids=str)
@pytest.mark.parametrize("call", [DISPATCH, FFN], ids=lambda call: call.op)
def test_stages_of_the_mixture_of_experts(call, cluster, posted):
    """Which CTA stages, sends and places whose rows, in order. Tokens are routed at random, and the model takes what is
    expected; so bytes and tiles are about the same."""
    plan, trace = traced(call, cluster)
    engine = modelled(call, cluster, plan)
    assert modelled_stages(engine) == traced_stages(trace, cluster[1])
    requests, sizes = requests_of(trace, cluster)
    assert engine.network.requests == requests
    assert posted == pytest.approx(sizes, rel=0.15)
    tiles = sum(event.rank == RANK and event.kind == "tile" for event in trace.events)
    multiplied = sum(float(lanes.busy["multiply"].sum()) for lanes in engine.groups)
    seconds = min(float((span.end - span.begin).min()) for span in engine.spans if span.kind == "multiply")
    assert multiplied / seconds == pytest.approx(tiles, rel=0.5)


# -- kernels that take another order: the comparison must tell


@triton.jit
def forwarded_backwards(item, chunks, NODES: triton.language.constexpr):
    return chunks - 1 - item % chunks, item // chunks


@triton.jit
def nearest_node_first(turn, NODES: triton.language.constexpr):
    return turn


@triton.jit
def tile_from_the_end(
    position, tiles, rounds, early, WORLD_SIZE: triton.language.constexpr, RANKS_PER_NODE: triton.language.constexpr
):
    node, rank, tile = tile_at(position, tiles, rounds, early, WORLD_SIZE, RANKS_PER_NODE)
    return node, rank, tiles - 1 - tile


@triton.jit
def one_block_later(comm):
    return comm.WORLD_SIZE // comm.RANKS_PER_NODE + 1


@triton.jit
def send_by_the_other(comm, call, first, step, COPY_ROWS: triton.language.constexpr):
    transfer.send(comm, call, step - 1 - first, step, COPY_ROWS)


@triton.jit
def arrival_backwards(
    position, rank, blocks, WORLD_SIZE: triton.language.constexpr, RANKS_PER_NODE: triton.language.constexpr
):
    source, block = arrival_order(position, rank, blocks, WORLD_SIZE, RANKS_PER_NODE)
    return (2 * rank - source + WORLD_SIZE) % WORLD_SIZE, block


@pytest.mark.parametrize(("call", "cluster", "old", "new"), [
    (GATHER, (2, 2), gather_order.forwarded_at, forwarded_backwards),
    (SCATTER, (2, 2), scatter_order.tile_at, tile_from_the_end),
    (REDUCE_LONGER, (1, 3), two_level._lag, one_block_later),
    (ATTEND, (2, 2), transfer.send, send_by_the_other),
    (BACKWARD, (2, 2), transfer.send, send_by_the_other),
], ids=lambda each: getattr(each, "op", getattr(each, "__name__", None)))  # fmt: skip
def test_a_kernel_with_another_order_is_seen(call, cluster, old, new):
    plan, trace = traced(call, cluster, {old: new})
    assert steps_of(modelled(call, cluster, plan), plan) != events_of(trace, cluster)


def test_rows_that_are_placed_in_another_order_are_seen():
    plan, trace = traced(DISPATCH, (4, 2), {order.arrival_order: arrival_backwards})
    assert modelled_stages(modelled(DISPATCH, (4, 2), plan)) != traced_stages(trace, 2)


def test_rows_that_are_multiplied_in_another_order_are_seen():
    plan, trace = traced(GATHER, (4, 1), {order.arrival_order: arrival_backwards})
    assert without_own(whose_tiles(trace)) != tiles_of_gather(plan, (4, 1))
