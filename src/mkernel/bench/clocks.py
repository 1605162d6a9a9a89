"""The SM clocks of GPUs, held at one rate while something is measured: `mkernel bench --clock`.

Ranks that share a GPU share its power. A kernel that keeps all SMs busy is clocked down, one that leaves some of them
idle is not; with a GPU for each rank neither would be. At a clock that the power suffices for, figures of the two can
be compared.

nvidia-smi holds them (`-lgc`), for root only, and they stay held when this process is gone: so they are reset (`-rgc`)
whatever ends the measurement, but for SIGKILL. After the reset they are free, also if somebody held them before: the
driver does not tell.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch

from mkernel.runtime.errors import MKernelError

SECONDS = 20.0  # that nvidia-smi may take for one command
NO_PERMISSION = 4  # its exit code
SKIPPED = "Treating as warning and moving on"  # what it says, with exit code 0, when it has done nothing
ENDING = (signal.SIGTERM, signal.SIGHUP)  # end a process without a word to its `finally` clauses, unless handled


class ClockError(MKernelError):
    """The clocks can not be held; those that already were have been reset."""


def gpus(ranks: int) -> list[str]:
    """The GPUs that this many ranks use, by names that nvidia-smi knows: its numbers are not those of torch, which
    count what CUDA_VISIBLE_DEVICES names."""
    used = range(min(ranks, torch.cuda.device_count()))
    properties: list[Any] = [torch.cuda.get_device_properties(index) for index in used]
    return [f"GPU-{one.uuid}" for one in properties]


@contextlib.contextmanager
def held(mhz: int, gpus: Sequence[str]) -> Iterator[None]:
    """The SM clocks of these GPUs are `mhz` inside, and free afterwards: also after an exception, Ctrl-C, SIGTERM and
    SIGHUP. A reset that fails is a warning on stderr; it hides neither a result nor an exception."""
    if shutil.which("nvidia-smi") is None:
        raise ClockError("nvidia-smi, which holds clocks, is not on the PATH; it comes with the driver")
    touched: list[str] = []
    with _ending_signals_unwind():
        try:
            for gpu in gpus:
                _check_supported(gpu, mhz)
                touched.append(gpu)  # from here on it may be held, whatever comes between
                answer = _ask(gpu, "-lgc", f"{mhz},{mhz}")
                if not answer.done:
                    touched.remove(gpu)  # nothing was changed
                    raise ClockError(_why_not(gpu, answer))
            yield
        finally:
            with _undisturbed():
                for gpu in reversed(touched):
                    _reset(gpu, mhz)


def mark(result: dict[str, Any]) -> str:
    """What a figure is marked with, wherever it is shown, if clocks were held."""
    return f" at {result['clock_mhz']} MHz" if result.get("clock_mhz") is not None else ""


# -- nvidia-smi


@dataclass(frozen=True)
class Answer:
    """Of nvidia-smi."""

    code: int
    text: str

    @property
    def done(self) -> bool:
        return self.code == 0 and SKIPPED not in self.text

    @property
    def words(self) -> str:
        """Its own, in one line."""
        return " ".join(self.text.split()) or f"nothing, with exit code {self.code}"


def _ask(gpu: str, *arguments: str) -> Answer:
    command = ["nvidia-smi", "-i", gpu, *arguments]
    try:
        ended = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired as silence:
        raise ClockError(f"no answer within {SECONDS:g} s from: {' '.join(command)}") from silence
    except OSError as problem:
        raise ClockError(f"nvidia-smi can not be started: {problem}") from problem
    return Answer(ended.returncode, ended.stdout + ended.stderr)


def _check_supported(gpu: str, mhz: int) -> None:
    """nvidia-smi takes a clock between two that a GPU has, and holds another one. Where there is no list of clocks, it
    is left to `-lgc` to refuse."""
    answer = _ask(gpu, "--query-supported-clocks=graphics", "--format=csv,noheader,nounits")
    clocks = sorted({int(line) for line in answer.text.split("\n") if line.strip().isdecimal()})
    if clocks and mhz not in clocks:
        nearest = min(clocks, key=lambda clock: abs(clock - mhz))
        raise ClockError(
            f"{gpu} does not have this clock; nvidia-smi lists {len(clocks)} from {clocks[0]} to {clocks[-1]} MHz, "
            f"--clock {nearest} is the nearest"
        )


def _why_not(gpu: str, answer: Answer) -> str:
    if answer.code == NO_PERMISSION or "permission" in answer.words.lower():
        what_to_do = "this needs root (in a container, with CAP_SYS_ADMIN); run it as root, or without --clock"
    else:
        what_to_do = f"the clock of {gpu} can not be held; without --clock it is free"
    return f"{what_to_do}. nvidia-smi says: {answer.words}"


def _reset(gpu: str, mhz: int) -> None:
    """Never raises: what was measured, or what went wrong before, matters more."""
    try:
        answer = _ask(gpu, "-rgc")
        problem = "" if answer.done else f"nvidia-smi says: {answer.words}"
    except ClockError as silence:
        problem = str(silence)
    if problem:
        print(
            f"mkernel: WARNING: the clock of {gpu} is STILL HELD at {mhz} MHz: it could not be reset. {problem}\n"
            f"mkernel: WARNING: run this as root: nvidia-smi -i {gpu} -rgc",
            file=sys.stderr,
            flush=True,
        )


# -- signals


class _Ended(BaseException):
    """This signal came, and ends the process when everything on the way out is done."""

    def __init__(self, number: int):
        super().__init__(number)
        self.number = number


@contextlib.contextmanager
def _ending_signals_unwind() -> Iterator[None]:
    """Signals that would end this process at once end it when what is inside has cleaned up. Those that somebody
    handles or ignores (nohup) are left alone; Ctrl-C is an exception anyway."""

    def unwind(number: int, frame: FrameType | None) -> None:
        raise _Ended(number)

    taken = [number for number in ENDING if signal.getsignal(number) is signal.SIG_DFL]
    for number in taken:
        signal.signal(number, unwind)
    try:
        yield
    except _Ended as ended:
        signal.signal(ended.number, signal.SIG_DFL)
        os.kill(os.getpid(), ended.number)  # as it would have: it does not wait for the threads of ranks
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """No signal to end gets at what is inside, nor at the programs that it starts: it is bounded by itself."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, *ENDING)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
