"""A trace as a self-contained page: a row per CTA, with a band per role, below the rank's network requests."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mkernel import report
from mkernel.tracing.events import Event
from mkernel.tracing.links import arrivals

if TYPE_CHECKING:
    from mkernel.runtime.world import Transfer
    from mkernel.tracing.session import Trace

COLORS = {
    "launch": "#eef1f5",
    "tile": "#3b7dd8",
    "push": "#f08c2e",
    "send": "#9a62d0",
    "post": "#5b2a91",
    "reduce": "#2f9e63",
    "gather": "#c7b42c",
    "network": "#13a0a0",
}
WAITING = ("#d64545", "#e58a8a", "#b8323f", "#efb3a6")  # for the kinds of waits, cyclically
OTHER = "#8a94a0"
BANDS = ("send", "intra", "compute", "tiles")  # of a CTA's row, from top to bottom
INDEX = {
    "tile": "number", "push": "chunk", "send": "chunk", "post": "ticket", "network": "ticket", "reduce": "tile",
    "gather": "block",
}  # fmt: skip


def write(trace: Trace, path: Path) -> None:
    """Write the file."""
    template = resources.files("mkernel.tracing").joinpath("timeline.html").read_text(encoding="utf-8")
    path.write_text(template.replace("__DATA__", report.to_json(data_of(trace))), encoding="utf-8")


def data_of(trace: Trace) -> dict[str, Any]:
    """The data that the page draws: rows, and spans (row, band, start, duration, kind, peer, index, call)."""
    rows: list[dict[str, Any]] = []
    kinds: dict[str, int] = {}
    spans: list[list[int]] = []
    span_of: dict[int, int] = {}  # id of an event -> index of its span

    def kind(name: str) -> int:
        return kinds.setdefault(name, len(kinds))

    kind("launch")
    for rank in range(trace.size):
        heading = f"rank {rank}, node {rank // trace.gpus_per_node}"
        for transfers in _side_by_side([one for one in trace.transfers if one.source == rank]):
            rows.append({"rank": rank, "heading": heading, "label": "network", "bands": 1})
            for one in transfers:
                spans.append(
                    [len(rows) - 1, 0, one.start, one.end - one.start, kind("network"), one.target, one.ticket, 0]
                )
        of_rank: dict[int, list[Event]] = {}
        for event in trace.of(rank):
            of_rank.setdefault(event.cta, []).append(event)
        for cta, events in sorted(of_rank.items()):
            roles = sorted({event.lane for event in events} - {"cta"}, key=_band)
            rows.append({"rank": rank, "heading": heading, "label": _label(cta, roles), "bands": max(len(roles), 1)})
            # launches first, as the background; events that contain others before these
            for event in sorted(events, key=lambda event: (event.kind != "launch", event.start, -event.end)):
                bands = range(max(len(roles), 1)) if event.lane == "cta" else [roles.index(event.lane)]
                for band in bands:
                    span_of[id(event)] = len(spans)
                    spans.append(
                        [
                            len(rows) - 1, band, event.start, event.duration, kind(event.kind),
                            event.peer, event.index, event.call,
                        ]
                    )  # fmt: skip
    colors = _colors(list(kinds))
    return {
        "title": "mKernel trace: " + ", ".join(dict.fromkeys(trace.calls())),
        "about": _about(trace),
        "summary": _summary(trace),
        "calls": trace.calls(),
        "end": max(span[2] + span[3] for span in spans),
        "rows": rows,
        "kinds": [{"name": name, "color": colors[name], "index": INDEX.get(name, "")} for name in kinds],
        "spans": spans,
        "arrivals": [[span_of[id(sent)], span_of[id(seen)]] for sent, seen in arrivals(trace)],
    }


def _band(role: str) -> tuple[int, str]:
    return (BANDS.index(role) if role in BANDS else len(BANDS), role)


def _label(cta: int, roles: list[str]) -> str:
    helping = [role for role in roles if role in ("send", "intra")]
    return f"CTA {cta}" + (f" ({', '.join(helping)})" if helping else "")


def _side_by_side(transfers: list[Transfer]) -> list[list[Transfer]]:
    """Distribute transfers over as few rows as possible, without overlap in any row."""
    rows: list[list[Transfer]] = []
    for one in sorted(transfers, key=lambda transfer: transfer.start):
        free = next((row for row in rows if row[-1].end <= one.start), None)
        if free is None:
            rows.append([one])
        else:
            free.append(one)
    return rows


def _colors(kinds: list[str]) -> dict[str, str]:
    waits = [kind for kind in kinds if kind not in COLORS and kind.startswith("wait")]
    shades = {kind: WAITING[i % len(WAITING)] for i, kind in enumerate(waits)}
    return {kind: COLORS.get(kind) or shades.get(kind) or OTHER for kind in kinds}


def _about(trace: Trace) -> list[tuple[str, bool]]:
    """Sentences about the trace, each with whether to highlight it."""
    nodes = trace.size // trace.gpus_per_node
    about = [(f"{trace.size} ranks in {nodes} node{'s' if nodes > 1 else ''}, {trace.device}.", False)]
    if trace.simulated:
        about.append(("Simulated: only the order and the proportions of times are meaningful.", True))
    if trace.emulated:
        about.append(("Emulated: ranks share a GPU, or links are paced.", True))
    if trace.clock_error:
        about.append((f"Times of different ranks are comparable within {trace.clock_error / 1e3:.1f} µs.", False))
    if trace.lost:
        about.append((f"{trace.lost} events were dropped: increase mk.trace(events=...).", True))
    about.append(("Drag to move, double-click or Ctrl and wheel to zoom, point at a span for details.", False))
    return about


def _summary(trace: Trace) -> list[list[str]]:
    """The summary as a table: a header, and a line for each rank and call."""
    table = [
        ["rank", "call", "operator", "CTAs", "ms", "tiles, ms per CTA", "copies", "waits", "copies behind tiles"]
    ]  # fmt: skip
    for line in trace.summary():
        figures = [line[name] for name in ("ms", "tiles_ms_per_cta", "copies_ms_per_cta", "waits_ms_per_cta")]
        table.append(
            [
                str(line["rank"]), str(line["call"]), line["op"], str(line["ctas"]),
                *(f"{figure:.3f}" if figure >= 0.1 else f"{figure:.3g}" for figure in figures),
                f"{line['copies_hidden']:.0%}",
            ]
        )  # fmt: skip
    return table
