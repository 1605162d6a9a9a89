"""How tests start several processes, and make sure that they end."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor, TimeoutError
from pathlib import Path

import pytest
from patience import HANG

TESTS = Path(__file__).parent
SOURCE = str(TESTS.parent / "src")
AND_TESTS = f"{SOURCE}{os.pathsep}{TESTS}"  # programs of ranks can import patience, too


def run(command, seconds=HANG, expected=0, folder=None, paths=SOURCE):
    """Run a command, in a folder; what it printed. It is ended, with its children, if it takes too long."""
    environment = dict(os.environ, PYTHONPATH=paths, OMP_NUM_THREADS="1")
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
        pytest.fail(f"still running after {seconds:g} s:\n{output}")
    assert process.returncode == expected, output
    return output


def torchrun(script, ranks, seconds=HANG, arguments=()):
    """Run a script on so many ranks; what they printed."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return run([*start, str(script), *arguments], seconds, paths=AND_TESTS)


def run_ranks(program, ranks, seconds=HANG):
    """Processes as torchrun would start them, but nobody ends the others when one dies; outputs and exit codes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = []
    for rank in range(ranks):
        environment = dict(
            os.environ, PYTHONPATH=AND_TESTS, OMP_NUM_THREADS="1", RANK=str(rank), WORLD_SIZE=str(ranks),
            LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        )  # fmt: skip
        command = [sys.executable, "-c", textwrap.dedent(program)]
        processes.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    outputs = []
    with ThreadPoolExecutor(ranks) as readers:
        reading = [readers.submit(process.communicate) for process in processes]
        try:
            deadline = time.monotonic() + seconds
            for future in reading:
                future.result(timeout=max(deadline - time.monotonic(), 0))
        except TimeoutError:
            outputs = [f"still running after {seconds:g} s\n" if p.poll() is None else "" for p in processes]
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
        said = [future.result()[0] for future in reading]
    if outputs:
        pytest.fail("\n".join(f"-- rank {rank}: {late}{said[rank]}" for rank, late in enumerate(outputs)))
    return [(output, process.returncode) for output, process in zip(said, processes)]
