"""Console tables that are never truncated."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.live import Live
from rich.measure import Measurement
from rich.table import Table

WIDEST = 10_000  # columns


def show(table: Table, console: Console) -> None:
    """Print a table. If the console is too narrow, lines exceed its width; nothing is cut off."""
    width, console.width = console.width, max(console.width, _width(table, console))
    console.print(table)
    console.width = width


def _width(table: Table, console: Console) -> int:
    """The width of a table in which nothing is cut off or wrapped."""
    return Measurement.get(console, console.options.update(max_width=WIDEST), table).maximum


@contextlib.contextmanager
def growing(table: Table, console: Console) -> Iterator[Callable[[], None]]:
    """Print a table to which the block adds rows. On a terminal, calling the yielded function shows new rows at once;
    elsewhere, the table is printed at the end, even if the block raises."""
    if not console.is_terminal or _width(table, console) > console.width:
        try:
            yield lambda: None
        finally:
            show(table, console)
        return
    with Live(table, console=console, auto_refresh=False) as live:
        yield live.refresh
