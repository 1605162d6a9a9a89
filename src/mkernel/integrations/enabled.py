"""What an integration's `enable` returns."""

from __future__ import annotations

from collections.abc import Callable


class Enabled:
    """A context manager at whose end PyTorch's implementations are back, if they were there at its start.

    restore: puts them back; None if they were not there.
    """

    def __init__(self, restore: Callable[[], None] | None):
        self._restore = restore

    def __enter__(self) -> Enabled:
        return self

    def __exit__(self, *raised: object) -> None:
        if self._restore is not None:
            self._restore()
