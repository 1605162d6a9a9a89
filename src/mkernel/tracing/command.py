"""What `mkernel trace` does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from mkernel.runtime.group import Group
from mkernel.runtime.spawn import spawn
from mkernel.runtime.world import Links
from mkernel.tracing.session import Trace, trace
from mkernel.workloads import Workload


def run(
    workload: Workload,
    shapes: Sequence[tuple[int, ...]],
    *,
    nodes: int,
    gpus_per_node: int,
    device: str,
    dtype: torch.dtype,
    links: Links,
    calls: int,
    room: int,
    seed: int,
) -> Trace:
    """Trace `calls` calls of each shape, one after the other. On a GPU each shape is called twice before, once
    as usual and once traced: loading a kernel shall not be in the trace."""

    def on_rank(group: Group) -> Trace:
        made = [workload.make(group, shape, dtype) for shape in shapes]
        if device == "cuda":
            with trace(group, events=1):
                for call in made:
                    call.run(None)
        with trace(group, events=room) as traced:
            for call in made:
                for _ in range(calls):
                    call.run(None)
        return traced

    return spawn(
        on_rank, nodes=nodes, gpus_per_node=gpus_per_node, device=device, seed=seed,
        links=links if device == "cuda" else None,
    )[0]  # fmt: skip


def show(traced: Trace, json: Path, html: Path, console: Console) -> None:
    """Write both files, and print what each rank spent its time on."""
    traced.save(json)
    traced.html(html)
    table = Table(box=None, pad_edge=False)
    for name in ("rank", "call", "ms", "tiles", "copies", "waits", "copies behind tiles"):
        table.add_column(name, justify="right")
    for line in traced.summary():
        figures = [line[name] for name in ("ms", "tiles_ms_per_cta", "copies_ms_per_cta", "waits_ms_per_cta")]
        table.add_row(
            str(line["rank"]), str(line["call"]), *(f"{figure:.4f}" for figure in figures),
            f"{line['copies_hidden']:.0%}",
        )  # fmt: skip
    console.print(table)
    console.print("ms; tiles, copies and waits: the mean of the rank's CTAs")
    if traced.simulated:
        console.print("simulated: only the order and the proportions of times mean something")
    if traced.emulated:
        console.print("emulated: ranks share a GPU, or links are paced")
    if traced.clock_error:
        console.print(f"times of different ranks are right within {traced.clock_error / 1e3:.1f} us")
    if traced.lost:
        console.print(f"{traced.lost} events found no room; --events makes more")
    console.print(f"{len(traced.events)} events: {json} for ui.perfetto.dev, {html} for a browser")
