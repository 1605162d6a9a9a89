"""A line on the terminal for simulations that take long."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkernel.sim.launches import Execution

FIRST_SECONDS = 5.0  # before a line appears
NEXT_SECONDS = 0.5  # until it changes
STEPS = 256  # between two reads of the clock


class Line:
    """How far a simulation is. Shown on a terminal only, unless a command shows progress of its own."""

    def __init__(self, execution: Execution):
        self._execution = execution
        self._stream = sys.stderr
        self._terminal = self._stream.isatty()
        self._begun = time.monotonic()
        self._next = self._begun + FIRST_SECONDS
        self._steps = 0
        self._shown = False

    def step(self) -> None:
        self._steps += 1
        if self._terminal and self._steps % STEPS == 0 and time.monotonic() > self._next:
            self._show()

    def _show(self) -> None:
        execution = self._execution
        if execution.simulator.traffic.on_progress is not None:
            return
        self._next = time.monotonic() + NEXT_SECONDS
        self._shown = True
        seconds = int(time.monotonic() - self._begun)
        running = sorted({launch.op for queue in execution.queues.values() for launch in queue})
        what = f"in {', '.join(running)}" if running else "between launches"
        text = f"mkernel simulator: {seconds // 60}:{seconds % 60:02}, {execution.launches_done} launches done, {what}"
        self._stream.write(f"\r{text}\033[K")
        self._stream.flush()

    def end(self) -> None:
        if self._shown:
            self._stream.write("\r\033[K")
            self._stream.flush()
