"""Tables on a console, as wide as their figures need them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.live import Live
from rich.measure import Measurement
from rich.table import Table

WIDEST = 10_000  # columns


def show(table: Table, console: Console) -> None:
    """Print a table. A console that is too narrow does not cut figures: its lines are longer then."""
    narrow, console.width = console.width, max(console.width, _width(table, console))
    console.print(table)
    console.width = narrow


def _width(table: Table, console: Console) -> int:
    """Columns that a table takes if nothing in it is cut or wrapped."""
    return Measurement.get(console, console.options.update(max_width=WIDEST), table).maximum


@contextlib.contextmanager
def growing(table: Table, console: Console) -> Iterator[Callable[[], None]]:
    """Print a table to which rows are added inside. On a terminal each one is seen at once, when the function that this
    gives is called; elsewhere all of them in the end, also if something fails."""
    if not console.is_terminal or _width(table, console) > console.width:
        try:
            yield lambda: None
        finally:
            show(table, console)
        return
    with Live(table, console=console, auto_refresh=False) as live:
        yield live.refresh
