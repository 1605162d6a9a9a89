"""`mkernel plan`."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from mkernel import tables
from mkernel.operators import Operator, Shape
from mkernel.runtime.config import Config
from mkernel.runtime.errors import ArgumentError
from mkernel.runtime.world import Links
from mkernel.scale.cluster import member, memory_of
from mkernel.scale.layers import Sum, layer_on, shape_on
from mkernel.scale.machine import Machine
from mkernel.scale.page import COLUMNS, page, row_of
from mkernel.scale.predict import Prediction, predict_late
from mkernel.scale.search import best
from mkernel.tuning.command import words_of

MOST_NODES = 128  # of a timeline: of 1024 nodes, it would take gigabytes
PART = 128  # rows and the like of a rank, of which there are whole numbers in default shapes


@dataclass(frozen=True)
class Asked:
    """What to predict: calls of an operator, of a shape on the first number of nodes, on each number of nodes. weak:
    what is divided among the ranks grows with them; else the shape stays."""

    operator: Operator
    shape: Shape
    nodes: Sequence[int]
    gpus_per_node: int
    machine: Machine
    dtype: torch.dtype
    options: Mapping[str, Any]
    weak: bool
    search: bool
    timeline: bool
    late: float = 0.0  # seconds by which one rank begins later than the others

    def shape_on(self, nodes: int) -> Shape:
        if not self.weak:
            return self.shape
        operator, first = self.operator, self.nodes[0]
        return tuple(
            size * nodes // first if name in operator.shared else size
            for name, size in zip(operator.dimensions, self.shape)
        )


def parse_nodes(text: str) -> list[int]:
    """Numbers of nodes: 2:16 is 2, 4, 8, 16; or a list such as 2,3,4."""
    try:
        first, colon, last = text.partition(":")
        if colon:
            least, most = int(first), int(last)
            numbers = [least << i for i in range(64) if least > 0 and least << i <= most]
        else:
            numbers = [int(number) for number in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise ArgumentError(f"{text!r} must be numbers of nodes: 2:64 for powers of two, or a list such as 2,3,8")
    return numbers


def default_shape(operator: Operator, ranks: int) -> Shape:
    """The first of an operator's shapes; what is divided among the ranks and does not divide is rounded up."""
    part = PART * ranks
    return tuple(
        -(-size // part) * part if name in operator.shared and size % ranks else size
        for name, size in zip(operator.dimensions, operator.shapes[0])
    )


def divisible(
    numbers: Sequence[int], check: Callable[[int], None], *, weak: bool, lenient: bool
) -> tuple[list[int], str]:
    """The numbers of nodes among whose ranks a shape can be divided, and a note about the others. check: raises if one
    cannot. lenient: others are left out; but not the first one, where the shape is that of the first."""
    kept, left, why = [], [], None
    for number in numbers:
        try:
            check(number)
            kept.append(number)
        except ArgumentError as problem:
            if not lenient or (weak and number == numbers[0]):
                raise
            left.append(number)
            why = why or problem
    if why and not kept:
        raise why
    return kept, f"left out: {', '.join(map(str, left))} nodes: {why}" if left else ""


def predictions(asked: Asked, progress: Callable[[int, int], None] = lambda nodes, tried: None) -> list[Prediction]:
    """progress: called with the number of nodes that comes next, and with how many configurations were tried there."""
    found = []
    for nodes in asked.nodes:
        tried = itertools.count()

        def again(config: Config | None, timeline: bool = False) -> Prediction:
            progress(nodes, next(tried))
            return predict_late(
                asked.late, asked.operator, asked.shape_on(nodes), machine=asked.machine, nodes=nodes,
                gpus_per_node=asked.gpus_per_node, dtype=asked.dtype, options=asked.options, config=config,
                timeline=timeline,
            )  # fmt: skip

        one = again(None)
        if asked.search:
            one = best(one, again, asked.machine.sms, asked.machine.capability)
        found.append(replace(one, held=_memory_of(asked, one)))
    return found


def _memory_of(asked: Asked, one: Prediction) -> int:
    """Bytes that the call holds on a GPU."""
    machine = asked.machine
    with member(
        one.nodes, one.gpus_per_node, 0, ctas=machine.sms, capability=machine.capability, links=Links()
    ) as group:  # fmt: skip
        return memory_of(group, asked.operator, one.shape, one.dtype, one.options, one.config)


def too_large(machine: Machine, found: Sequence[Prediction]) -> str:
    """Which calls do not fit into the memory of a GPU, in words; "" if all do."""
    large = [one for one in found if 0 < machine.capacity < one.held]
    if not large:
        return ""
    sizes = ", ".join(f"{one.held / 1e9:.0f} GB on {one.nodes} nodes" for one in large)
    return (
        f"Some calls could not run: operands, result and workspace do not fit into the {machine.capacity / 1e9:.0f} GB "
        f"of a GPU: {sizes}."
    )


def with_timeline(asked: Asked, one: Prediction) -> Prediction:
    return predict_late(
        asked.late, asked.operator, one.shape, machine=asked.machine, nodes=one.nodes, gpus_per_node=one.gpus_per_node,
        dtype=asked.dtype, options=asked.options, config=one.config, rank=one.rank, timeline=True,
    )  # fmt: skip


@contextlib.contextmanager
def progress_bar(what: str, nodes: Sequence[int]) -> Iterator[Callable[[int, str], None]]:
    """A progress bar on stderr, if that is a terminal, for these numbers of nodes. Yields a function to call with the
    number that comes next, and a note. The time is about proportional to the number."""
    bar = (TextColumn("{task.description}"), BarColumn(bar_width=24), TimeElapsedColumn())
    terminal = Console(stderr=True)
    with Progress(*bar, console=terminal, transient=True, disable=not terminal.is_terminal) as shown:
        # with a single number, it is unknown how much is done: the bar pulses
        task = shown.add_task(what, total=sum(nodes) if len(nodes) > 1 else None)

        def show(number: int, note: str = "") -> None:
            done = sum(nodes[: nodes.index(number)])
            shown.update(task, description=f"{what}: {number} nodes{note}", completed=done)

        yield show


def run(asked: Asked, *, as_json: bool, html: Path | None, console: Console) -> list[Prediction]:
    """Predict, with a progress bar, and print the figures."""
    with progress_bar(asked.operator.name, asked.nodes) as show:

        def show_progress(nodes: int, tried: int) -> None:
            show(nodes, f", configuration {tried}" if asked.search else "")

        found = predictions(asked, show_progress)
    if as_json:
        print(json.dumps({"machine": asked.machine.name, "results": [one.to_dict() for one in found]}, indent=2))
    else:
        _print(asked, found, console)
    if html is not None:
        few = [one for one in found if one.nodes <= MOST_NODES] or found[:1]
        ends = (few[0], few[-1])[: len(few)]
        timelines = []
        with progress_bar("critical path", [one.nodes for one in ends]) as show:
            for one in ends:
                show(one.nodes, "")
                timelines.append(with_timeline(asked, one))
        about = f"{asked.machine.name}: {asked.machine.summary}"
        about = " ".join(filter(None, [about, too_large(asked.machine, found)]))
        html.write_text(page(f"{asked.operator.name} on {asked.machine.name}", about, found, timelines))
    return found


def _print(asked: Asked, found: Sequence[Prediction], console: Console) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=f"{asked.operator.name}, modelled", title_justify="left")
    for name in COLUMNS + ["configuration"] * asked.search:
        table.add_column(name, justify="left" if name in ("shape", "bound by", "configuration") else "right")
    for one in found:
        table.add_row(*row_of(one), *([words_of(one.config or Config())] if asked.search else []))
    tables.show(table, console)
    console.print(escape(f"{asked.machine.name}: {asked.machine.summary}"), soft_wrap=True)
    if large := too_large(asked.machine, found):
        console.print(large, soft_wrap=True)
    last = found[-1]
    busy = ", ".join(f"{name} {seconds * 1e3:.3g} ms" for name, seconds in last.loads.items() if seconds)
    spent = sorted(last.spent.items(), key=lambda item: -item[1])[:4]
    console.print(
        f"{last.nodes} node{'s' * (last.nodes > 1)}, rank {last.rank}: busy: {busy}. CTAs: "
        + ", ".join(f"{kind} {part:.0%}" for kind, part in spent)
    )
    if asked.late:
        console.print(f"One rank begins {asked.late * 1e6:.4g} us after the others. Times count from their beginning.")
    console.print(escape(last.plan), soft_wrap=True)


def run_layer(
    name: str, shape: Shape, nodes: Sequence[int], gpus_per_node: int, machine: Machine, dtype: torch.dtype, *,
    weak: bool, as_json: bool, console: Console,
) -> list[Sum]:  # fmt: skip
    """Predict a layer, and print the figures."""
    found = []
    with progress_bar(name, nodes) as show:
        for number in nodes:
            show(number, "")
            found += layer_on(name, shape_on(shape, number, nodes[0], weak), number, gpus_per_node, machine, dtype)
    if as_json:
        print(json.dumps({"machine": machine.name, "results": [one.to_dict() for one in found]}, indent=2))
        return found
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=f"{name}, modelled", title_justify="left")
    names = ("nodes", "shape", "pass", "fused ms", "floor ms", "floor fraction", "host-driven ms", "speed-up", "parts")
    for column in names:
        table.add_column(column, justify="left" if column in ("shape", "pass", "parts") else "right")
    for one in found:
        figures = one.to_dict()
        table.add_row(
            str(one.nodes), "x".join(map(str, one.shape)), one.way, f"{figures['fused_ms']:.3f}",
            f"{figures['floor_ms']:.3f}", f"{figures['floor_fraction']:.2f}", f"{figures['host_driven_ms']:.3f}",
            f"{figures['speedup']:.2f}", ", ".join(f"{part['name']} {part['fused_ms']:.3f}" for part in one.parts),
        )  # fmt: skip
    tables.show(table, console)
    console.print(escape(f"{machine.name}: {machine.summary}"), soft_wrap=True)
    return found
