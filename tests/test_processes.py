"""Forked processes end as those that start by themselves, and the ranks of a job differ as such do."""

import os
import signal
import subprocess
import sys

import pytest
from support.forked_processes import SOURCE, Fork, run, run_python, run_ranks
from support.patience import HANG

ENDS = {
    "well": "",
    "with a number": "import sys; sys.exit(7)",
    "with words": "import sys; sys.exit('these words')",
    "with an exception": "def f():\n    raise ValueError('a bug')\nf()",
    "at once": "import os; os._exit(3)",
    "killed": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "interrupted": "import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(600)",
    "with handlers": "import atexit; atexit.register(print, 'at exit'); print('before', flush=True)",
    "with a thread": "import threading; threading.Timer(0.1, print, ['thread']).start()",
    "in another Python": "import os, sys; os.execv(sys.executable, [sys.executable, '-c', 'print(1)'])",
    "forked": "import os; print(os.waitpid(os.fork() or os._exit(5), 0)[1])",
}


@pytest.mark.parametrize("how", ENDS)
def test_ends_as_any_other(how, tmp_path):
    path = tmp_path / "program.py"
    path.write_text(ENDS[how] + "\n")
    real = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=HANG)
    assert run_python([str(path)], expected=real.returncode) == real.stdout + real.stderr


PROGRAM = """
import __main__, os, sys
import mkernel
print(__name__, __main__.__dict__ is globals(), globals().get("__file__"), sys.argv[1:], os.getcwd(), sys.stdin.read())
print(os.environ.get("GIVEN"), os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS"), sys.path)
print(len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), os.getsid(0) == os.getpid())
import helper
"""


@pytest.mark.parametrize(("as_script", "size"), [(True, "1"), (False, "4")])
def test_starts_as_any_other(as_script, size, tmp_path, monkeypatch):
    (tmp_path / "helper.py").write_text("print('helped')\n")
    (tmp_path / "program.py").write_text(PROGRAM)
    monkeypatch.setenv("GIVEN", "a value")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", size)  # mkernel looks at it when it is imported
    arguments = [*([str(tmp_path / "program.py")] if as_script else ["-c", PROGRAM]), "an argument"]
    assert run_python(arguments, folder=str(tmp_path)) == run([sys.executable, *arguments], folder=tmp_path)


def test_ranks_have_their_own_addresses_and_hashes():
    """What is right only where they are the same must show."""
    ranks = [output for output, _ in run_ranks("print(id(object()), hash('words'))", 2)]
    assert not set(ranks[0].split()) & set(ranks[1].split())


def test_nothing_runs_in_what_they_are_forked_from():
    program = "import os, torch; print(len(os.listdir('/proc/self/task')), torch.distributed.is_initialized())"
    assert run_python(["-c", program]) == "1 False\n"


def test_a_process_can_be_killed_with_its_children():
    reader, writer = os.pipe()
    program = "import os, time; os.fork(); os.write(1, b'x'); time.sleep(6000)"
    with open(reader) as output:
        with open(writer, "w") as stdout:
            process = Fork(["-c", program], dict(os.environ, PYTHONPATH=SOURCE), stdout=stdout)
        assert output.read(2) == "xx"
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0)
        os.killpg(process.pid, signal.SIGKILL)
        assert process.wait(HANG) == -signal.SIGKILL
        assert output.read() == "", "both have ended"


@pytest.mark.thorough
def test_a_server_that_ends_takes_its_children_with_it():
    program = """
import os, sys
sys.path.insert(0, {tests!r})
from support.forked_processes import Fork
Fork(["-c", "import os, time; os.write(1, b'x'); time.sleep(6000)"], dict(os.environ), stdout=sys.stdout)
os.read(0, 1)
os._exit(0)
"""
    tests = os.path.dirname(__file__)
    environment = dict(os.environ, PYTHONPATH=SOURCE)
    command = [sys.executable, "-c", program.format(tests=tests)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
    assert process.stdout.read(1) == b"x"
    process.stdin.close()
    assert process.stdout.read() == b"", "the child, which has it open too, has ended"
    assert process.wait(HANG) == 0
    process.stdout.close()
