"""Clocks that are held while the benchmark measures: with a program in the place of nvidia-smi that writes down what
it is told, and answers as nvidia-smi does."""

import csv
import json
import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from figures import result
from patience import HANG
from typer.testing import CliRunner

from mkernel import bench, cli, operators
from mkernel.bench import clocks, published, shapes
from mkernel.bench.shapes import Wanted

A, B = "GPU-aaaa", "GPU-bbbb"
QUERY = "--query-supported-clocks=graphics"
LISTED = "echo 1980; echo 1215; echo 1200; echo 345"
ASKED_FOR = f"{QUERY} --format=csv,noheader,nounits"
NOT_ALLOWED = "echo 'The current user does not have permission to change clocks for GPU 00000000:07:00.0.'; exit 4"
NOT_SUPPORTED = (
    "echo 'Setting locked GPU clocks is not supported for GPU 00000000:07:00.0.'; "
    "echo 'Treating as warning and moving on.'; echo 'All done.'"
)


class Smi:
    """The program. Lines of shell that it runs are in files with the name of a command, or of a command and a GPU."""

    def __init__(self, folder):
        self.folder = folder
        self._log = folder / "log"
        self._log.touch()
        program = folder / "nvidia-smi"
        program.write_text(f"""#!/bin/sh
cd {folder}
echo "$@" >> log
for lines in "./$3 $2" "./$3"; do
    if [ -e "$lines" ]; then . "$lines"; exit; fi
done
echo "All done."
""")
        program.chmod(0o755)
        self.answer(QUERY, LISTED)

    def answer(self, command, lines, gpu=None):
        (self.folder / (command if gpu is None else f"{command} {gpu}")).write_text(lines)

    def told(self, questions=False):
        """What it was told, in order: "GPU COMMAND"."""
        lines = [line.removeprefix("-i ") for line in self._log.read_text().splitlines()]
        return [line for line in lines if questions or QUERY not in line]


@pytest.fixture
def smi(tmp_path, monkeypatch):
    folder = tmp_path / "programs"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    return Smi(folder)


HELD = [f"{A} -lgc 1200,1200", f"{B} -lgc 1200,1200"]
RESET = [f"{B} -rgc", f"{A} -rgc"]


# -- the clocks


def test_they_are_held_inside_and_reset_afterwards(smi):
    with clocks.held(1200, [A, B]):
        assert smi.told() == HELD
    assert smi.told() == HELD + RESET
    assert smi.told(questions=True)[:2] == [f"{A} {ASKED_FOR}", f"{A} -lgc 1200,1200"]


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_they_are_reset_after_an_exception(smi, kind):
    with pytest.raises(kind), clocks.held(1200, [A, B]):
        raise kind
    assert smi.told() == HELD + RESET


def test_the_first_is_reset_if_the_second_can_not_be_held(smi):
    smi.answer("-lgc", NOT_ALLOWED, B)
    with pytest.raises(clocks.ClockError), clocks.held(1200, [A, B]):
        pytest.fail("nothing is measured")
    assert smi.told() == [*HELD, f"{A} -rgc"]


@pytest.fixture
def impatient(monkeypatch, smi):
    """A second is enough, from when a command has begun not to answer. Others may take as long as they need."""
    begun = smi.folder / "begun"

    class Process(subprocess.Popen):
        def communicate(self, input=None, timeout=None):
            assert timeout in (None, clocks.SECONDS)
            while self.poll() is None and not begun.exists():
                time.sleep(0.01)
            silent = begun.exists()
            begun.unlink(missing_ok=True)
            return super().communicate(input, timeout if silent else HANG)

    monkeypatch.setattr(clocks, "SECONDS", 1)
    monkeypatch.setattr(subprocess, "Popen", Process)


@pytest.mark.usefixtures("impatient")
def test_no_answer(smi):
    """Whether it is held then is not known: it is reset."""
    smi.answer("-lgc", f"touch begun; exec sleep {2 * HANG}")
    begun = time.monotonic()
    words = f"no answer within 1 s from: nvidia-smi -i {A} -lgc 1200,1200"
    with pytest.raises(clocks.ClockError, match=words), clocks.held(1200, [A]):
        pytest.fail("nothing is measured")
    assert time.monotonic() - begun < HANG
    assert smi.told() == [HELD[0], f"{A} -rgc"]


def test_a_reset_that_fails_hides_nothing(smi, capsys):
    smi.answer("-rgc", "echo 'Unable to reset: Unknown Error'; exit 255", B)
    with pytest.raises(ZeroDivisionError), clocks.held(1200, [A, B]):
        raise ZeroDivisionError
    assert smi.told() == HELD + RESET  # the other one is reset nevertheless
    said = capsys.readouterr().err
    assert f"WARNING: the clock of {B} is STILL HELD at 1200 MHz" in said
    assert "nvidia-smi says: Unable to reset: Unknown Error" in said
    assert f"run this as root: nvidia-smi -i {B} -rgc" in said
    assert A not in said


@pytest.mark.usefixtures("impatient")
def test_a_reset_without_an_answer(smi, capsys):
    smi.answer("-rgc", f"touch begun; exec sleep {2 * HANG}")
    with clocks.held(1200, [A]):
        pass
    said = capsys.readouterr().err
    assert "STILL HELD" in said
    assert "no answer within 1 s" in said


def test_signals_are_as_before_afterwards(smi):
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    with clocks.held(1200, [A]):
        assert [signal.getsignal(number) for number in numbers] != before
    assert [signal.getsignal(number) for number in numbers] == before


def test_a_signal_that_is_ignored_stays_so(smi):
    """As SIGHUP is under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with clocks.held(1200, [A]):
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


# -- the command


@pytest.fixture
def gpus(monkeypatch):
    """Two GPUs that give figures from nowhere."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200")
    uuids = [A.removeprefix("GPU-"), B.removeprefix("GPU-")]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=uuids[index]))
    monkeypatch.setattr(bench, "run", lambda op, wanted, **_: [result(op, wanted[0])])


def command(*arguments):
    done = CliRunner().invoke(cli.main, ["bench", "all_gather_matmul", "--shape", "64x64x64", *arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done


def test_the_gpus_of_the_ranks_are_held(smi, gpus, monkeypatch):
    told = []

    def run(op, wanted, **options):
        told.append(smi.told())
        return [result(op, wanted[0])]

    monkeypatch.setattr(bench, "run", run)
    done = command("--clock", "1200")
    assert done.exit_code == 0
    assert told == [HELD]
    assert smi.told() == HELD + RESET
    command("--clock", "1200", "--ranks", "1")
    assert smi.told()[4:] == [f"{A} -lgc 1200,1200", f"{A} -rgc"]


def test_without_the_option_nothing_is_held(smi, gpus):
    done = command()
    assert done.exit_code == 0
    assert "MHz" not in done.output
    assert smi.told(questions=True) == []


def test_a_failure_of_the_benchmark_is_reset_and_shown(smi, gpus, monkeypatch):
    def run(*_, **__):
        raise ValueError("of the benchmark")

    monkeypatch.setattr(bench, "run", run)
    with pytest.raises(ValueError, match="of the benchmark"):
        command("--clock", "1200")
    assert smi.told() == HELD + RESET


def test_a_reset_that_fails_leaves_the_exit_code(smi, gpus):
    smi.answer("-rgc", NOT_ALLOWED)
    done = command("--clock", "1200")
    assert done.exit_code == 0
    assert f"nvidia-smi -i {A} -rgc" in done.stderr
    assert "4.200" in done.stdout


@pytest.mark.parametrize(
    ("lgc", "listed", "clock", "words"),
    [
        (NOT_ALLOWED, LISTED, "1200", ["needs root", "or without --clock", "says: The current user does not have"]),
        (NOT_SUPPORTED, "echo '[N/A]'", "1200", [A, "says: Setting locked GPU clocks is not supported for GPU 0"]),
        ("echo 'Out of range' >&2; exit 2", "exit 6", "9999", [f"of {A} can not be held", "says: Out of range"]),
        ("exit 9", "", "1200", ["says: nothing, with exit code 9"]),
        ("", LISTED, "1203", [f"{A} does not have this clock", "from 345 to 1980 MHz", "--clock 1200 is the nearest"]),
    ],
    ids=["permission", "no locks", "other", "silent", "between two"],
)
def test_clocks_that_can_not_be_held(smi, gpus, lgc, listed, clock, words):
    smi.answer("-lgc", lgc)
    smi.answer(QUERY, listed)
    done = command("--clock", clock)
    assert done.exit_code == 2
    assert f"mkernel bench: --clock {clock}: " in done.output
    for some in words:
        assert some in done.output
    assert "times in ms" not in done.output  # nothing was measured
    assert not any("-rgc" in line for line in smi.told())


def test_no_nvidia_smi(gpus, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    done = command("--clock", "1200")
    assert done.exit_code == 2
    assert "--clock 1200: nvidia-smi, which holds clocks, is not on the PATH" in done.output


def test_no_gpu(smi, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = command("--clock", "1200")
    assert done.exit_code == 1
    assert "needs a GPU" in done.output
    assert smi.told(questions=True) == []


# -- the reports


@pytest.mark.parametrize("clock", [1200, None])
def test_reports_say_it(smi, gpus, tmp_path, clock):
    files = {kind: tmp_path / f"figures.{kind}" for kind in ("json", "csv", "html")}
    options = ["--clock", str(clock)] if clock else []
    done = command(*options, *(text for kind, path in files.items() for text in (f"--{kind}", str(path))))
    assert done.exit_code == 0
    header, line = done.output.split("\nall_gather_matmul\n")
    assert ("SM clocks held at 1200 MHz\n" in header) == (clock is not None)
    assert ("emulated at 1200 MHz\n" in line) == (clock is not None)
    assert [one["clock_mhz"] for one in json.loads(files["json"].read_text())["results"]] == [clock]
    with open(files["csv"], newline="") as file:
        assert [row["clock_mhz"] for row in csv.DictReader(file)] == [str(clock or "")]
    page = files["html"].read_text()
    assert ("SM clocks held at 1200 MHz" in page) == (clock is not None)
    assert ("1x4 ranks, emulated at 1200 MHz" in page) == (clock is not None)


def test_a_measurement_that_failed_says_it_too(gpus, smi, monkeypatch, tmp_path):
    def run(*_, **__):
        raise torch.OutOfMemoryError("too large")

    monkeypatch.setattr(bench, "run", run)
    path = tmp_path / "figures.json"
    wanted = [Wanted("all_gather_matmul", (64, 64, 64))]
    how = dict(ranks=4, nodes=1, dtype="bf16", link=None, network=None)
    assert bench.main(wanted, **how, clock=1200, json_path=path) == 1
    assert json.loads(path.read_text())["results"] == [
        {"op": "all_gather_matmul", "failed": "too large", "shape": [64, 64, 64], "clock_mhz": 1200}
    ]


def test_published_figures_have_no_floor_at_another_clock(smi, gpus, tmp_path):
    """It takes the library's time in this run."""
    wanted = shapes.choose([operators.ALL[0]], "paper", 4)[-1:]
    path = tmp_path / "figures.json"
    bench.main(wanted, ranks=4, nodes=1, dtype="bf16", link=None, network=None, clock=1200, json_path=path)
    (found,) = json.loads(path.read_text())["results"]
    assert found["published_ms"] == 9.772
    assert found["published_floor_fraction"] is None
    assert found["published_note"] == "no floor: it needs the library's time at free clocks, this is one at 1200 MHz"
    free = published.beside("all_gather_matmul", wanted[0].row, result(clock_mhz=None), "NVIDIA H200")
    assert free["published_floor_fraction"] is not None


# -- signals, to the command in a process of its own

MEASURING = """
import signal, sys, threading
signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever these tests were started with, nohup or &
signal.signal(signal.SIGHUP, signal.SIG_DFL)
from types import SimpleNamespace
import torch
from mkernel import bench, cli

def run(*_, **__):
    thread = threading.Thread(target=threading.Event().wait, daemon=sys.argv[1] == "daemon")
    thread.start()
    print("measuring", flush=True)
    thread.join()

bench.run = run
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 2
uuids = ["aaaa", "bbbb"]
torch.cuda.get_device_properties = lambda index: SimpleNamespace(uuid=uuids[index])
cli.main(["bench", "all_gather_matmul", "--shape", "64x64x64", "--clock", "1200"])
"""


class Measuring:
    """The command, in a session of its own: what is sent to it reaches the programs that it started, too, as Ctrl-C
    does in a terminal."""

    def __init__(self, threads):
        self.process = subprocess.Popen(
            [sys.executable, "-c", MEASURING, threads],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._limit = threading.Timer(HANG, self.process.kill)  # a wait for a line is over then, too
        self._limit.start()

    def wait_for_line(self, wanted):
        for line in self.process.stdout:
            if line.strip() == wanted:
                return
        pytest.fail(f"it ended: {self.process.communicate()[1]}")

    def wait_for_file(self, path):
        while not path.exists():
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.02)

    def send(self, number):
        os.killpg(self.process.pid, number)

    def end(self):
        """Its exit code."""
        self.process.communicate()
        self._limit.cancel()
        return self.process.returncode


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_end(smi, number):
    """It ends by the signal, as it would have, and does not wait for its ranks."""
    measuring = Measuring("threads that it would wait for")
    measuring.wait_for_line("measuring")
    measuring.send(number)
    assert measuring.end() == -number
    assert smi.told() == HELD + RESET


def test_ctrl_c_and_impatience(smi):
    """What comes while the clocks are reset changes nothing."""
    smi.answer("-rgc", "touch begun; until [ -e go ]; do sleep 0.02; done; echo $2 is free >> log")
    measuring = Measuring("daemon")
    measuring.wait_for_line("measuring")
    measuring.send(signal.SIGINT)
    measuring.wait_for_file(smi.folder / "begun")
    measuring.send(signal.SIGINT)
    measuring.send(signal.SIGTERM)
    (smi.folder / "go").touch()
    assert measuring.end() in (1, 130)  # as typer's version has it
    assert smi.told() == [*HELD, f"{B} -rgc", f"{B} is free", f"{A} -rgc", f"{A} is free"]


def test_a_signal_while_the_second_is_being_held(smi):
    smi.answer("-lgc", f"touch begun; exec sleep {2 * HANG}", B)
    measuring = Measuring("daemon")
    measuring.wait_for_file(smi.folder / "begun")
    measuring.send(signal.SIGTERM)
    assert measuring.end() == -signal.SIGTERM
    assert smi.told() == HELD + RESET
