"""The HTML page of `mkernel plan`: time, floor fraction and loads by number of nodes, and a timeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mkernel import report
from mkernel.scale.predict import Prediction
from mkernel.scale.timeline import last_lane

LOG = {"type": "log"}
COLUMNS = ["nodes", "shape", "rank", "fused ms", "floor ms", "floor fraction", "bound by", "host-driven ms", "speed-up"]


def page(title: str, found: Sequence[Prediction], timelines: Sequence[Prediction]) -> str:
    """found: by number of nodes. timelines: those of which to show what the last lane did."""
    nodes = [one.nodes for one in found]
    parts = [
        report.text(
            "All figures are modelled: the plan that a call would take, carried out step by step on modelled "
            "resources. Nothing here was measured.",
            "emulated",
        ),
        report.table(
            COLUMNS,
            [row_of(one) for one in found],
        ),
        _lines("times", nodes, "Time of a call", "ms", {
            "fused": [one.seconds * 1e3 for one in found],
            "host-driven": [one.host * 1e3 for one in found],
            "floor": [one.floor * 1e3 for one in found],
        }, yaxis=LOG),
        _lines("fractions", nodes, "Floor fraction", "floor / fused", {
            "fused": [one.fraction for one in found],
            "host-driven": [one.floor / one.host for one in found],
        }, yaxis={"range": [0, 1.1]}),
        _lines("loads", nodes, "How long each resource is busy, over the time of the call", "", {
            name: [one.loads[name] / one.seconds for one in found]
            for name in found[0].loads
            if any(one.loads[name] for one in found)
        }, yaxis={"range": [0, 1.1]}),
    ]  # fmt: skip
    parts += [_timeline(one) for one in timelines]
    for one in found:
        parts += [report.heading(f"{one.nodes} nodes"), *map(report.text, one.plan.splitlines()), _spent(one)]
    data = {"title": title, "results": [one.to_dict() for one in found]}
    return report.page("mkernel plan", [report.heading(title), *parts], data)


def row_of(one: Prediction) -> list[str]:
    return [
        str(one.nodes), "x".join(map(str, one.shape)), str(one.rank), f"{one.seconds * 1e3:.3f}",
        f"{one.floor * 1e3:.3f}", f"{one.fraction:.2f}", one.bound, f"{one.host * 1e3:.3f}", f"{one.speedup:.2f}",
    ]  # fmt: skip


def _lines(name: str, nodes: Sequence[int], title: str, y: str, values: dict[str, list[float]], **layout: Any) -> str:
    traces = [
        {"type": "scatter", "mode": "lines+markers", "name": way, "x": list(nodes), "y": points}
        for way, points in values.items()
    ]
    return report.plot(name, traces, title, "nodes", y, xaxis={**LOG, "tickvals": list(nodes)}, **layout)


def _timeline(one: Prediction) -> str:
    lane, pieces = last_lane(one.engine)
    kinds = list(dict.fromkeys(piece.kind for piece in pieces))
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": kind,
            "y": [lane] * sum(piece.kind == kind for piece in pieces),
            "x": [(piece.end - piece.begin) * 1e3 for piece in pieces if piece.kind == kind],
            "base": [piece.begin * 1e3 for piece in pieces if piece.kind == kind],
        }
        for kind in kinds
    ]
    title = f"{one.nodes} nodes: what the lane of rank {one.rank} that ends last does ({lane})"
    return report.plot(f"timeline-{one.nodes}", traces, title, "ms", "", barmode="overlay")


def _spent(one: Prediction) -> str:
    shares = sorted(one.spent.items(), key=lambda item: -item[1])
    return report.table(["lanes spend their time with", "of it"], [[kind, f"{share:.0%}"] for kind, share in shares])
