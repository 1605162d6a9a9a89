"""`mkernel check`: run an operator, or a user's function, under many schedules of the simulator."""

from __future__ import annotations

import contextlib
import importlib.util
import shlex
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from mkernel import demo, estimates
from mkernel.operators import Operator, Shape
from mkernel.runtime.errors import ArgumentError, MKernelError
from mkernel.runtime.group import Group
from mkernel.sim.explore import Exploration

INTERRUPTED = 130  # exit code after Ctrl-C, as in a shell


class WrongResult(MKernelError):
    """An operator's result is too far from the float64 reference, or its bits differ between schedules."""


def calls_of(operator: Operator, shape: Shape, calls: int) -> Callable[[Group], None]:
    """What every rank does to check an operator: a number of calls in a row, each with different inputs. Results must
    be right and, since the order of events must not affect them, the same in every run."""
    first: dict[tuple[int, int], torch.Tensor] = {}

    def on_rank(group: Group) -> None:
        cases = [operator.load("demo").on_rank(group, call, shape=shape) for call in range(calls)]
        given = [case.call() for case in cases]
        for call, case in enumerate(cases):
            y = case.result(given[call])
            check = demo.compare(y, *case.exact())
            where = f"{operator.name}, rank {group.rank}, call {call}"
            if not check.ok:
                raise WrongResult(f"{where}: error {check.error:.3g}, {check.share:.3g} times what rounding allows")
            if not torch.equal(y, first.setdefault((group.rank, call), y)):
                raise WrongResult(f"{where}: the result is right, but has other bits than under an earlier schedule")

    return on_rank


def load(path: Path, name: str) -> Callable[..., Any]:
    """Load a function from a Python file."""
    if not path.is_file():
        raise ArgumentError(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(f"checked_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(path.absolute().parent))  # as for a script: modules next to it can be imported
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        found = ", ".join(key for key, value in vars(module).items() if _is_own_function(value, module.__name__))
        raise ArgumentError(f"there is no function {name!r} in {path}; there are: {found or 'none'}")
    return function


def _is_own_function(value: Any, module: str) -> bool:
    return callable(value) and not isinstance(value, type) and getattr(value, "__module__", None) == module


def run(exploration: Exploration, replay: list[str], console: Console) -> int:
    """Run all schedules and print the report. `replay` is the command that runs a single schedule when the schedule's
    name is appended. Returns the exit code."""
    code = 0
    try:
        with _progress(exploration) as advance, _interruptible() as stop_if_interrupted:
            for _ in exploration:
                advance()
                stop_if_interrupted()
    except KeyboardInterrupt:
        console.print("mkernel: interrupted; what was checked so far:", highlight=False)
        code = INTERRUPTED
    except Exception as failure:
        name = exploration.report.failed
        if name is None:  # not a failure of a schedule
            raise
        errors = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
        errors.print(_message_of(failure))
        errors.print(f"mkernel: schedule {name} failed. This runs it alone: {shlex.join([*replay, name])}")
        code = 1
    console.print(str(exploration.report), highlight=False, markup=False, soft_wrap=True)
    return code


def _message_of(failure: Exception) -> str:
    """The message of an error of this package; for any other error, the traceback from the user's function on."""
    if isinstance(failure, MKernelError):
        return "\n".join([str(failure), *getattr(failure, "__notes__", [])])
    inner = failure.__traceback__
    while inner is not None and Path(inner.tb_frame.f_code.co_filename).is_relative_to(Path(__file__).parent):
        inner = inner.tb_next
    return "".join(traceback.format_exception(type(failure), failure, inner or failure.__traceback__)).rstrip()


@contextlib.contextmanager
def _interruptible() -> Iterator[Callable[[], None]]:
    """Inside the block, Ctrl-C raises KeyboardInterrupt as usual. If that gets lost, as in a destructor, the yielded
    function raises it again."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    interrupted = False

    def interrupt(*_: Any) -> None:
        nonlocal interrupted
        interrupted = True
        raise KeyboardInterrupt

    def stop() -> None:
        if interrupted:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _progress(exploration: Exploration) -> Iterator[Callable[[], None]]:
    """Show the progress of an exploration on stderr: a bar on a terminal, otherwise occasional lines."""
    console = Console(stderr=True, highlight=False)
    begun = time.monotonic()
    next_line = estimates.FIRST_LINE
    done = 0

    def advance() -> None:
        nonlocal done, next_line
        done += 1
        total = exploration.planned
        bar.update(task, completed=done, total=total)
        spent = time.monotonic() - begun
        if not console.is_terminal and spent > next_line and done < total:
            next_line = spent * estimates.NEXT_LINE
            left = estimates.text_of(spent / done * (total - done))
            line = f"mkernel: {done} of {total} schedules passed in {estimates.text_of(spent)}, about {left} to go"
            print(line, file=sys.stderr, flush=True)

    columns = (
        TextColumn("schedules"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left:"),
        TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=exploration.planned)
        yield advance
