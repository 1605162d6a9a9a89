"""The HTML report of a benchmark: tables and plots of the figures in its JSON."""

from __future__ import annotations

from typing import Any

from mkernel import report
from mkernel.bench import baselines, is_right, published

BARS = {
    "fused_ms": "fused",
    "host_driven_ms": "host-driven",
    "nccl_ms": "NCCL and library",
    "symm_mem_ms": "PyTorch symmetric memory",
    "library_ms": "library alone",
    "wire_ms": "link alone",
    "network_ms": "network alone",
}
FRACTIONS = {
    "floor_fraction": "in bursts",
    "sustained_floor_fraction": "sustained",
    "published_floor_fraction": "published mKernel, 2 x 8 H200",
}
COLUMNS = {
    **{key: f"{name}, ms" for key, name in BARS.items()},
    "speedup": "against host-driven",
    "nccl_speedup": "against NCCL",
    "symm_mem_speedup": "against symmetric memory",
    "floor_fraction": "floor fraction",
    "sustained_floor_fraction": "sustained",
    "published_ms": "published, ms",
    "published_nccl_ms": "published NCCL, ms",
    "published_floor_fraction": "published floor fraction",
}


def page(figures: dict[str, Any]) -> str:
    machine, results = figures["machine"], figures["results"]
    versions = f"torch {machine['torch']}, Triton {machine['triton']}, Python {machine['python']}"
    parts = [report.text(f"Measured on {machine['gpus']} x {machine['gpu']}, {versions}.")]
    if any(result.get("emulated") for result in results):
        parts.append(
            report.text(
                "Emulated figures: ranks share a GPU, or links are paced to a rate. Times are no times of a cluster; "
                "floor fractions can be compared.",
                "emulated",
            )
        )
    parts.append(
        report.text(
            "The floor is the longest of the library's arithmetic alone and each link alone; the floor fraction is "
            "floor / fused: 1 is perfect overlap at the library's speed. Host-driven: the same copies and library "
            "calls, one after the other, over the same links. NCCL and PyTorch's symmetric memory: a process for each "
            "GPU, over the physical links."
        )
    )
    for op in dict.fromkeys(result["op"] for result in results):
        parts += _operator(op, [result for result in results if result["op"] == op])
    return report.page("mkernel bench", parts, figures)


def name_of(result: dict[str, Any]) -> str:
    """A shape as it is written on an axis, in two lines."""
    ranks = f"{result['nodes']}x{result['ranks'] // result['nodes']} ranks" if "ranks" in result else ""
    emulated = ", emulated" if result.get("emulated") else ""
    return f"{'x'.join(map(str, result['shape']))}\n{ranks}{emulated}"


def _operator(op: str, results: list[dict[str, Any]]) -> list[str]:
    parts = [report.heading(op)]
    parts += [
        report.text(f"{'x'.join(map(str, result['shape']))} failed: {result['failed']}", "wrong")
        for result in results
        if "failed" in result
    ]
    measured = [result for result in results if "failed" not in result]
    parts += [
        report.text(f"{'x'.join(map(str, result['shape']))}: WRONG RESULT", "wrong")
        for result in measured
        if not is_right(result)
    ]
    for result in measured:
        for name, said in baselines.remarks(result).items():
            style = "small" if baselines.is_right(result, [name]) else "wrong"
            parts.append(report.text(f"{'x'.join(map(str, result['shape']))}: {said}", style))
    if not measured:
        return parts
    columns = {key: name for key, name in COLUMNS.items() if any(result.get(key) is not None for result in measured)}
    rows = [
        [
            name_of(result).replace("\n", ", "),
            *("-" if result.get(key) is None else f"{result[key]:.3f}" for key in columns),
        ]
        for result in measured
    ]
    parts.append(report.table(["shape", *columns.values()], rows))
    names = [name_of(result) for result in measured]
    bars = [
        {"type": "bar", "name": name, "x": names, "y": [result.get(key) for result in measured]}
        for key, name in BARS.items()
        if any(result.get(key) for result in measured)
    ]
    parts.append(report.plot(f"{op}-times", bars, "Time of a call", "", "ms", barmode="group"))
    points = [
        {"type": "scatter", "mode": "markers", "marker": {"size": 12, "symbol": place}, "name": name, "x": names,
         "y": [result.get(key) for result in measured]}
        for place, (key, name) in enumerate(FRACTIONS.items())
        if any(result.get(key) is not None for result in measured)
    ]  # fmt: skip
    parts.append(report.plot(f"{op}-floor", points, "Floor fraction", "", "floor / fused", yaxis={"range": [0, 1.1]}))
    if any(result.get("published_ms") is not None for result in measured):
        known = published.figures()
        parts.append(
            report.text(f"Published figures: {known['source']} {known['licence']} {known['testbed']}", "small")
        )
        notes = [result["published_note"] for result in measured if result.get("published_note")]
        first = measured[0]
        here = published.place(first["nodes"], first["ranks"] // first["nodes"], first["gpus"])
        for words in (published.SAME, published.DIFFERENT.format(here=here), *known["weak_points"], *notes[:1]):
            parts.append(report.text(words, "small"))
    return parts
