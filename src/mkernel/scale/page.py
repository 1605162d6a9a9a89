"""The HTML page of `mkernel plan`: time, floor fraction and loads by number of nodes, and critical paths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mkernel import report
from mkernel.runtime.config import Config
from mkernel.scale.predict import Prediction
from mkernel.scale.timeline import Piece, critical_path, joined, shares
from mkernel.tuning.command import words_of

LOG = {"type": "log"}
SHOWN = 0.05  # of a critical path, in its title
COLUMNS = ["nodes", "shape", "rank", "fused ms", "floor ms", "floor fraction", "bound by", "host-driven ms", "speed-up"]


def page(title: str, about: str, found: Sequence[Prediction], timelines: Sequence[Prediction]) -> str:
    """about: the machine. found: by number of nodes. timelines: those of which to show the critical path."""
    nodes = [one.nodes for one in found]
    searched = any(one.config is not None for one in found)
    parts = [
        report.text(
            "All figures are modelled: the plan that a call would take, carried out step by step on modelled "
            "resources. Nothing here was measured.",
            "emulated",
        ),
        report.text(about, "small"),
        report.table(
            COLUMNS + ["configuration"] * searched,
            [row_of(one) + [words_of(one.config or Config())] * searched for one in found],
        ),
        _lines("times", nodes, "Time of a call", "ms", {
            "fused": [one.seconds * 1e3 for one in found],
            "host-driven": [one.host * 1e3 for one in found],
            "floor": [one.floor * 1e3 for one in found],
        }, yaxis=LOG),
        _lines("fractions", nodes, "Floor fraction", "floor / time", {
            "fused": [one.fraction for one in found],
            "host-driven": [one.floor / one.host for one in found],
        }, yaxis={"range": [0, 1.1]}),
        _lines("loads", nodes, "How long each resource is busy, over the time of the call", "busy / time", {
            name: [one.loads[name] / one.seconds for one in found]
            for name in found[0].loads
            if any(one.loads[name] for one in found)
        }, yaxis={"range": [0, 1.1]}),
    ]  # fmt: skip
    paths = [(one, critical_path(one.engine)) for one in timelines]
    kinds = list(dict.fromkeys(kind for _, path in paths for kind in shares(path)))
    parts += [_timeline(one, path, kinds) for one, path in paths]
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


def _timeline(one: Prediction, path: Sequence[Piece], kinds: Sequence[str]) -> str:
    """kinds: of all paths of the page, which have the same colors in all of them."""
    pieces = joined(path)
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": kind,
            "y": [kind] * len(chosen),
            "x": [(piece.end - piece.begin) * 1e3 for piece in chosen],
            "base": [piece.begin * 1e3 for piece in chosen],
            "text": [piece.lane for piece in chosen],
            "textposition": "none",
            "marker": {"color": report.COLORS[kinds.index(kind) % len(report.COLORS)], "line": {"width": 0}},
        }
        for kind in kinds
        if (chosen := [piece for piece in pieces if piece.kind == kind])
    ]
    parts = ", ".join(f"{kind} {part:.0%}" for kind, part in shares(path).items() if part >= SHOWN)
    title = f"Critical path on {one.nodes} nodes, rank {one.rank}: {parts}"
    return report.plot(
        f"timeline-{one.nodes}", traces, title, "ms", "", barmode="overlay", showlegend=False,
        yaxis={"autorange": "reversed", "automargin": True},
    )  # fmt: skip


def _spent(one: Prediction) -> str:
    shares = sorted(one.spent.items(), key=lambda item: -item[1])
    return report.table(["lanes spend their time with", "of it"], [[kind, f"{share:.0%}"] for kind, share in shares])
