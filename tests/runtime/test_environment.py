"""What importing mkernel leaves in the environment for CUDA: more queues for ranks that are threads, nobody else. The
module that does it needs nothing else, and is run alone; the last test imports the package."""

import os
import subprocess
import sys

import pytest
from support.patience import HANG

import mkernel.environment

NAMES = ("CUDA_DEVICE_MAX_CONNECTIONS", "MKERNEL_CHOSE_CONNECTIONS", "RANK", "WORLD_SIZE")


def connections(**variables):
    """The hardware queues that a program with these variables asks for."""
    environment = {name: value for name, value in os.environ.items() if name not in NAMES} | variables
    program = "import os, runpy, sys; runpy.run_path(sys.argv[1]); print(os.environ.get('CUDA_DEVICE_MAX_CONNECTIONS'))"
    command = [sys.executable, "-c", program, mkernel.environment.__file__]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG, env=environment, check=True)
    return done.stdout.strip()


def test_ranks_that_are_threads():
    assert connections() == "32"
    assert connections(RANK="0", WORLD_SIZE="1") == "32"


def test_ranks_that_are_processes():
    assert connections(RANK="0", WORLD_SIZE="4") == "None"


@pytest.mark.parametrize("started", [{}, {"RANK": "0", "WORLD_SIZE": "4"}], ids=["alone", "by torchrun"])
def test_the_users_own(started):
    assert connections(CUDA_DEVICE_MAX_CONNECTIONS="1", **started) == "1"


def test_what_a_program_that_starts_torchrun_hands_down():
    program = (
        "import mkernel, os, subprocess, sys; assert os.environ['CUDA_DEVICE_MAX_CONNECTIONS'] == '32';"
        "child = 'import mkernel, os; print(os.environ.get(\"CUDA_DEVICE_MAX_CONNECTIONS\"))';"
        "subprocess.run([sys.executable, '-c', child], env=dict(os.environ, RANK='0', WORLD_SIZE='4'), check=True)"
    )
    environment = {name: value for name, value in os.environ.items() if name not in NAMES}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=HANG, env=environment
    )
    assert done.stdout.strip() == "None", done.stderr
