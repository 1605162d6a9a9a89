"""The registry: an operator from outside is found by every tool, and no tool knows an operator."""

import ast
import dataclasses
import inspect
import json
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support import toy_operator
from support.forked_processes import run_python
from typer.testing import CliRunner

import mkernel as mk
from mkernel import bench, cli, demo, operators
from mkernel.operators import Option, Signal
from mkernel.runtime import records

SOURCE = Path(mk.__file__).parent
BUILT_IN = list(operators.registered())


def run(*arguments):
    return CliRunner(env={"COLUMNS": "200", "TERM": "dumb", "NO_COLOR": "1"}).invoke(cli.main, list(arguments))


@pytest.fixture
def toy(monkeypatch):
    """The toy operator, registered as anybody would."""
    monkeypatch.setattr(operators, "_registered", dict(operators._registered))
    return mk.register(toy_operator.OPERATOR)


# -- an operator from outside


def test_it_computes(toy):
    def on_rank(group):
        return [toy.load("function")(torch.arange(5.0) + 10 * group.rank + turn).tolist() for turn in range(3)]

    for rank, results in enumerate(mk.spawn(on_rank, gpus_per_node=3, device="cpu")):
        assert results == [[10 * ((rank - 1) % 3) + turn + i for i in range(5)] for turn in range(3)]


def test_demo_shows_it(toy, monkeypatch):
    monkeypatch.setattr(operators, "_registered", {toy.name: toy})
    result = run("demo", "--device", "cpu", "--nodes", "1", "--gpus-per-node", "2")
    assert result.exit_code == 0, result.output
    assert "toy_shift: gives each rank the vector of its left neighbour." in result.output
    assert re.search(r"toy_shift\s+300\s+0%.* ok", result.output)
    assert [operator.name for operator in demo.shown_operators()] == ["toy_shift"]


def test_bench_measures_it(toy, monkeypatch):
    assert "needs a GPU" in run("bench", "toy_shift").output
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "a GPU of paper")
    monkeypatch.setattr(
        bench, "spawn",
        lambda fn, *a, nodes, gpus_per_node, device, links, timeout: mk.spawn(fn, *a, gpus_per_node=2, device="cpu"),
    )  # fmt: skip
    result = run("bench", "toy_shift", "--ranks", "2", "--shape", "64", "--shape", "100")
    assert result.exit_code == 0, result.output
    lines = result.output.split("\ntoy_shift\n")[1].splitlines()
    assert next(line for line in lines if line.strip()).split()[:2] == ["count", "fused"]
    assert [line.split()[:2] for line in lines if "0.125" in line] == [["64", "0.125"], ["100", "0.125"]]
    refused = run("bench", "toy_shift", "--shapes", "paper")
    assert refused.exit_code == 2
    assert "there are no published figures for toy_shift" in refused.output
    refused = run("bench", "toy_shift", "--nodes", "2")
    assert "toy_shift is measured on one node only" in refused.output


def test_trace_writes_what_it_did(toy, tmp_path):
    path = tmp_path / "trace.json"
    result = run("trace", "toy_shift", "--ranks", "2", "--device", "cpu", "--out", str(path))
    assert result.exit_code == 0, result.output
    names = {event.get("name", "") for event in json.loads(path.read_text())["traceEvents"]}
    assert any("wait for shifted" in name for name in names)
    assert not any("signal 40" in name for name in names)


def test_explain_gives_its_plan(toy):
    def on_rank(group):
        return str(mk.explain("toy_shift", torch.ones(12)))

    assert mk.spawn(on_rank, gpus_per_node=2, device="cpu")[0] == "toy_shift: 12 elements go to the right"
    with pytest.raises(mk.ArgumentError, match=r"there is no operator 'toy'.*all_gather_matmul.*toy_shift"):
        mk.explain("toy")


def test_why_names_its_signal(toy, tmp_path):
    """A rank that never sends: the others say what they waited for in the operator's own words."""

    def on_rank(group):
        toy_operator.toy_shift(torch.ones(8))
        if group.rank == 1:
            return
        try:
            toy_operator.toy_shift(torch.ones(8))
        except mk.CommTimeout as failure:
            failure.save(tmp_path / "waits.0.jsonl")
            raise

    with pytest.raises(mk.CommTimeout, match="the vector of rank 1, piece 7: signal 'shifted'"):
        mk.spawn(on_rank, gpus_per_node=2, device="cpu", timeout=1e-3)
    result = run("why", str(tmp_path / "waits.0.jsonl"))
    assert result.exit_code == 0, result.output
    assert "toy_shift" in result.output
    assert "the vector of rank 1, piece 7" in result.output


def test_check_runs_its_schedules(toy):
    result = run("check", "toy_shift", "--nodes", "1", "--gpus-per-node", "2", "--schedules", "5")
    assert result.exit_code == 0, result.output
    assert "5 schedules of 1 x 2 ranks" in result.output


def test_compile_shows_what_its_kernel_needs(toy, tmp_path):
    ptx = tmp_path / "toy.ptx"
    result = run("compile", "toy_shift", "--ranks", "2", "--arch", "sm_80", "--shape", "512", "--ptx", str(ptx))
    assert result.exit_code == 0, result.output
    (row,) = (line.split() for line in result.output.splitlines() if "toy_shift_kernel" in line)
    shape, kernel, ctas, warps, registers, spilled, shared, size = row
    assert (shape, kernel, ctas, warps, spilled) == ("512", "toy_shift_kernel", "1", "4", "0")
    assert 8 < int(registers) <= 255
    assert int(shared) < 4096
    assert len(ptx.read_text()) == int(size)
    assert ".target sm_80" in ptx.read_text()
    assert "512: toy_shift: 512 elements go to the right" in result.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--arch", "hopper"], "'hopper' is not an architecture"),
        (["--arch", "sm_75"], "use sm_80 (A100), sm_90a"),
        (["--shape", "8x8"], "is not a shape of toy_shift; write count as 1 integers"),
        (["--shape", "8", "--shape", "9", "--ptx", "x.ptx"], "takes one shape, got 2"),
        (["--zigzag"], "toy_shift has no such option"),
        (["--ptx", "/no/such/folder/x.ptx"], "there is no folder"),
    ],
)
def test_what_can_not_be_compiled_is_refused(toy, arguments, words):
    result = run("compile", "toy_shift", *arguments)
    assert result.exit_code == 2
    assert words in re.sub(r"[\s│╭╮╰╯─]+", " ", result.output)


def test_what_a_call_would_refuse_is_not_compiled(toy):
    result = run("compile", "toy_shift", "--nodes", "2", "--ranks", "1")
    assert result.exit_code == 1
    assert "in a group of one node" in result.output
    result = run("compile", "toy_shift", "--dtype", "fp64")
    assert result.exit_code == 2


def test_an_installed_package_registers_by_its_entry_point(toy, monkeypatch):
    def broken():
        raise ImportError("no module named 'nothing'")

    points = [
        SimpleNamespace(name="toy", value="support.toy_operator:OPERATOR", load=lambda: toy_operator.OPERATOR),
        SimpleNamespace(name="broken", value="nothing", load=broken),
    ]
    operators.unregister("toy_shift")
    monkeypatch.setattr(operators, "_discovered", False)
    monkeypatch.setattr(operators.metadata, "entry_points", lambda group: points if group == operators.GROUP else [])
    with pytest.warns(UserWarning, match=r"the operators of 'nothing' .* are skipped: ImportError"):
        assert list(operators.registered()) == [*BUILT_IN, "toy_shift"]
    assert list(operators.registered()) == [*BUILT_IN, "toy_shift"]  # asked for once


OPTIONS = """
import sys
import mkernel
from support import toy_operator
mkernel.register(toy_operator.OPERATOR)
from mkernel.cli import main
main(["bench", "--help"], standalone_mode=False)
main(["tune", "--help"], standalone_mode=False)
main(["trace", "--help"], standalone_mode=False)
"""


def test_its_name_and_options_are_on_the_command_line():
    """Of an operator that is registered before the command line is imported, as by an entry point."""
    text = run_python(["-c", OPTIONS], paths=f"{SOURCE.parent}:{Path(__file__).parent}")
    assert text.count("--backwards") == 2
    assert text.count("toy_shift") >= 3


# -- entries


def entry(**changes):
    return dataclasses.replace(toy_operator.OPERATOR, **changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(name="two words"), "must be a Python identifier; got 'two words'"),
        (dict(name="moe_ffn"), "an operator 'moe_ffn' is already registered, with a different entry"),
        (dict(shared=("rows",)), r"shared contains 'rows', which is not one of the dimensions \('count',\)"),
        (dict(shapes=()), "shapes must contain at least one shape"),
        (dict(shapes=((8, 8),)), r"the shape \(8, 8\) must have one number for each of \('count',\)"),
        (dict(small=((),)), r"the shape \(\) must have"),
        (dict(signals=(Signal(1, "mine"),)), "at least 16; got 1"),
        (dict(signals=(Signal(16, "mine"), Signal(16, "too"))), "distinct kinds of at least 16; got 16"),
        (dict(options=(Option("causal", "another meaning"),)), "already has a different option --causal"),
        (dict(options=(Option("speed", "", kind=float),)), "bool or int as its kind"),
    ],
)
def test_entries_that_no_tool_could_use_are_refused(toy, changes, words):
    operators.unregister("toy_shift")
    before = operators.registered()
    with pytest.raises(mk.ArgumentError, match=words):
        mk.register(entry(**changes))
    assert operators.registered() == before


def test_the_same_entry_may_come_again(toy):
    assert mk.register(toy_operator.OPERATOR) is toy_operator.OPERATOR
    assert list(operators.registered()) == [*BUILT_IN, "toy_shift"]


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        ("no_such_module:demo", "there is no module 'no_such_module'"),
        ("support.toy_operator:nothing", "module 'support.toy_operator' has no 'nothing'"),
        ("support.toy_operator", "write 'package.module:name'"),
        (None, "toy_shift has no demo in its registry entry"),
    ],
)
def test_what_an_entry_does_not_have_is_said(toy, reference, words):
    operators.unregister("toy_shift")
    toy = mk.register(entry(demo=reference))
    with pytest.raises(mk.ArgumentError, match=re.escape(words)):
        toy.load("demo")
    if reference is None:
        assert "toy_shift" not in operators.registered("demo")
        result = run("check", "toy_shift")
        assert result.exit_code == 2
        assert "toy_shift has no demo in its registry entry" in re.sub(r"[\s│╭╮╰╯─]+", " ", result.output)


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_entry_leads_somewhere(name):
    operator = operators.find(name)
    for part in ("function", "explain", "workload", "space", "demo"):
        assert operator.load(part) is not None
    assert operator.load("function") is getattr(mk, name)
    assert operator.load("workload").op == name
    assert len(operator.load("workload").simulated) == len(operator.load("workload").deeper) == len(operator.dimensions)
    assert operator.part_of or operator.load("bench").measure
    assert (operator.part_of or name) in operators.registered("bench")


@pytest.mark.parametrize("name", [*BUILT_IN, "toy_shift"])
def test_a_function_and_its_explain_have_the_same_parameters(toy, name):
    operator = operators.find(name)
    function, explain = (inspect.signature(operator.load(part)).parameters for part in ("function", "explain"))
    assert list(function.values()) == list(explain.values())


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_signal_has_a_name_and_words(name):
    record = mk.WaitRecord(True, name, 3, "compute", 0, "", 5, 21, 8, 9, 1.0)
    for signal in operators.find(name).signals:
        assert records.signal_name(name, signal.number) == signal.name
        assert signal.awaited.format(peer=5, index=21) in str(dataclasses.replace(record, signal=signal.name))
        assert "-1" not in str(dataclasses.replace(record, signal=signal.name, peer=-1))


# -- who knows whom

FOLDERS = ("ops/", "nn/", "integrations/")  # operators themselves, and what is made of them
PUBLIC = ("__init__.py", "api.py")


def names_in(path):
    """Words in the code of a file: identifiers and strings, but not docstrings."""
    tree = ast.parse(path.read_text())
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body and isinstance(node.body[0], ast.Expr)
    }  # fmt: skip
    for node in ast.walk(tree):
        if id(node) in docstrings:
            continue
        for _, value in ast.iter_fields(node):
            for each in value if isinstance(value, list) else [value]:
                if isinstance(each, str):
                    yield node, each


def known_to(path):
    """(line, operator) for each that a file names."""
    words = "|".join([*BUILT_IN, "moe", "mixture.of.experts", "attention"])
    pattern = re.compile(rf"(?<![A-Za-z0-9])_*({words})(?![A-Za-z0-9])", re.I)
    return [(getattr(node, "lineno", 0), match[1]) for node, text in names_in(path) if (match := pattern.search(text))]


@pytest.mark.parametrize("file", sorted(path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py")))
def test_nobody_else_names_an_operator(file):
    if file.startswith(FOLDERS) or file in PUBLIC:
        return
    assert not known_to(SOURCE / file)


@pytest.mark.parametrize(
    "code",
    ['x = "moe_ffn"', "def all_gather_matmul(): pass", "from mkernel.ops import moe", "f(ring_attention=1)",
     'x = {"matmul_all_reduce": 1}', 'f"{x} matmul_reduce_scatter"', "import mkernel.ops.attention as a",
     "_moe_combine"],
)  # fmt: skip
def test_such_names_would_be_found(code, tmp_path):
    path = tmp_path / "module.py"
    path.write_text(f'"""moe_ffn in a docstring."""\n\n# moe_ffn in a comment\n{code}\n')
    assert known_to(path)
    path.write_text('"""moe_ffn in a docstring."""\n\n# moe_ffn in a comment\n')
    assert not known_to(path)


LIGHT = """
import sys
import mkernel
from mkernel import operators
operators.registered()
loaded = [name for name in sys.modules if name.split(".")[0] in ("rich", "typer", "plotly", "greenlet")]
assert not loaded, loaded
tools = ("bench", "demo", "tuning", "workloads", "cli", "compiling", "estimates", "checking", "tables")
loaded = [name for name in sys.modules if name.startswith("mkernel.") and name.split(".")[1] in tools]
loaded += [name for name in sys.modules if name.startswith("mkernel.ops.") and name.split(".")[-1] in
           ("bench", "demo", "tuning", "workload", "baselines")]
assert not loaded, loaded
"""


def test_importing_the_package_imports_no_tool():
    done = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_package_is_a_program():
    done = subprocess.run([sys.executable, "-m", "mkernel", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"mkernel {mk.__version__}\n"), done.stderr
    usage = subprocess.run([sys.executable, "-m", "mkernel", "demo", "--help"], capture_output=True, text=True).stdout
    assert "Usage: mkernel demo" in usage


def test_threads_that_ask_at_the_same_time_all_wait_for_the_operators(monkeypatch):
    known, importing = dict(operators._registered), threading.Event()
    monkeypatch.setattr(operators, "_discovered", False)
    monkeypatch.setattr(operators, "_registered", {})
    lock = threading.Lock()  # as the lock of a module that is being imported

    def import_slowly(name):
        with lock:
            importing.set()
            time.sleep(0.2)
            operators._registered.update(known)

    monkeypatch.setattr(operators.importlib, "import_module", import_slowly)
    found = {}

    def ask(who):
        found[who] = operators.registered()

    first = threading.Thread(target=ask, args=(0,))
    first.start()
    importing.wait(5.0)
    ask(1)
    first.join()
    assert found[0] == found[1] == known
