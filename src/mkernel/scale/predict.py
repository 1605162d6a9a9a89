"""Predictions: a plan carried out on the model, beside its floor and the host-driven alternative."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from mkernel import operators
from mkernel.operators import Operator, Shape
from mkernel.runtime.config import Config
from mkernel.runtime.errors import ArgumentError
from mkernel.runtime.world import Links
from mkernel.scale.cluster import member, plan_of
from mkernel.scale.engine import Engine
from mkernel.scale.machine import Machine, shared
from mkernel.scale.model import Problem, Work

DTYPES = (torch.bfloat16, torch.float16)  # that the rates of machines are for: tensor cores take both at the same speed
# what lanes do, by the resource that it loads
LANES = {
    "compute": ("multiply", "attend"),
    "copying {}": (
        "copy",
        "stage",
        "place own rows",
        "place rows of the node",
        "place rows of other nodes",
        "sum rows",
        "push",
        "gather",
    ),
    "counting {}": ("count rows",),
}
LATE = 0.5  # what is busy for so much of the time may bound a call


@dataclass(frozen=True)
class Prediction:
    """What the model says about a call. Times in seconds.

    rank: the slowest of those that were simulated.
    late: by how much one rank begins later than the others. Times count from when the others do.
    seconds: of the fused call. floor: the least that compute, NVLink or network take. host: the host-driven way.
    loads: for how long each resource is busy. bound: which one bounds the call, or "latency". spent: what the lanes
    spend their time with, as parts of the time of all lanes. held: bytes of operands, result and workspace on a GPU, if
    they were counted. plan: what `mk.explain` says, for config and options.
    """

    op: str
    shape: Shape
    nodes: int
    gpus_per_node: int
    rank: int
    machine: str
    seconds: float
    floor: float
    host: float
    loads: dict[str, float]
    bound: str
    spent: dict[str, float]
    requests: int
    plan: str
    engine: Engine
    dtype: torch.dtype
    options: dict[str, Any]
    config: Config | None
    late: float = 0.0
    held: int = 0

    @property
    def fraction(self) -> float:
        """Floor / time: 1.0 is perfect overlap at the library's speed."""
        return self.floor / self.seconds

    def to_dict(self) -> dict[str, Any]:
        """The figures, for JSON. Times in ms."""
        chosen = {name: value for name, value in asdict(self.config or Config()).items() if value is not None}
        return {
            "op": self.op, "shape": list(self.shape), "nodes": self.nodes, "gpus_per_node": self.gpus_per_node,
            "rank": self.rank, "machine": self.machine, "modelled": True, "options": self.options, "config": chosen,
            "late_us": self.late * 1e6,
            "fused_ms": self.seconds * 1e3, "floor_ms": self.floor * 1e3, "floor_fraction": self.fraction,
            "host_driven_ms": self.host * 1e3, "speedup": self.speedup, "bound": self.bound,
            "busy_ms": {name: seconds * 1e3 for name, seconds in self.loads.items()},
            "spent": self.spent, "requests": self.requests, "memory_gb": self.held / 1e9, "plan": self.plan,
        }  # fmt: skip

    @property
    def speedup(self) -> float:
        """Host-driven / fused."""
        return self.host / self.seconds


def check_dtype(dtype: torch.dtype, machine: Machine) -> None:
    """Refuse what there are no rates for."""
    if dtype not in DTYPES:
        raise ArgumentError(
            f"{machine.name} has no rates for {str(dtype).removeprefix('torch.')}: those of tiles and of the library "
            "are for bf16, and taken for fp16 too"
        )


def loads_of(engine: Engine, work: Work, machine: Machine) -> dict[str, float]:
    """For how many seconds each resource is busy. Of lanes, that is the busiest one: the others wait for it."""
    loads = {
        "compute": library_seconds(work, machine),
        "NVLink": engine.nvlink.busy,
        "network": engine.network.card.busy,
        "PCIe": engine.network.card.pcie.busy,
        "memory": moved_in_memory(engine, work) / machine.memory,
        "requests": engine.network.proxy.busy,
        "switches": engine.network.beyond.busy,
    }
    for group in engine.groups:
        for name, kinds in LANES.items():
            if own := [busy for kind, busy in group.busy.items() if kind in kinds]:
                resource = name.format(group.name)
                loads[resource] = max(loads.get(resource, 0.0), float(np.max(sum(own))))
    return loads


def moved_in_memory(engine: Engine, work: Work) -> float:
    """Bytes that at least move through the GPU's memory: operands and the result, what peers write there (as much as
    this rank writes to theirs), and what the network reads and writes."""
    return work.memory + engine.nvlink.moved + 2 * engine.network.card.moved


def bound_of(loads: Mapping[str, float], engine: Engine) -> str:
    """What bounds a call: the resource that is busy for longest; if none is for much of it, lanes of which, one after
    the other, some copy or count for most of it; else latency."""
    most = max(loads, key=lambda name: loads[name])
    if loads[most] > LATE * engine.end:
        return most
    in_turn = {
        name.format(group.name): group.any_busy(kinds)
        for group in engine.groups
        for name, kinds in LANES.items()
        if name != "compute"
    }
    most = max(in_turn, key=lambda name: in_turn[name])
    return most if in_turn[most] > LATE * engine.end else "latency"


def library_seconds(work: Work, machine: Machine) -> float:
    return max(work.flops / machine.library_flops[work.library], work.memory / machine.memory)


def floor_of(work: Work, machine: Machine) -> float:
    """The largest of what the library, NVLink and the network alone would take."""
    return max(library_seconds(work, machine), work.nvlink / machine.nvlink, work.network / machine.network)


def host_driven(work: Work, machine: Machine, nodes: int, gpus: int) -> float:
    """Collectives, and then or before the library: both links at the same time, at the same rates, and a step of a
    collective for every doubling of the ranks. What comes is put into place as it does if links are paced, as the
    benchmarks do it, and else afterwards. All counts are known in advance."""
    network = work.network if work.host_network is None else work.host_network
    links = max(work.nvlink / machine.nvlink_of(gpus), network / machine.network_rate)
    placed = work.placed / machine.memory
    steps = work.collectives * math.ceil(math.log2(nodes * gpus)) * machine.collective_seconds
    came = max(links, placed) if machine.paced else links + placed + steps
    latency = work.collectives * machine.network_seconds if network else 0.0
    read = machine.grouped_memory if work.library in ("grouped", "gated") else machine.memory
    library = max(library_seconds(work, machine), work.memory / read)
    return library + came + latency + work.moved / machine.memory + work.kernels * machine.launch_seconds


def predict(
    op: str | Operator, shape: Shape, *, machine: Machine, nodes: int = 1, gpus_per_node: int = 8,
    dtype: torch.dtype = torch.bfloat16, options: Mapping[str, Any] | None = None, config: Config | None = None,
    rank: int | None = None, timeline: bool = False,
) -> Prediction:  # fmt: skip
    """What a call of an operator would take on a cluster of such machines. shape: as for `mkernel bench`, of all ranks.
    rank: the one that is simulated; by default the slowest of those that the model names."""
    operator = operators.find(op, "workload", "model") if isinstance(op, str) else op
    check_dtype(dtype, machine)
    given = dict(options or {})
    if rank is None:
        problem = Problem(tuple(shape), dtype.itemsize, given)
        found = (
            predict(
                operator, shape, machine=machine, nodes=nodes, gpus_per_node=gpus_per_node, dtype=dtype,
                options=options, config=config, rank=each, timeline=timeline,
            )
            for each in operator.load("model").ranks(problem, nodes * gpus_per_node)
        )  # fmt: skip
        return max(found, key=lambda one: one.seconds)
    links = Links(machine.nvlink / 1e9, machine.network / 1e9, machine.network_seconds) if machine.paced else Links()
    with member(
        nodes, gpus_per_node, rank, ctas=machine.sms, capability=machine.capability, links=links
    ) as group:  # fmt: skip
        plan = plan_of(group, operator, shape, dtype, given, config)
    problem = Problem(tuple(shape), dtype.itemsize, given)
    model = operator.load("model")
    engine = Engine(machine, nodes, gpus_per_node, rank=rank, timeline=timeline)
    model.run(engine, plan, problem)
    work = model.work(problem, nodes, gpus_per_node)
    loads = loads_of(engine, work, machine)
    # tiles of great depth would be faster than any that was measured
    fastest = work.flops / machine.library_flops[work.library] / machine.beyond_library
    seconds = max(engine.end, fastest, engine.start + loads["memory"])
    total = sum(sum(group.spent.values()) for group in engine.groups) or 1.0
    spent: dict[str, float] = {}
    for lanes in engine.groups:
        for kind, value in lanes.spent.items():
            spent[kind] = spent.get(kind, 0.0) + value / total
    return Prediction(
        op=operator.name, shape=tuple(shape), nodes=nodes, gpus_per_node=gpus_per_node, rank=rank, machine=machine.name,
        seconds=seconds, floor=floor_of(work, machine), host=host_driven(work, machine, nodes, gpus_per_node),
        loads=loads, bound=bound_of(loads, engine), spent=spent, requests=engine.network.requests,
        plan=str(plan), engine=engine, dtype=dtype, options=given, config=config,
    )  # fmt: skip


def predict_late(late: float, op: str | Operator, shape: Shape, *, machine: Machine, **given: Any) -> Prediction:
    """`predict`, if one rank begins `late` seconds after the others. All ranks need something of it, so they are done
    about when it is. It finds everything that comes from other ranks there, or on its way for so much longer."""
    together = predict(op, shape, machine=machine, **given)
    if not late:
        return together
    ahead = replace(
        machine, network_seconds=machine.network_seconds - late, nvlink_seconds=machine.nvlink_seconds - late
    )
    behind = predict(op, shape, machine=ahead, **given)
    seconds = max(together.seconds, late + behind.seconds)
    return replace(behind, late=late, seconds=seconds, host=together.host + late)


def emulated(
    op: str | Operator, shape: Shape, machine: Machine, *, nodes: int, ranks: int,
    options: Mapping[str, Any] | None = None, config: Config | None = None, rank: int | None = None,
    timeline: bool = False,
) -> Prediction:  # fmt: skip
    """What `mkernel bench` would measure if this many ranks per node shared one such GPU."""
    part = shared(machine, nodes * ranks, nodes)
    found = predict(
        op, shape, machine=part, nodes=nodes, gpus_per_node=ranks, options=options, config=config, rank=rank,
        timeline=timeline,
    )  # fmt: skip
    return replace(found, machine=machine.name)
