"""Ctrl-C while CTAs run in this process.

Python raises KeyboardInterrupt wherever it happens to be. Inside a destructor or a weakref callback, of which the
simulated memory has many, the exception is printed and dropped, and the rank continues. So while a launch runs, Ctrl-C
is only recorded, and raised between two steps of the scheduler.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType


@contextlib.contextmanager
def deferred() -> Iterator[Callable[[], None]]:
    """Defer Ctrl-C. The function that this yields raises KeyboardInterrupt if there was one. A handler that the user
    has installed is left alone."""
    plain = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not plain or threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    came = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal came
        came = True

    def check() -> None:
        if came:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, note)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if came:
            raise KeyboardInterrupt
