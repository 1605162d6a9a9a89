"""How tests start several processes, and make sure that they end."""

import atexit
import contextlib
import functools
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from support.patience import HANG

TESTS = Path(__file__).parents[1]
SOURCE = str(TESTS.parent / "src")
AND_TESTS = f"{SOURCE}{os.pathsep}{TESTS}"  # programs of ranks can import support, too
NUMBER = struct.Struct("i")
NOTHING = open(os.devnull, "r+")  # noqa: SIM115  # as long as the tests run


@functools.cache
def _server(number):
    """The socket of a process that forks others (fork_server.py), which ends when this one ends. There are several,
    because all children of one have the same addresses and the same hashes of strings, and ranks that started by
    themselves have not."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, str(TESTS / "support" / "fork_server.py"), str(theirs.fileno())],
            env=dict(os.environ, PYTHONPATH=AND_TESTS, OMP_NUM_THREADS="1", RANK="0", WORLD_SIZE="2"),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
    atexit.register(process.wait)
    atexit.register(ours.close)
    return ours


class Fork:
    """A Python process that has imported torch and mkernel already: it is forked from one that has. To be used as
    subprocess.Popen is, for what does not test how a process starts or what importing does.

    Args:
        arguments: what would follow `python` on a command line: a script, or `-c` and a program; then their arguments.
        server: of which of the two servers it is a child.
    """

    def __init__(self, arguments, env, cwd=None, stdin=NOTHING, stdout=NOTHING, stderr=None, server=0):
        self.args, self.returncode = arguments, None
        self._link, theirs = socket.socketpair()
        handles = [stdin, stdout, stderr or stdout, theirs]
        with theirs:
            socket.send_fds(_server(server % 2), [b"x"], [each.fileno() for each in handles])
        self._link.sendall(json.dumps(dict(arguments=arguments, environment=env, folder=cwd)).encode() + b"\n")
        self.pid = self._told()

    def _told(self):
        told = self._link.recv(NUMBER.size, socket.MSG_WAITALL)
        assert told, "the fork server has ended; stderr says why"
        return NUMBER.unpack(told)[0]

    def poll(self):
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout=None):
        if self.returncode is None:
            if not select.select([self._link], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout)
            self.returncode = self._told()
            self._link.close()
        return self.returncode

    def kill(self):
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


def finish(processes, files, seconds=HANG):
    """Wait until all have ended; what they wrote into their files. They are killed, each with its session, if that
    takes too long."""
    deadline = time.monotonic() + seconds
    late = []
    try:
        for process in processes:
            process.wait(max(deadline - time.monotonic(), 0))
    except subprocess.TimeoutExpired:
        late = [process.poll() is None for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    outputs = []
    for file in files:
        file.seek(0)
        outputs.append(file.read())
        file.close()
    if late:
        pytest.fail(
            "\n".join(
                f"-- process {number}: {f'still running after {seconds:g} s' if is_late else 'ended'}\n{output}"
                for number, (is_late, output) in enumerate(zip(late, outputs))
            )
        )
    return outputs


def _environment(paths, **more):
    return dict(os.environ, PYTHONPATH=paths, OMP_NUM_THREADS="1", **more)


def _file():
    return tempfile.TemporaryFile("w+", errors="backslashreplace")


def run(command, seconds=HANG, expected=0, folder=None, paths=SOURCE):
    """Run a command, in a folder; what it printed. It is ended, with its children, if it takes too long."""
    file = _file()
    process = subprocess.Popen(
        command, cwd=folder, env=_environment(paths), stdout=file, stderr=subprocess.STDOUT, start_new_session=True
    )
    (output,) = finish([process], [file], seconds)
    assert process.returncode == expected, output
    return output


def run_python(arguments, seconds=HANG, expected=0, folder=None, paths=SOURCE):
    """The same for a Python program, in a process that need not import torch and mkernel (`Fork`)."""
    file = _file()
    process = Fork(arguments, _environment(paths), folder, stdout=file)
    (output,) = finish([process], [file], seconds)
    assert process.returncode == expected, output
    return output


def torchrun(script, ranks, seconds=HANG, arguments=()):
    """Run a script on so many ranks; what they printed."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return run([*start, str(script), *arguments], seconds, paths=AND_TESTS)


def run_ranks(program, ranks, seconds=HANG, forked=True, store="rank 0", arguments=()):
    """Processes as torchrun would start them, but nobody ends the others when one dies; outputs and exit codes.

    Args:
        program: its text, or the path of a script.
        forked: from a process that has imported torch and mkernel; otherwise the ranks start by themselves.
        store: where the process group's store is: in rank 0; or "apart", as under torchrun, where it outlives
            all ranks.
        arguments: of the program.
    """
    more, kept = {}, None
    if store == "apart":
        kept = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port, more = kept.port, {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    else:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
    start = [str(program)] if isinstance(program, Path) else ["-c", textwrap.dedent(program)]
    command = [*start, *arguments]
    processes, files = [], []
    for rank in range(ranks):
        environment = _environment(
            AND_TESTS, RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port), **more,
        )  # fmt: skip
        files.append(_file())
        if forked:
            process = Fork(command, environment, stdout=files[-1], server=rank)
        else:
            process = subprocess.Popen(
                [sys.executable, *command],
                env=environment,
                stdout=files[-1],
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        processes.append(process)
    outputs = finish(processes, files, seconds)
    del kept
    return [(output, process.returncode) for output, process in zip(outputs, processes)]
