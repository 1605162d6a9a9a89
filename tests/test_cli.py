"""The command line: what it prints, and its exit codes."""

import dataclasses
import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from support.forked_processes import Fork, run_python
from support.patience import HANG
from typer.testing import CliRunner

import mkernel
import mkernel.bench
import mkernel.doctor
from mkernel import cli, demo, estimates, operators, tables
from mkernel.bench.shapes import Wanted
from mkernel.demo.case import Demo
from mkernel.doctor import Diagnosis, Finding
from mkernel.tracing.events import Share

ROOT = Path(__file__).parent.parent


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
    """One operator, two schedules, small matrices."""
    monkeypatch.setattr(demo, "SCHEDULES", 2)
    operator = operators.find("all_gather_matmul")
    real = operator.load("demo")
    shown = Demo(lambda group, shape, seed, large: small_case(real, group, seed), real.simulated, real.large)
    monkeypatch.setattr(demo, "shown_operators", lambda: [dataclasses.replace(operator, demo=shown)])


def small_case(real, group, seed):
    case = real.on_rank(group, seed)
    a = torch.randn(32, 32, generator=torch.Generator().manual_seed(group.rank))
    b = torch.eye(32)
    bytes_of_a = 32 * 32 * 4

    def exact():
        return torch.cat(group.exchange("a", a)).double() @ b.double(), 1e-5

    return dataclasses.replace(
        case,
        call=lambda: mkernel.all_gather_matmul(a, b),
        exact=exact,
        sends=(group.nodes * bytes_of_a, bytes_of_a),
    )


def test_help():
    result = run("--help")
    assert result.exit_code == 0
    assert "demo" in result.output
    for command in ("bench", "check", "doctor", "why"):
        assert command in result.output
    assert "--version" in result.output


def test_trace_writes_a_file_for_perfetto_and_a_page(tmp_path):
    out = tmp_path / "some.json"
    result = run("trace", "all_gather_matmul", "64x32x32", "--ranks", "2", "--device", "cpu", "--out", str(out))
    assert result.exit_code == 0
    assert "copies behind tiles" in result.output
    assert "simulated: only the order" in words(result)
    assert len(json.loads(out.read_text())["traceEvents"]) > 50
    assert (tmp_path / "some.html").read_text().startswith("<!doctype html>")


def test_trace_says_where_the_time_of_a_rank_went(tmp_path):
    arguments = ("64x32x32", "--ranks", "2", "--device", "cpu", "--out", str(tmp_path / "some.json"), "--where", "1")
    result = run("trace", "all_gather_matmul", *arguments)
    assert result.exit_code == 0
    assert "rank 1, call 1:" in result.output
    for what in ("tiles", "push", "arrived", "CTA-ms"):
        assert what in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["all_gather_matmul", "--where", "4"], "must be a rank from 0 to 3, got 4"),
        (["all_gather"], "there is no operator 'all_gather'; there are: all_gather_matmul,"),
        (["all_gather_matmul", "64x32"], "'64x32' is not a shape of all_gather_matmul; write m_total x n x k"),
        (["all_gather_matmul", "0x32x32"], "'0x32x32' is not a shape"),
        (
            ["all_gather_matmul", "65x32x32"],
            "m_total of all_gather_matmul (65) must be divisible by the number of ranks (4)",
        ),
        (["all_gather_matmul", "--out", "no/such/folder.json"], "there is no folder"),
        (["all_gather_matmul", "--out", "page.html"], "written next to the file; use --out page.json"),
        (["all_gather_matmul", "8x4294967296x8"], "sizes may be at most 2147483647"),
        (["all_gather_matmul", "--events", "0"], "--events"),
        (["all_gather_matmul", "--device", "cuda"], "torch sees no GPU"),
    ],
)
def test_trace_refuses(arguments, message):
    result = run("trace", *arguments)
    assert result.exit_code == 2
    assert message in words(result)


def test_trace_of_a_read_only_file(tmp_path, monkeypatch):
    monkeypatch.setattr(cli.os, "access", lambda path, mode: False)  # root may write anything
    result = run("trace", "matmul_all_reduce", "--out", str(tmp_path / "a.json"))
    assert result.exit_code == 2
    assert "cannot be written" in words(result)


# -- how long the simulator will take

DAYS = ("trace", "all_gather_matmul", "16384x2048x8192", "--ranks", "4", "--device", "cpu")


@pytest.fixture
def never_traced(monkeypatch):
    monkeypatch.setattr("mkernel.tracing.command.run", lambda *_, **__: pytest.fail("this takes days"))


@pytest.fixture
def known_speed(monkeypatch):
    monkeypatch.setattr(estimates, "measure", lambda workload: estimates.Speed(0.01, 0.001))


@pytest.mark.thorough
def test_a_shape_that_takes_days_is_refused_with_one_that_takes_seconds(tmp_path, monkeypatch):
    """The shape that is proposed is run, too."""
    monkeypatch.setattr(estimates, "SHORT", 1.0)
    result = run(*DAYS)
    assert result.exit_code == 2
    text = words(result)
    assert re.search(r"would take about [\d,]+ (hours|days|years)\. This takes seconds:", text)
    assert "--yes runs it anyway" in text
    (proposed,) = re.findall(r"mkernel (trace all_gather_matmul [\dx]+ --device cpu --ranks 4)", text)
    assert run(*proposed.split(), "--out", str(tmp_path / "t.json")).exit_code == 0


@pytest.mark.usefixtures("never_traced")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["trace", "all_gather_matmul", "--ranks", "100000"],
            "65534 ranks at most, not 100000. This fits: mkernel trace",
        ),
        (["trace", "moe_ffn", "--ranks", "60000"], "the memory of all 60000 ranks"),
        (["trace", "ring_attention", "--nodes", "50000", "--ranks", "5"], "not 250000"),
        (["trace", "all_gather_matmul", "8x2147483647x2147483647", "--ranks", "2"], "are free here. This fits"),
        (["trace", "all_gather_matmul", "--events", "1000000000"], "are free here. This fits"),
        (["demo", "--nodes", "100000"], "not 200000. This fits: mkernel demo"),
        (["demo", "--gpus-per-node", "30000"], "the memory of all 60000 ranks"),
    ],
)
def test_absurd_sizes_are_refused_without_running_anything(monkeypatch, arguments, message):
    monkeypatch.setattr(estimates, "spawn", lambda *_, **__: pytest.fail("nothing needs to be measured for this"))
    result = run(*arguments, "--device", "cpu", "--yes")
    assert result.exit_code == 2
    assert message in words(result)


@pytest.mark.usefixtures("known_speed")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["trace", "all_gather_matmul", "--ranks", "600"],
            "This takes seconds: mkernel trace all_gather_matmul 256x128x",
        ),
        (["demo", "--nodes", "16", "--gpus-per-node", "8"], "This takes seconds: mkernel demo"),
    ],
)
@pytest.mark.thorough
def test_many_ranks_are_refused_with_fewer(arguments, message):
    result = run(*arguments, "--device", "cpu")
    assert result.exit_code == 2
    assert message in words(result)
    assert "--yes" in words(result)


@pytest.mark.parametrize(
    "arguments",
    [
        ["demo", "--gpus-per-node", "100000"],
        ["trace", "all_gather_matmul", "--ranks", "100000"],
        ["tune", "all_gather_matmul", "--ranks", "100000"],
        ["bench", "all_gather_matmul", "--ranks", "100000", "--shape", "100000x64x64"],
    ],
)
def test_absurdly_many_ranks_on_gpus(monkeypatch, arguments):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    result = run(*arguments)
    assert result.exit_code == 2
    assert "100000 ranks cannot run on 2 GPUs: each needs an SM of its own. Use at most 256" in words(result)


@pytest.mark.usefixtures("known_speed")
@pytest.mark.parametrize(("answer", "runs"), [("y", True), ("n", False), ("", False)])
def test_on_a_terminal_it_asks(monkeypatch, answer, runs):
    ran = []
    monkeypatch.setattr(cli, "_somebody_can_answer", lambda: True)
    monkeypatch.setattr("mkernel.tracing.command.run", lambda *_, **__: ran.append(1))
    monkeypatch.setattr("mkernel.tracing.command.show", lambda *_: None)
    result = CliRunner().invoke(cli.main, list(DAYS), input=f"{answer}\n")
    assert "Run it anyway?" in result.output
    assert bool(ran) == runs
    assert (result.exit_code == 0) == runs


@pytest.mark.usefixtures("known_speed")
def test_yes_runs_it(monkeypatch):
    ran = []
    monkeypatch.setattr("mkernel.tracing.command.run", lambda *_, **__: ran.append(1))
    monkeypatch.setattr("mkernel.tracing.command.show", lambda *_: None)
    result = run(*DAYS, "--yes")
    assert (result.exit_code, ran) == (0, [1])
    assert "simulating, for about" in result.output


def test_a_trace_shows_how_far_it_is(monkeypatch, tmp_path):
    monkeypatch.setattr(estimates, "FIRST_LINE", 0.0)
    result = run(
        "trace", "all_gather_matmul", "64x32x32", "--ranks", "2", "--device", "cpu", "--out", str(tmp_path / "a")
    )
    assert result.exit_code == 0
    assert "% done after" in result.stderr
    assert "done after" not in result.stdout


COMMAND_LINES = [
    (page, line)
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    for line in re.findall(
        r"^ *(?:\$ )?(mkernel (?:trace|check|demo|bench|tune) .*|mkernel demo)$", page.read_text(), re.MULTILINE
    )
    if "`" not in line
]


@pytest.mark.parametrize(("page", "line"), COMMAND_LINES, ids=lambda value: getattr(value, "name", value))
def test_documented_lines_run_without_a_gpu_or_say_that_they_need_one(monkeypatch, tmp_path, page, line):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("mkernel.tracing.command.run", lambda *_, **__: None)
    monkeypatch.setattr("mkernel.tracing.command.show", lambda *_: None)
    monkeypatch.setattr(demo, "run", lambda *_, **__: 0)
    monkeypatch.setattr("mkernel.checking.run", lambda *_: 0)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_operator.py").write_text("def on_rank(group): pass\n")
    (tmp_path / "mine.txt").write_text("all_gather_matmul 16384x2048x8192\n")
    command, _, comment = line.partition("#")
    result = run(*command.split()[1:])
    if result.exit_code != 0:
        text = page.read_text()
        section = text[: text.index(line)].rpartition("\n## ")[2] + text[text.index(line) :].partition("\n## ")[0]
        said = comment + section + text.partition("\n## ")[0]
        assert re.search(r"needs?\s+a\s+GPU", said, re.IGNORECASE), result.output
    else:
        assert command.split()[1] in ("trace", "check", "demo")


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        (OSError(28, "No space left on device", "trace.json"), "No space left on device: 'trace.json'"),
        (RuntimeError("[enforce fail] can't allocate memory\nframe #0: what"), "not enough memory: [enforce"),
    ],
)
def test_what_the_machine_lacks_is_told_in_a_line(monkeypatch, problem, message):
    def fail(*_, **__):
        raise problem

    monkeypatch.setattr("mkernel.tracing.command.run", fail)
    result = run("trace", "matmul_all_reduce", "--device", "cpu")
    assert result.exit_code == 1
    assert message in result.output
    assert len(result.output.splitlines()) == 1


def test_version():
    result = run("--version")
    assert result.exit_code == 0
    assert result.output.strip() == f"mkernel {mkernel.__version__}"


@pytest.mark.usefixtures("small")
def test_demo_shows_results_bytes_and_overlap(tmp_path):
    result = run("demo", "--device", "cpu", "--seed", "3", "--html", str(tmp_path / "demo.html"))
    assert result.exit_code == 0
    text = words(result)
    assert "2 nodes x 2 GPUs, simulated" in text
    # 32 rows of 32 fp32: 4 KiB over the network from each rank, and from both nodes over NVLink
    assert re.search(r"all_gather_matmul 128x32 \d+% 32 KiB 16 KiB \d+% ok", text)
    assert "the seeds 3 to 4" in text
    assert "All results are right." in text
    assert max(len(line.rstrip()) for line in result.output.splitlines() if str(tmp_path) not in line) <= 80
    assert "\x1b" not in result.output
    shown = data_of(tmp_path / "demo.html")
    (one,) = shown["operators"]
    assert one["ok"]
    assert shown["simulated"]
    assert one["nvlink_bytes"][0] == [0, 8192, 0, 0]
    assert one["network_bytes"][0] == [0, 0, 4096, 0]
    assert [rank["shape"] for rank in one["ranks"]] == [[128, 32]] * 4


@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_all_reduce", "matmul_reduce_scatter", "moe_ffn"])
def test_demo_and_trace_mean_the_same_by_overlap(monkeypatch, op):
    """What the demo shows of an operator is what a trace of the same calls says."""
    monkeypatch.setattr(demo, "SCHEDULES", 2)
    operator = operators.find(op)

    def on_rank(group):
        with mkernel.trace() as traced:
            operator.load("demo").on_rank(group, 0).call()
        return traced

    shown = demo._simulate(operator, 1, 2, 5, lambda group: None)
    expected = []
    for seed in (5, 6):
        traced = mkernel.spawn(on_rank, nodes=1, gpus_per_node=2, device="cpu", seed=seed)[0]
        expected.append(sum(traced.overlap(rank, 0) for rank in range(2)) / 2)
    assert shown.overlap == min(expected)


@pytest.mark.usefixtures("small")
def test_no_copies_have_no_overlap():
    result = run("demo", "--device", "cpu", "--nodes", "1", "--gpus-per-node", "1")
    assert result.exit_code == 0
    assert re.search(r"all_gather_matmul 32x32 \d+% - - - ok", words(result))
    assert "no copy was traced" in words(result)


def data_of(path):
    """The JSON that a page has inside."""
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', path.read_text(), re.DOTALL)
    return json.loads(text)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("nodes", "gpus"), [(1, 1), (1, 3), (3, 1)])
def test_demo_of_other_clusters(nodes, gpus):
    result = run("demo", "--device", "cpu", "--nodes", str(nodes), "--gpus-per-node", str(gpus))
    assert result.exit_code == 0
    assert re.search(
        rf"{32 * nodes * gpus}x32 \d+% {'24 KiB' if gpus > 1 else '-'} {'24 KiB' if nodes > 1 else '-'}", words(result)
    )


@pytest.mark.usefixtures("small")
def test_demo_fails_when_a_result_is_wrong(monkeypatch, tmp_path):
    real = mkernel.all_gather_matmul

    def wrong(a, b):
        y = real(a, b)
        y[0, 0] = float("nan")
        return y

    monkeypatch.setattr(mkernel, "all_gather_matmul", wrong)
    result = run("demo", "--device", "cpu", "--nodes", "1", "--html", str(tmp_path / "demo.html"))
    assert result.exit_code == 1
    assert "WRONG" in result.output
    assert "rank 1: error nan is over the bound" in words(result)
    assert "All results are right" not in result.output
    assert data_of(tmp_path / "demo.html")["operators"][0]["ranks"][0]["error"] is None  # JSON has no NaN
    assert "All results are right" not in (tmp_path / "demo.html").read_text()


@pytest.mark.usefixtures("small")
def test_demo_fails_when_a_result_has_another_shape(monkeypatch):
    monkeypatch.setattr(mkernel, "all_gather_matmul", lambda a, b: a @ b)
    result = run("demo", "--device", "cpu", "--nodes", "1")
    assert result.exit_code == 1
    assert "rank 0: error inf is over the bound" in words(result)


@pytest.mark.usefixtures("small")
def test_demo_fails_when_bytes_are_missing(monkeypatch):
    monkeypatch.setattr(mkernel, "all_gather_matmul", lambda a, b: gathered_by_the_host(a, b))
    result = run("demo", "--device", "cpu", "--nodes", "1")
    assert result.exit_code == 1
    assert "rank 0 sent 0 bytes over NVLink to rank 1 instead of 4096" in words(result)


def gathered_by_the_host(a, b):
    from mkernel.runtime.group import current

    return torch.cat(current().exchange("all", a)) @ b


@pytest.mark.usefixtures("small")
def test_an_error_of_the_package_is_one_line(monkeypatch):
    def refuse(a, b):
        raise mkernel.CommTimeout("rank 0 waited for rank 1")

    monkeypatch.setattr(mkernel, "all_gather_matmul", refuse)
    result = run("demo", "--device", "cpu")
    assert result.exit_code == 1
    assert "mkernel: rank 0 waited for rank 1" in result.output


@pytest.mark.parametrize("name", operators.registered("demo"))
def test_every_operator_has_its_case(name):
    """One schedule of each; `make demo` runs more."""

    def on_rank(group):
        case = operators.find(name).load("demo").on_rank(group, 0)
        case.library()
        return demo.compare(case.result(case.call()), *case.exact())

    for check in mkernel.spawn(on_rank, nodes=2, gpus_per_node=1, device="cpu", seed=1):
        assert check.ok, check


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["demo", "--nodes", "0"], "--nodes"),
        (["demo", "--gpus-per-node", "two"], "--gpus-per-node"),
        (["demo", "--device", "tpu"], "'auto', 'cpu', 'cuda'"),
        (["demo", "--html", "no/such/folder/demo.html"], "there is no folder"),
        (["bench", "matmul_all_gather"], "no operator 'matmul_all_gather'; there are: all_gather_matmul"),
        (["bench", "--shape", "64x64x64"], "a shape needs an operator"),
        (["bench", "all_gather_matmul", "--shape", "64x64x64", "--shapes", "small"], "not both"),
        (["bench", "--shapes", "large"], "'small', 'paper' or a file; large cannot be read"),
        (["bench", "--against", "mpi"], "unknown baseline 'mpi'; choose from host, nccl, symm_mem"),
        (["bench", "moe_ffn", "--causal"], "moe_ffn has no such option"),
        (["bench", "--zigzag"], "all_gather_matmul has no such option"),
        (["bench", "ring_attention", "--nodes", "2"], "measured on one node only"),
        (["bench", "--network", "9", "--unpaced"], "either --network or --unpaced"),
        (["bench", "--ranks", "3"], "must be divisible by the number of ranks (3)"),
        (["bench", "--csv", "no/such/folder/figures.csv"], "there is no folder"),
        (["bench", "all_gather_matmul", "--shape", "1024x1024"], "m_total x n x k"),
        (["bench", "all_gather_matmul", "--shape", "1024x0x8"], "1 or more"),
        (["bench", "all_gather_matmul", "--shape", "1022x8x8"], "divisible by the number of ranks (4)"),
        (["bench", "all_gather_matmul", "--dtype", "int8"], "'bf16', 'fp16', 'fp32'"),
        (["bench", "all_gather_matmul", "--link", "0"], "more than 0 GB/s"),
        (["bench", "all_gather_matmul", "--link", "9", "--unpaced"], "either --link or --unpaced"),
        (["bench", "all_gather_matmul", "--json", "no/such/folder/figures.json"], "there is no folder"),
        (["frobnicate"], "frobnicate"),
        (["doctor", "--now"], "--now"),
        (["why"], "Missing argument"),
        (["why", "no/such/file"], "no/such/file cannot be read"),
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
    monkeypatch.setattr(demo, "run", lambda *arguments, **_: asked.append(arguments[:3]) or 0)
    assert run("demo", *options).exit_code == 0
    assert asked == [expected]


def test_bench_hands_its_options_over(monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr(mkernel.bench, "main", lambda wanted, **options: calls.append((wanted, options)) or 3)
    default = dict(
        ranks=4, nodes=1, dtype="bf16", link=450.0, network=50.0, against=("host",), options=(),
        json_path=None, csv_path=None, html_path=None,
    )  # fmt: skip

    assert run("bench", "all_gather_matmul").exit_code == 3
    wanted, options = calls.pop()
    assert [one.shape for one in wanted] == list(operators.find("all_gather_matmul").shapes)
    assert options == default

    shapes = ["--shape", "64x32x16", "--shape", "128X8x8"]
    files = [tmp_path / f"figures.{kind}" for kind in ("json", "csv", "html")]
    written = [text for file in files for text in (f"--{file.suffix[1:]}", str(file))]
    run("bench", "all_gather_matmul", *shapes, "--ranks", "2", "--dtype", "fp16", "--link", "100", *written)
    wanted, options = calls.pop()
    assert wanted == [Wanted("all_gather_matmul", (64, 32, 16)), Wanted("all_gather_matmul", (128, 8, 8))]
    json_path, csv_path, html_path = files
    paths = dict(json_path=json_path, csv_path=csv_path, html_path=html_path)
    assert options == default | dict(ranks=2, dtype="fp16", link=100.0) | paths

    run("bench", "--unpaced")
    assert calls.pop()[1] == default | dict(link=None, network=None)
    run("bench", "--against", "host, nccl,symm_mem")  # over links that are not paced, unless asked for
    wanted, options = calls.pop()
    assert {one.op for one in wanted} == set(operators.registered("bench"))
    assert options == default | dict(link=None, network=None, against=("host", "nccl", "symm_mem"))
    run("bench", "--against", "symm_mem", "--link", "100")
    assert calls.pop()[1] == default | dict(link=100.0, against=("symm_mem",))

    run("bench", "moe_ffn", "--nodes", "2")
    assert calls.pop()[1] == default | dict(nodes=2)
    run("bench", "ring_attention", "--causal", "--zigzag", "--shape", "B4xH16xS49152xD128")
    assert calls.pop() == (
        [Wanted("ring_attention", (4, 16, 49152, 128))],
        default | dict(options=("causal", "zigzag")),
    )

    run("bench", "--shapes", "paper", "--ranks", "2")
    wanted, options = calls.pop()
    measured = operators.registered("bench")
    assert {one.op for one in wanted} == {op for op in measured if measured[op].load("bench").published is not None}
    assert all(one.row is not None for one in wanted)

    (tmp_path / "shapes").write_text("all_gather_matmul 64x64x64\n")
    run("bench", "--shapes", str(tmp_path / "shapes"))
    assert calls.pop()[0] == [Wanted("all_gather_matmul", (64, 64, 64))]


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_a_missing_package_is_named(package):
    # typer itself may need rich, so what is named is the first one that is not there
    code = (
        f"import sys; assert {package!r} not in sys.modules; sys.modules[{package!r}] = None;"
        "sys.modules['rich.console'] = None; import mkernel.cli"
    )
    output = run_python(["-c", code], expected=1)
    assert "pip install 'mkernel-gpu[cli]'" in output
    assert len(output.strip().splitlines()) == 1


def test_the_table_of_the_demo_fits_into_a_terminal():
    """With all operators and large numbers."""
    shown = [
        demo.Shown(
            name, "does something", "some rows", checks=[demo.Check((3, 1, 1, 32, 64), 0.9, 0.45)],
            nvlink=[[128 * 1024 + 512]], network=[[128 * 1024 + 512]], overlaps=[[Share(1.0)]],
        )
        for name in operators.registered("demo")
    ]  # fmt: skip
    console = Console(width=80, file=io.StringIO())
    tables.show(demo._table(shown, simulated=True), console)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert sum("128.5 KiB" in line for line in lines) == len(shown)


@pytest.mark.usefixtures("small")
def test_demo_on_gpus_shows_times(monkeypatch, tmp_path):
    """The table of the GPU's demo, with figures from nowhere: the real ones need a GPU."""
    check = demo.Check((4096, 2048), 0.9, 0.45)
    asked = []

    def spawn(function, *arguments, **options):
        asked.append((arguments[1:], options))
        return [(check, {"fused": 0.25, "library": 0.2}, "some rows")] * 4

    monkeypatch.setattr(demo, "spawn", spawn)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "some GPU")
    result = run("demo", "--seed", "5", "--html", str(tmp_path / "demo.html"))
    assert result.exit_code == 0
    assert asked == [((5,), dict(nodes=1, gpus_per_node=4, device="cuda"))]
    text = words(result)
    assert "mkernel on 1 x some GPU, 4 ranks" in text
    assert "all_gather_matmul 4096x2048 45% 0.250 ms 0.200 ms 0.80 ok" in text
    assert "times are emulated" in text
    assert data_of(tmp_path / "demo.html")["operators"][0]["milliseconds"] == {"fused": 0.25, "library": 0.2}


# -- check


def test_check_of_something_like_a_function():
    result = run("check", "program:on_rank")
    assert result.exit_code == 2
    assert "'program:on_rank' is not a function of a file: write FILE.py:FUNCTION" in words(result)


# -- compile


def test_compile_refuses_what_a_gpu_would_refuse(capfd):
    """In one line that names the GPU, and without a word of the simulator that prepares the call."""
    result = run("compile", "moe_ffn", "--arch", "sm_80")
    assert result.exit_code == 1
    assert result.output == (
        "mkernel: moe_ffn needs tensor descriptors (TMA), which a GPU of sm_80 does not have; it runs on Hopper "
        "(compute capability 9.0) or newer\n"
    )
    assert "simulator" not in capfd.readouterr().err


# -- doctor


def diagnosis(*statuses):
    findings = [
        Finding("GPUs", f"thing {place}", "[1] is here", status, "do this") for place, status in enumerate(statuses)
    ]
    return Diagnosis(tuple(findings))


@pytest.mark.parametrize(
    ("statuses", "code", "count"),
    [(["ok", "note"], 0, "No problem."), (["ok", "problem"], 1, "1 problem."), (["problem"] * 2, 1, "2 problems.")],
)
def test_doctor(monkeypatch, statuses, code, count):
    monkeypatch.setattr(mkernel.doctor, "diagnose", lambda: diagnosis(*statuses))
    result = run("doctor")
    assert result.exit_code == code
    text = words(result)
    assert count in text
    assert f"{statuses[0]} thing 0: [1] is here do this" in text
    result = run("doctor", "--json")
    assert result.exit_code == code
    assert [finding["status"] for finding in json.loads(result.output)["findings"]] == statuses


# -- readers that go away

COMMAND = "import runpy; runpy.run_module('mkernel.cli', run_name='__main__', alter_sys=True)"


@pytest.mark.parametrize("arguments", [["doctor"], ["doctor", "--json"], ["--help"], ["bench"], ["trace", "--help"]])
def test_a_reader_that_goes_away_ends_the_command_quietly(arguments, tmp_path):
    """As other Unix tools: by SIGPIPE, with nothing on stderr; also if all that it prints fits into a buffer."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as gone, open(tmp_path / "stderr", "w") as errors:
        process = Fork(["-c", COMMAND, *arguments], dict(os.environ), stdout=gone, stderr=errors)
        assert process.wait(HANG) == -signal.SIGPIPE
    assert (tmp_path / "stderr").read_text() == ""


def test_exit_codes_are_as_before_where_somebody_reads():
    run_python(["-c", COMMAND, "--version"])
    run_python(["-c", COMMAND, "frobnicate"], expected=2)


def test_the_command_as_a_process():
    """As above, with nothing imported before."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "mkernel.cli", "--version"]
    with open(writer, "w") as gone:
        result = subprocess.run(command, stdout=gone, stderr=subprocess.PIPE, text=True, timeout=HANG, check=False)
    assert result.stderr == ""
    assert result.returncode == -signal.SIGPIPE


# -- why


def test_why_shows_the_chain(tmp_path):
    files = [tmp_path / f"waits.{rank}.jsonl" for rank in range(2)]
    for rank, file in enumerate(files):
        record = mkernel.WaitRecord(True, "barrier", rank, "host", -1, "call", rank + 1, 0, 1, 3, 2.0)
        mkernel.CommTimeout("late", [record]).save(file)
    result = run("why", *map(str, files))
    assert result.exit_code == 0
    assert "rank 0 -> rank 1 -> rank 2" in result.output
    assert "rank 2 waited for nobody" in result.output
    files[0].write_text("{half a li")
    result = run("why", *map(str, files))
    assert result.exit_code == 0
    assert f"left out {files[0]}:1: this is not JSON" in result.output
    assert "rank 1 -> rank 2" in result.output
    result = run("why", str(files[0]))
    assert result.exit_code == 1
    assert "no records" in result.output
