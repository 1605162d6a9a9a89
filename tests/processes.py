"""How tests start several processes, and make sure that they end."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

SOURCE = str(Path(__file__).parents[1] / "src")


def run(command, seconds=90, expected=0, folder=None):
    """Run a command, in a folder; what it printed. It is ended, with its children, if it takes too long."""
    environment = dict(os.environ, PYTHONPATH=SOURCE, OMP_NUM_THREADS="1")
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        pytest.fail(f"still running after {seconds} s:\n{output}")
    assert process.returncode == expected, output
    return output


def torchrun(script, ranks, seconds=90, arguments=()):
    """Run a script on so many ranks; what they printed."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return run([*start, str(script), *arguments], seconds)


def run_ranks(program, ranks, seconds=80):
    """Processes as torchrun would start them, but nobody ends the others when one dies; outputs and exit codes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = []
    for rank in range(ranks):
        environment = dict(
            os.environ, PYTHONPATH=SOURCE, OMP_NUM_THREADS="1", RANK=str(rank), WORLD_SIZE=str(ranks),
            LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        )  # fmt: skip
        command = [sys.executable, "-c", textwrap.dedent(program)]
        processes.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    try:
        return [(process.communicate(timeout=seconds)[0], process.returncode) for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
