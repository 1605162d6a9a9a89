"""The model beside what was measured: emulated figures of one H200 that several ranks share, see measured.json, and
published ones: those of DeepEP, and those of mKernel, with its own schedules."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from mkernel.bench import published
from mkernel.operators import Operator, Shape, registered
from mkernel.scale.engine import Engine
from mkernel.scale.machine import MEASURED, load
from mkernel.scale.model import Problem
from mkernel.scale.peer import load_peer
from mkernel.scale.predict import emulated, predict

ASIDE = "kept aside"


@dataclass(frozen=True)
class Point:
    """A measurement and what the model says. Times in ms. use: "kept aside", or what it calibrates. host_measured: the
    host-driven way, if it was measured; all of those are kept aside."""

    op: str
    nodes: int
    ranks: int
    shape: Shape
    options: dict[str, Any]
    readme: bool
    use: str
    measured: float
    predicted: float
    host_measured: float | None
    host_predicted: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def host_error(self) -> float | None:
        return self.host_predicted / self.host_measured - 1 if self.host_measured else None

    @property
    def is_emulated(self) -> bool:
        """Do several ranks share the GPU?"""
        return self.nodes * self.ranks > 1


def measured_rows() -> list[dict[str, Any]]:
    return json.loads(resources.files("mkernel.scale").joinpath("measured.json").read_text())["rows"]


def points(machine: str = MEASURED) -> list[Point]:
    """Every measurement beside the model."""
    found = []
    for row in measured_rows():
        nodes, ranks, options = row["nodes"], row["ranks"], row["options"]
        prediction = emulated(row["op"], tuple(row["shape"]), load(machine), nodes=nodes, ranks=ranks, options=options)
        found.append(
            Point(
                row["op"], nodes, ranks, tuple(row["shape"]), options, row["readme"], row["use"], row["ms"],
                prediction.seconds * 1e3, row.get("host_ms"), prediction.host * 1e3,
            )
        )  # fmt: skip
    return found


@dataclass(frozen=True)
class Bandwidth:
    """A published bandwidth of DeepEP, in GB/s per GPU, and that of our dispatch in the model, from when the tokens
    are routed."""

    what: str
    nodes: int
    use: str
    published: float
    predicted: float

    @property
    def error(self) -> float:
        return self.predicted / self.published - 1


def bandwidths(machine: str = MEASURED) -> list[Bandwidth]:
    """DeepEP's figures on 2 and 4 nodes of 8 GPUs beside the model of our dispatch: 8192 tokens of 7168 elements on
    each rank, top 8 of 256 experts. They count a token once for each node that needs it, its own too. A combine moves
    the same, the other way."""
    rows = json.loads(resources.files("mkernel.scale").joinpath("measured.json").read_text())["deepep"]
    found = []
    for row in rows:
        nodes = row["nodes"]
        one = predict(
            row["op"], (8192 * 8 * nodes, 16, 7168), machine=load(machine), nodes=nodes,
            options={"experts": 256 // (8 * nodes), "topk": 8},
        )  # fmt: skip
        card = one.engine.network.card
        logical = card.moved * nodes / (nodes - 1) / (card.free - one.engine.marks["routed"]) / 1e9
        found.append(Bandwidth(row["what"], nodes, row["use"], row["gb_per_s"], logical))
    return found


@dataclass(frozen=True)
class Published:
    """A time that mKernel publishes, and that of its schedule in the model, in ms. use: "kept aside", or what it
    calibrates."""

    op: str
    size: int
    network: str
    use: str
    published: float
    predicted: float

    @property
    def error(self) -> float:
        return self.predicted / self.published - 1


def published_points() -> list[Published]:
    """mKernel's times on 2 nodes of 8 H200 beside the model of its own schedules (peer.py): with EFA, some of which
    calibrate the model, and with ConnectX-7, none of which does, beside the same."""
    peer, found = load_peer(), []
    for name, operator in registered("model").items():
        uses, predicted = peer.calibration.get(name, {}), {}
        for row in published.rows(name):
            engine = Engine(peer.machine, published.NODES, published.GPUS_PER_NODE)
            operator.load("model").peer(engine, peer, row["size"])
            seconds = engine.end + (0.0 if name in peer.back_to_back else peer.start_seconds)
            predicted[row["size"]] = seconds * 1e3
            use = f"calibrates {uses[str(row['size'])]}" if str(row["size"]) in uses else ASIDE
            found.append(Published(name, row["size"], "EFA", use, row["mkernel"], seconds * 1e3))
        for row in published.rates(name):
            shape = operator.load("bench").published.shape(row["size"], published.RANKS)
            flops = flops_of(operator, shape)
            time = flops / row["mkernel"] * 1e-9
            found.append(Published(name, row["size"], "ConnectX-7", ASIDE, time, predicted[row["size"]]))
    return found


def flops_of(operator: Operator, shape: Shape) -> float:
    """Of a rank, in a published call: without a mask, top 8 of 256 experts."""
    problem = Problem(shape, 2, {"causal": False, "experts": 256 // published.RANKS, "topk": 8})
    return operator.load("model").work(problem, published.NODES, published.GPUS_PER_NODE).flops


def median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
