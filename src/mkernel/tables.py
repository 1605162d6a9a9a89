"""Tables on a console, as wide as their figures need them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.live import Live
from rich.table import Table


def show(table: Table, console: Console) -> None:
    """Print a table. A console that is too narrow does not cut figures: its lines are longer then."""
    least = console.measure(table).minimum
    console.print(table, width=max(console.width, least), crop=False, soft_wrap=least > console.width)


@contextlib.contextmanager
def growing(table: Table, console: Console) -> Iterator[Callable[[], None]]:
    """Print a table to which rows are added inside. On a terminal each one is seen at once, when the function that this
    gives is called; elsewhere all of them in the end, also if something fails."""
    if not console.is_terminal or console.measure(table).minimum > console.width:
        try:
            yield lambda: None
        finally:
            show(table, console)
        return
    with Live(table, console=console, auto_refresh=False) as live:
        yield live.refresh
