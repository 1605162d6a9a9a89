"""NVIDIA's MPS, for as long as a measurement takes. With it, the kernels of several processes run on one GPU at the
same time; without it, they take turns.

The daemon has a folder of its own, by which only processes that are given its variables find it, so it does not matter
whether another one runs. It starts a server when the first process uses the GPU. Both have ended, and the folder is
gone, when the measurement is over: a process that starts while a server is ending may be told that there is no memory.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch.multiprocessing as multiprocessing

from mkernel.runtime.errors import MKernelError

PROGRAM = "nvidia-cuda-mps-control"
START_SECONDS = 20.0
STOP_SECONDS = 30.0
POLL_SECONDS = 0.05


def refusal() -> str | None:
    """Why there is no MPS; None if there is."""
    return None if shutil.which(PROGRAM) else f"there is no {PROGRAM} here, which comes with NVIDIA's driver"


@contextlib.contextmanager
def running() -> Iterator[dict[str, str]]:
    """Run a daemon. Yields the environment variables by which processes find it."""
    if (refused := refusal()) is not None:
        raise MKernelError(f"MPS cannot be started: {refused}")
    folder = Path(tempfile.mkdtemp(prefix="mkernel-mps-"))
    variables = {"CUDA_MPS_PIPE_DIRECTORY": str(folder), "CUDA_MPS_LOG_DIRECTORY": str(folder)}
    log = folder / "said"
    try:
        with open(log, "wb") as file:
            daemon = subprocess.Popen(
                [PROGRAM, "-f"], env=os.environ | variables, stdin=subprocess.DEVNULL, stdout=file,
                stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=_end_with_parent,
            )  # fmt: skip
        try:
            if not _poll(lambda: daemon.poll() is not None or _tell("get_server_list", variables), START_SECONDS):
                raise MKernelError(f"MPS did not start within {START_SECONDS:g} s: {_end_of(log)}")
            if daemon.poll() is not None:
                raise MKernelError(f"MPS has ended with code {daemon.returncode}: {_end_of(log)}")
            yield variables
        finally:
            _stop(daemon, variables)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _end_with_parent() -> None:
    multiprocessing._prctl_pr_set_pdeathsig(signal.SIGTERM)  # type: ignore[attr-defined]


def _tell(command: str, variables: Mapping[str, str]) -> bool:
    """Give the daemon a command. Returns whether it took it."""
    try:
        done = subprocess.run(
            [PROGRAM], env=os.environ | variables, input=f"{command}\n", text=True, capture_output=True, timeout=10
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def _stop(daemon: subprocess.Popen[bytes], variables: Mapping[str, str]) -> None:
    """End the daemon and its servers, and wait until they are gone."""
    servers = children_of(daemon.pid)
    if daemon.poll() is None:
        _tell("quit", variables)
    for end in (lambda: None, daemon.terminate, daemon.kill):  # the last two only if it does not end by itself
        end()
        with contextlib.suppress(subprocess.TimeoutExpired):
            daemon.wait(STOP_SECONDS)
            break
    if not _poll(lambda: not any(map(_is_running, servers)), STOP_SECONDS):
        for server in filter(_is_running, servers):
            with contextlib.suppress(ProcessLookupError):
                os.kill(server, signal.SIGKILL)
        _poll(lambda: not any(map(_is_running, servers)), STOP_SECONDS)


def children_of(process: int) -> list[int]:
    """The processes that a process has started, and that still run."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                after_name = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(after_name[1]) == process:
                    found.append(int(entry.name))
    return found


def _is_running(process: int) -> bool:
    """Does a process still run? One that has ended, but that nobody has waited for, does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _poll(done: Callable[[], object], seconds: float) -> bool:
    """Poll until it is true, for at most this many seconds. Returns whether it was."""
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True


def _end_of(log: Path) -> str:
    lines: Sequence[str] = log.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"
