"""What importing mkernel leaves in the environment for CUDA: more queues for ranks that are threads, nobody else."""

import os
import subprocess
import sys

import pytest

NAMES = ("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_MPS_PIPE_DIRECTORY", "RANK", "WORLD_SIZE")


@pytest.fixture
def connections(tmp_path):
    """connections(NAME=value, ...): the hardware queues that a program with these variables asks for."""

    def ask(**variables):
        environment = {name: value for name, value in os.environ.items() if name not in NAMES}
        environment |= {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path), **variables}
        program = "import mkernel, os; print(os.environ.get('CUDA_DEVICE_MAX_CONNECTIONS'))"
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env=environment, check=True
        )
        return done.stdout.strip()

    return ask


def test_ranks_that_are_threads(connections):
    assert connections() == "32"
    assert connections(RANK="0", WORLD_SIZE="1") == "32"


def test_ranks_that_are_processes(connections):
    assert connections(RANK="0", WORLD_SIZE="4") == "None"


def test_under_mps(connections, tmp_path):
    (tmp_path / "control").touch()
    assert connections() == "None"
    assert connections(RANK="0", WORLD_SIZE="4") == "None"


@pytest.mark.parametrize("started", [{}, {"RANK": "0", "WORLD_SIZE": "4"}], ids=["alone", "by torchrun"])
def test_the_users_own(connections, started):
    assert connections(CUDA_DEVICE_MAX_CONNECTIONS="1", **started) == "1"
