"""What the tests on a GPU share: inputs, checks, and an end to everything that could hang."""

import contextlib
import faulthandler
import fcntl
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parent
SOURCE = str(TESTS.parents[1] / "src")
LOCK = "MKERNEL_TEST_LOCK"  # an environment variable that names a file: those who measure take turns


def bound(k, dtype):
    # fp32 sums are rounded at every term: one more term for it, none for the others
    rounding = 4 * k * torch.finfo(dtype).eps if dtype == torch.float32 else 0.0
    return 4 * k**0.5 * torch.finfo(dtype).eps + rounding


def randn(group, *shape, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator(group.device).manual_seed(1000 * seed + group.rank)
    return torch.randn(*shape, device=group.device, dtype=torch.float32, generator=generator).to(dtype)


def everyones(group, a):
    """All ranks' rows; between threads of one process."""
    torch.cuda.current_stream().synchronize()
    return torch.cat([part.double() for part in group.exchange("a", a)])


def check(group, y, a, b):
    exact = everyones(group, a) @ b.double()
    group.synchronize()
    error = (y.double() - exact).abs().max().item() if y.numel() else 0.0
    assert error <= bound(a.shape[1], a.dtype), f"rank {group.rank}: error {error}"


@contextlib.contextmanager
def alone():
    """No other test run with the same lock file measures meanwhile; without a lock file nobody waits."""
    name = os.environ.get(LOCK)
    if name is None:
        yield
        return
    with open(name, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.fixture
def limited():
    """Ends the whole test run, with everybody's stack, if a test hangs: a kernel cannot be interrupted."""
    faulthandler.dump_traceback_later(120, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


def in_process(program, seconds=90):
    """Run a program that may hang in a process of its own; what it printed."""
    preamble = f"import sys\nsys.path[:0] = [{SOURCE!r}, {str(TESTS)!r}]\n"
    try:
        done = subprocess.run(
            [sys.executable, "-c", preamble + textwrap.dedent(program)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=seconds,
        )  # fmt: skip
    except subprocess.TimeoutExpired as late:
        pytest.fail(f"still running after {seconds} s:\n{late.stdout}")
    assert done.returncode == 0, done.stdout
    return done.stdout
