"""The HTML page of the demo: results, bytes from rank to rank, and overlap."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mkernel import report

SCALE = [[0, "#f7f7f7"], [1, report.COLORS[0]]]

if TYPE_CHECKING:
    from mkernel.demo import Shown


def page(place: str, simulated: bool, shown: Sequence[Shown]) -> str:
    parts = [
        report.text(
            "Each operator runs transfers and arithmetic in one kernel per rank. Results are compared with PyTorch in "
            f"float64. This was run on {place}."
        )
    ]
    if simulated:
        parts.append(report.text("Simulated: bytes and tile products are counted; there are no times.", "emulated"))
    wrong = [f"{one.name}: {problem}" for one in shown for problem in one.wrong]
    parts += [report.text(f"Wrong: {problem}", "wrong") for problem in wrong]
    if not wrong:
        parts.append(report.text("All results are right."))
    for one in shown:
        parts += _operator(one)
    data = {"place": place, "simulated": simulated, "operators": [one.to_dict() for one in shown]}
    return report.page("mkernel demo", parts, data)


def _operator(one: Shown) -> list[str]:
    rows = [
        [
            rank,
            " x ".join(map(str, check.shape)),
            f"{check.error:.3g}",
            f"{check.share:.0%}",
            "ok" if check.ok else "WRONG",
        ]
        for rank, check in enumerate(one.checks)
    ]
    parts = [
        report.heading(one.name),
        report.text(f"{one.summary[0].upper()}{one.summary[1:]}. Each rank holds {one.inputs} (bf16)."),
        report.table(["rank", "result", "largest error", "of the bound", ""], rows),
    ]
    ranks = [f"rank {rank}" for rank in range(len(one.checks))]
    for key, sent, title in (
        ("nvlink", one.nvlink, "Bytes sent inside a node, over NVLink"),
        ("network", one.network, "Bytes sent between nodes, over the network"),
    ):
        if sum(map(sum, sent)):
            trace = {"type": "heatmap", "x": ranks, "y": ranks, "z": sent, "colorscale": SCALE}
            trace["hovertemplate"] = "%{y} to %{x}: %{z} bytes<extra></extra>"
            parts.append(
                report.plot(f"{one.name}-{key}", [trace], title, "to", "from", yaxis={"autorange": "reversed"})
            )
    if one.products:
        before = one.before_last_arrival[0]
        after = [all - early for all, early in zip(one.products[0], before)]
        traces = [
            {"type": "bar", "name": "before the rank's last byte arrived", "x": ranks, "y": before},
            {"type": "bar", "name": "after", "x": ranks, "y": after},
        ]
        parts.append(
            report.plot(f"{one.name}-overlap", traces, "Tile products, first schedule", "", "products", barmode="stack")
        )
    if one.times:
        names = list(one.times)
        times = {"type": "bar", "x": names, "y": [one.times[name] for name in names]}
        parts.append(report.plot(f"{one.name}-times", [times], "Time of a call", "", "ms"))
    return parts
