"""`mkernel trace`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from mkernel.runtime.group import Group
from mkernel.runtime.spawn import spawn
from mkernel.runtime.world import Links
from mkernel.tracing.session import OVERLAP, Trace, trace
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
    events: int,
    seed: int,
    begin: Callable[[Group], None] = lambda group: None,
) -> Trace:
    """Trace `calls` calls of each shape, one after the other. On a GPU, each shape is first called once in a trace that
    is discarded, so that the trace does not include the loading of kernels. Every rank calls `begin` first."""

    def on_rank(group: Group) -> Trace:
        begin(group)
        made = [workload.make(group, shape, dtype) for shape in shapes]
        if device == "cuda":
            with trace(group, events=1):
                for call in made:
                    call.run(None)
        with trace(group, events=events) as traced:
            for call in made:
                for _ in range(calls):
                    call.run(None)
        return traced

    return spawn(
        on_rank, nodes=nodes, gpus_per_node=gpus_per_node, device=device, seed=seed,
        links=links if device == "cuda" else None,
    )[0]  # fmt: skip


BARS = " ▁▂▃▄▅▆▇█"
WIDE = 112  # columns that a console needs to show bars


def bars(busy: Sequence[float], ctas: int) -> str:
    """The number of busy CTAs over time, out of `ctas`, as a line of bars; even a single busy CTA is visible."""
    levels = len(BARS) - 1
    return "".join(BARS[min(math.ceil(levels * share / ctas - 1e-3), levels)] for share in busy)


def show_account(traced: Trace, rank: int, console: Console) -> None:
    """Print where the time of a rank's CTAs went in its last call."""
    call = len(traced.calls(rank)) - 1
    start, end = traced.span(rank, call)
    ctas = len({event.cta for event in traced.of(rank, "launch", call=call)})
    milliseconds = (end - start) / 1e6
    console.print(f"rank {rank}, call {call}: {milliseconds:.4f} ms of {ctas} CTAs, {milliseconds * ctas:.4f} CTA-ms")
    table = Table(box=None, pad_edge=False)
    for name in ("role", "what"):
        table.add_column(name)
    for name in ("times", "CTA-ms", "median", "longest", "from", "to"):
        table.add_column(name, justify="right", no_wrap=True)
    wide = console.width >= WIDE
    if wide:
        table.add_column("CTAs at it", no_wrap=True)
    for line in traced.account(rank, call):
        table.add_row(
            line["role"], line["kind"], str(line["count"]), f"{line['cta_ms']:.4f}", f"{line['median_us']:.2f}",
            f"{line['longest_us']:.1f}", f"{line['first_ms']:.4f}", f"{line['last_ms']:.4f}",
            *([bars(line["busy"], ctas)] if wide else []),
        )  # fmt: skip
    console.print(table)
    console.print("median and longest in us; from and to in ms since the call began")


def show(traced: Trace, json: Path, html: Path, console: Console, where: int | None = None) -> None:
    """Write both files, and print how each rank spent its time; for the rank `where`, in detail."""
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
    console.print(f"copies behind tiles: the share of {OVERLAP}")
    if where is not None:
        show_account(traced, where, console)
    if traced.simulated:
        console.print("simulated: only the order and the proportions of times are meaningful")
    if traced.emulated:
        console.print("emulated: ranks share a GPU, or links are paced")
    if traced.clock_error:
        console.print(f"times of different ranks are comparable within {traced.clock_error / 1e3:.1f} us")
    if traced.lost:
        console.print(f"{traced.lost} events were dropped; increase --events")
    console.print(f"{len(traced.events)} events: {json} for ui.perfetto.dev, {html} for a browser")
