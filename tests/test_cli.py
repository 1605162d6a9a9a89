"""The command line: what it prints, and its exit codes."""

import json
import re
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

import mkernel
import mkernel.bench
from mkernel import cli, demo


def run(*arguments):
    result = CliRunner(env={"COLUMNS": "80", "TERM": "dumb", "NO_COLOR": "1"}).invoke(cli.main, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def words(result):
    """The output without frames and line ends."""
    return re.sub(r"[\s│┃╭╮╰╯─]+", " ", result.output)


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(demo, "SCHEDULES", 2)
    monkeypatch.setattr(demo, "SIMULATED", (32, 32, 32))


def test_help():
    result = run("--help")
    assert result.exit_code == 0
    assert "demo" in result.output
    assert "bench" in result.output
    assert "--version" in result.output


def test_trace_writes_a_file_for_perfetto_and_a_page(tmp_path):
    out = tmp_path / "some.json"
    result = run("trace", "all_gather_matmul", "64x32x32", "--ranks", "2", "--device", "cpu", "--out", str(out))
    assert result.exit_code == 0
    assert "copies behind tiles" in result.output
    assert "simulated: only the order" in words(result)
    assert len(json.loads(out.read_text())["traceEvents"]) > 50
    assert (tmp_path / "some.html").read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["all_gather"], "there is no operator 'all_gather' here; there are: all_gather_matmul,"),
        (["all_gather_matmul", "64x32"], "'64x32' is no shape of all_gather_matmul; write m_total x n x k"),
        (["all_gather_matmul", "0x32x32"], "'0x32x32' is no shape"),
        (["all_gather_matmul", "65x32x32"], "m_total (65) must be divisible by the 4 ranks"),
        (["all_gather_matmul", "--out", "no/such/folder.json"], "there is no folder"),
        (["all_gather_matmul", "--events", "0"], "--events"),
        (["all_gather_matmul", "--device", "cuda"], "torch sees no GPU"),
    ],
)
def test_trace_refuses(arguments, message):
    result = run("trace", *arguments)
    assert result.exit_code == 2
    assert message in words(result)


def test_version():
    result = run("--version")
    assert result.exit_code == 0
    assert result.output.strip() == f"mkernel {mkernel.__version__}"


@pytest.mark.usefixtures("small")
def test_demo_shows_results_bytes_and_overlap():
    result = run("demo", "--device", "cpu", "--seed", "3")
    assert result.exit_code == 0
    text = words(result)
    assert "2 nodes x 2 GPUs, simulated" in text
    assert text.count("128 x 32") == 4  # a result for each rank
    assert text.count(" ok ") == 4
    assert "The seeds 3 to 4 were run" in text
    # 32 rows of 32 bf16: 2 KiB over the network, and from both nodes over NVLink
    assert text.count("4 KiB") == 4
    assert text.count("2 KiB") == 4
    assert "before the rank's last byte arrived" in text
    assert "All results are right." in text
    assert max(len(line.rstrip()) for line in result.output.splitlines()) <= 80
    assert "\x1b" not in result.output


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("nodes", "gpus"), [(1, 1), (1, 3), (3, 1)])
def test_demo_of_other_clusters(nodes, gpus):
    result = run("demo", "--device", "cpu", "--nodes", str(nodes), "--gpus-per-node", str(gpus))
    assert result.exit_code == 0
    text = words(result)
    assert ("Sent over NVLink" in text) == (gpus > 1)
    assert ("Sent over the network" in text) == (nodes > 1)
    assert ("from to 0 to 1 to 2 " in text) == (nodes * gpus == 3)


@pytest.mark.usefixtures("small")
def test_demo_of_many_ranks_shows_sums(monkeypatch):
    monkeypatch.setattr(demo, "WIDEST", 2)
    result = run("demo", "--device", "cpu", "--nodes", "1", "--gpus-per-node", "3")
    assert result.exit_code == 0
    assert "from to all" in words(result)


@pytest.mark.usefixtures("small")
def test_demo_fails_when_a_result_is_wrong(monkeypatch):
    real = demo.all_gather_matmul

    def wrong(a, b):
        y = real(a, b)
        y[0, 0] = float("nan")
        return y

    monkeypatch.setattr(demo, "all_gather_matmul", wrong)
    result = run("demo", "--device", "cpu", "--nodes", "1")
    assert result.exit_code == 1
    assert "WRONG" in result.output
    assert "rank 1: error nan is over the bound" in words(result)
    assert "All results are right" not in result.output


@pytest.mark.usefixtures("small")
def test_demo_fails_when_bytes_are_missing(monkeypatch):
    monkeypatch.setattr(demo, "all_gather_matmul", lambda a, b: gathered_by_the_host(a, b))
    result = run("demo", "--device", "cpu", "--nodes", "1")
    assert result.exit_code == 1
    assert "rank 0 sent 0 bytes over NVLink to rank 1 instead of 2048" in words(result)


def gathered_by_the_host(a, b):
    from mkernel.runtime.group import current

    return torch.cat(current().exchange("all", a)) @ b


@pytest.mark.usefixtures("small")
def test_an_error_of_the_package_is_one_line(monkeypatch):
    def refuse(a, b):
        raise mkernel.CommTimeout("rank 0 waited for rank 1")

    monkeypatch.setattr(demo, "all_gather_matmul", refuse)
    result = run("demo", "--device", "cpu")
    assert result.exit_code == 1
    assert "mkernel: rank 0 waited for rank 1" in result.output


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["demo", "--nodes", "0"], "--nodes"),
        (["demo", "--gpus-per-node", "two"], "--gpus-per-node"),
        (["demo", "--device", "tpu"], "'auto', 'cpu', 'cuda'"),
        (["bench", "matmul_all_gather"], "there is no operator 'matmul_all_gather'; there are: all_gather_matmul"),
        (["bench", "all_gather_matmul", "--shape", "1024x1024"], "m_total x n x k"),
        (["bench", "all_gather_matmul", "--shape", "1024x0x8"], "1 or more"),
        (["bench", "all_gather_matmul", "--shape", "1022x8x8"], "divisible by the number of ranks (4)"),
        (["bench", "all_gather_matmul", "--dtype", "int8"], "'bf16', 'fp16', 'fp32'"),
        (["bench", "all_gather_matmul", "--link", "0"], "more than 0 GB/s"),
        (["bench", "all_gather_matmul", "--link", "9", "--unpaced"], "either --link or --unpaced"),
        (["bench", "all_gather_matmul", "--json", "no/such/folder/figures.json"], "there is no folder"),
        (["frobnicate"], "frobnicate"),
    ],
)
def test_wrong_options(arguments, expected):
    result = run(*arguments)
    assert result.exit_code == 2
    assert expected in words(result)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu():
    result = run("demo", "--device", "cuda")
    assert result.exit_code == 2
    assert "torch sees no GPU" in words(result)


def test_several_nodes_on_cuda_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    result = run("demo", "--device", "cuda", "--nodes", "2")
    assert result.exit_code == 2
    assert "--device cpu simulates several" in words(result)


@pytest.mark.parametrize(
    ("gpu", "options", "expected"),
    [
        (False, [], (2, 2, "cpu")),
        (False, ["--nodes", "3"], (3, 2, "cpu")),
        (True, [], (1, 4, "cuda")),
        (True, ["--gpus-per-node", "2"], (1, 2, "cuda")),
        (True, ["--nodes", "2"], (2, 2, "cpu")),
        (True, ["--device", "cpu"], (2, 2, "cpu")),
    ],
)
def test_which_cluster_the_demo_takes(monkeypatch, gpu, options, expected):
    asked = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(demo, "run", lambda *arguments: asked.append(arguments[:3]) or 0)
    assert run("demo", *options).exit_code == 0
    assert asked == [expected]


def test_bench_hands_its_options_over(monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr(mkernel.bench, "main", lambda **options: calls.append(options) or 3)
    assert run("bench", "all_gather_matmul").exit_code == 3
    path = str(tmp_path / "figures.json")
    shapes = ["--shape", "64x32x16", "--shape", "128X8x8"]
    run("bench", "all_gather_matmul", *shapes, "--ranks", "2", "--dtype", "fp16", "--link", "100", "--json", path)
    run("bench", "all_gather_matmul", "--unpaced", "--nodes", "2")
    default = dict(
        op="all_gather_matmul", shapes=None, ranks=4, nodes=1, dtype="bf16", link=450.0, network=50.0, json_path=None
    )
    assert calls == [
        default,
        default | dict(shapes=[(64, 32, 16), (128, 8, 8)], ranks=2, dtype="fp16", link=100.0, json_path=path),
        default | dict(link=None, network=None, nodes=2),
    ]


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_a_missing_package_is_named(package):
    # typer itself may need rich, so what is named is the first one that is not there
    code = f"import sys; sys.modules[{package!r}] = None; sys.modules['rich.console'] = None; import mkernel.cli"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "pip install mkernel[cli]" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_demo_on_gpus_shows_times(monkeypatch):
    """The tables of the GPU's demo, with figures from nowhere: the real ones need a GPU."""
    check = demo.Check((4096, 2048), 0.9, 2.0)
    times = {"all_gather_matmul, fused": 0.25, "copy of all rows, then torch.mm": 0.5}
    asked = []

    def spawn(function, *arguments, **options):
        asked.append((arguments, options))
        return [(check, times)] * 4

    monkeypatch.setattr(demo, "spawn", spawn)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "some GPU")
    result = run("demo", "--seed", "5")
    assert result.exit_code == 0
    assert asked == [((5,), dict(nodes=1, gpus_per_node=4, device="cuda"))]
    text = words(result)
    assert "all_gather_matmul on 1 x some GPU, 4 ranks" in text
    assert text.count("4096 x 2048 0.900 2.000 ok") == 4
    assert text.count("8 MiB") == 12  # 1024 rows of 4096 bf16 from each rank to each other one
    assert "all_gather_matmul, fused 0.250" in text
    assert max(len(line.rstrip()) for line in result.output.splitlines()) <= 80
