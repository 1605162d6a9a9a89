"""`mkernel tune`."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from mkernel.runtime import tuned
from mkernel.runtime.config import Config
from mkernel.runtime.world import Links
from mkernel.tuning.measuring import Found, tune
from mkernel.tuning.search import Result
from mkernel.workloads import Workload


def run(
    workload: Workload,
    shapes: Sequence[tuple[int, ...]],
    *,
    nodes: int,
    gpus_per_node: int,
    dtype: torch.dtype,
    links: Links,
    seconds: float,
    options: Mapping[str, int],
    console: Console,
) -> list[Found]:
    """Tune one shape after the other, with a progress bar, and print the results."""
    found = []
    for shape in shapes:
        name = "x".join(str(size) for size in shape)
        bar = (TextColumn("{task.description}"), BarColumn(bar_width=24), TimeElapsedColumn())
        with Progress(*bar, console=console, transient=True) as progress:
            task = progress.add_task(f"{workload.op} {name}: the default", total=seconds)
            begun = time.monotonic()

            def on_result(result: Result) -> None:
                words = f"{name}: {len(result.trials)} tried, best {result.best_time:.3f} ms"
                progress.update(task, description=words, completed=min(time.monotonic() - begun, seconds))

            one = tune(
                workload, shape, nodes=nodes, gpus_per_node=gpus_per_node, dtype=dtype, links=links, seconds=seconds,
                options=options, on_result=on_result,
            )  # fmt: skip
        found.append(one)
    console.print(table_of(found))
    if links != Links():
        console.print("emulated: ranks share a GPU, and links are paced")
    console.print(f"stored in {tuned.path()}; groups created from now on use it")
    return found


def table_of(found: Sequence[Found]) -> Table:
    """The results as a table, one line per shape; times in ms."""
    table = Table(box=None, pad_edge=False)
    for name in ("shape", "default", "best", "worst", "tried", "configuration"):
        table.add_column(name, justify="left" if name == "configuration" else "right")
    for one in found:
        result = one.result
        figures = [f"{time:.3f}" for time in (result.default, result.best_time, result.worst_time)]
        tried = f"{len(result.trials)}{'' if result.complete else ', time was up'}"
        table.add_row("x".join(str(size) for size in one.shape), *figures, tried, words_of(result.best))
    return table


def words_of(config: Config) -> str:
    """A configuration for humans."""
    given = {name: value for name, value in dataclasses.asdict(config).items() if value is not None}
    return ", ".join(f"{name} {value}" for name, value in given.items()) or "the default"
