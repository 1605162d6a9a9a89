"""Processes that share a GPU, without a GPU: the real code over gloo, and a stand-in for the MPS daemon."""

import os
import subprocess
import sys

import pytest
import torch
from support import gloo_ranks
from support.patience import HANG
from typer.testing import CliRunner

import mkernel as mk
from mkernel.bench import mps, peers, shared_gpu

DAEMON = """\
#!{python}
import os, pathlib, subprocess, sys, time
folder = pathlib.Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"])
if "-f" in sys.argv:
    print("cannot start", flush=True)
    if {broken}:
        sys.exit(3)
    server = subprocess.Popen([sys.executable, "-c", "import time; time.sleep({lingers})"])
    pathlib.Path({seen!r}).write_text(f"{{os.getpid()}} {{server.pid}} {{folder}}")
    (folder / "control").touch()
    while not (folder / "quit").exists():
        time.sleep(0.01)
else:
    told = sys.stdin.read().strip()
    if not (folder / "control").exists():
        sys.exit(1)
    if told == "quit" and not {stubborn}:
        (folder / "quit").touch()
"""


@pytest.fixture
def daemon(tmp_path, monkeypatch):
    """Puts a stand-in for the daemon on the path; returns where it writes its process, its server's and its folder."""

    def make(broken=False, stubborn=False, lingers=0.5):
        seen = tmp_path / "seen"
        program = tmp_path / mps.PROGRAM
        text = DAEMON.format(python=sys.executable, broken=broken, stubborn=stubborn, lingers=lingers, seen=str(seen))
        program.write_text(text)
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
        return seen

    return make


def is_running(process):
    return mps._is_running(int(process))


def test_the_daemon_ends_with_the_measurement(daemon):
    """And so does its server, which takes a moment longer."""
    seen = daemon()
    with mps.running() as variables:
        process, server, folder = seen.read_text().split()
        assert set(variables.values()) == {folder}
        assert is_running(process)
        assert is_running(server)
        assert int(server) in mps.children_of(int(process))
    assert not is_running(process)
    assert not is_running(server)
    assert not os.path.exists(folder)


def test_the_daemon_ends_if_the_measurement_fails(daemon):
    seen = daemon()
    with pytest.raises(ValueError, match="no"), mps.running():
        raise ValueError("no")
    assert not any(map(is_running, seen.read_text().split()[:2]))


def test_a_daemon_that_does_not_quit_is_ended(daemon, monkeypatch):
    monkeypatch.setattr(mps, "STOP_SECONDS", 0.3)
    seen = daemon(stubborn=True, lingers=1000)
    with mps.running():
        pass
    assert not any(map(is_running, seen.read_text().split()[:2]))


def test_the_daemon_ends_if_this_process_is_killed(daemon):
    seen = daemon(lingers=0.1)
    program = (
        "import time\nfrom mkernel.bench import mps\nwith mps.running():\n    print(flush=True)\n    time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        process.kill()
    assert mps._poll(lambda: not is_running(seen.read_text().split()[0]), HANG)


def test_a_daemon_that_does_not_start(daemon):
    daemon(broken=True)
    with pytest.raises(mk.MKernelError, match="ended with code 3: cannot start"), mps.running():
        pass


def test_a_machine_without_mps(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(mk.MKernelError, match=f"there is no {mps.PROGRAM} here"), mps.running():
        pass


def test_processes_get_the_variables(daemon, monkeypatch):
    """They do not outlast the measurement."""
    daemon()
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "another")
    found = {}

    def run(function, ranks, *arguments, seconds):
        found.update(os.environ)
        return [function.__name__, ranks, *arguments]

    monkeypatch.setattr(peers, "run", run)
    reported = shared_gpu.measure([("matmul_all_reduce", (16, 8, 8))], 4, torch.bfloat16)
    assert reported[:2] == ["measure_on_rank", 4]
    assert found["CUDA_MPS_PIPE_DIRECTORY"] not in ("another", "")
    assert found["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] == "1"
    assert found["WORLD_SIZE"] == "4"  # so that mkernel leaves the number of connections alone
    assert os.environ["CUDA_MPS_PIPE_DIRECTORY"] == "another"
    assert "WORLD_SIZE" not in os.environ


@pytest.mark.thorough
def test_ours_beside_theirs(capfd):
    cases = [(op, (16, 12, 10)) for op in ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")]
    cases.append(("matmul_all_reduce", (gloo_ranks.SPOILED, 12, 10)))
    results = peers.run(gloo_ranks.measure_shared, 2, cases, torch.float32, 3, True, seconds=HANG)
    assert [result["status"] for result in results] == ["measured"] * 4, results
    assert all(result["ours_ms"] > 0 and result["ms"] > 0 for result in results)
    assert [result["way"] for result in results[:2]] == ["fused_all_gather_matmul", "fused_matmul_reduce_scatter"]
    assert "one_shot_all_reduce has an error of 1" in results[3]["note"]
    assert capfd.readouterr().out.splitlines() == [shared_gpu.line_of(result) for result in results]


def test_lines():
    one = dict(
        ranks=4, op="matmul_all_reduce", shape=[16, 8192, 8192], status="measured", ours_ms=0.05, ms=0.1, way="w"
    )
    assert "0.050     0.100   2.00  w" in shared_gpu.line_of(one)
    assert "SLOWER" not in shared_gpu.line_of(one)
    assert "SLOWER" in shared_gpu.line_of(one | {"ms": 0.04})
    assert "failed: no" in shared_gpu.line_of(one | {"status": "failed", "note": "no"})
    assert len(shared_gpu.HEADER.partition("torch's")[0]) == len(shared_gpu.line_of(one)) - 1


def test_cases_are_those_of_the_table():
    cases = shared_gpu.all_cases()
    shapes = {op: [shape for name, shape in cases if name == op] for op, _ in cases}
    assert set(shapes) == {"all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"}
    assert {(16384, 2048, 8192), (4096, 2048, 8192), (512, 2048, 8192)} < set(shapes["all_gather_matmul"])
    assert {(16384, 8192, 8192), (4096, 8192, 8192)} < set(shapes["matmul_reduce_scatter"])
    for op, some in shapes.items():
        assert len(set(some)) == len(some), op
        assert {(m, 8192, 8192) for m in (16, 64, 128, 256, 512, 1024, 2048)} <= set(some), op


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--ranks", "1"], "2 or more processes"),
        (["--ranks", "two"], "2 or more processes"),
        (["--op", "moe_ffn"], "is not measured here"),
    ],
)
def test_wrong_options(arguments, words):
    import typer

    app = typer.Typer()
    app.command()(shared_gpu.main)
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert words in result.output


def test_without_a_gpu():
    done = subprocess.run(
        [sys.executable, "-m", "mkernel.bench.shared_gpu"], capture_output=True, text=True, timeout=HANG,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "needs a GPU" in done.stdout


def test_times_are_medians_of_the_slowest_rank(monkeypatch):
    """In rounds that take turns, of as many calls as fit into a round."""
    clock, calls = [0.0], []

    class Alone:
        def exchange(self, value):
            return [value, 2 * value]

    def call(name, seconds):
        calls.append(name)
        clock[0] += seconds

    monkeypatch.setattr(shared_gpu.dist, "barrier", lambda: None)
    monkeypatch.setattr(shared_gpu, "time", type("Clock", (), {"perf_counter": staticmethod(lambda: clock[0])}))
    ways = {"fast": lambda: call("fast", 1e-4), "slow": lambda: call("slow", 1e-2)}
    times = shared_gpu.eager_ms(Alone(), ways, 3)
    assert times == pytest.approx({"fast": 0.2, "slow": 20.0})
    assert calls.count("fast") == 6 + 3 * shared_gpu.MOST_CALLS
    assert calls.count("slow") == 6 + 3 * 3
