"""`mkernel plan`: its tables, JSON and page."""

import json
import re
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from typer.testing import CliRunner

from mkernel import cli, operators
from mkernel.runtime.errors import ArgumentError
from mkernel.scale import calibrate
from mkernel.scale.command import parse_nodes
from mkernel.scale.machine import load
from mkernel.scale.predict import predict
from mkernel.scale.timeline import Piece, critical_path, joined, shares


def run(*arguments):
    environment = {"COLUMNS": "200", "TERM": "dumb", "NO_COLOR": "1"}
    return CliRunner(env=environment).invoke(cli.main, ["plan", *arguments])


def words(result):
    return re.sub(r"[\s│┃╭╮╰╯─]+", " ", result.output)


def test_numbers_of_nodes():
    assert parse_nodes("2:16") == [2, 4, 8, 16]
    assert parse_nodes("3:20") == [3, 6, 12]
    assert parse_nodes("2,3,8") == [2, 3, 8]
    for wrong in ("", "0", "4:2", "two", "2:x", "0:4"):
        with pytest.raises(ArgumentError, match="must be numbers of nodes"):
            parse_nodes(wrong)


def test_a_table():
    result = run("all_gather_matmul", "32768x2048x8192", "--nodes", "1:4")
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.output.splitlines() if "x2048x8192" in line]
    assert [row[:2] for row in rows] == [["1", "32768x2048x8192"], ["2", "65536x2048x8192"], ["4", "131072x2048x8192"]]
    assert "modelled" in result.output
    assert "one 400 Gb/s ConnectX-7 per GPU; not measured" in words(result)
    assert "1 send, 10 intra" in result.output


def test_strong_scaling_with_another_network_and_the_best_configuration():
    result = run(
        "matmul_reduce_scatter", "65536x8192x65536", "--nodes", "2,4", "--scaling", "strong", "--nic", "efa", "--search"
    )
    assert result.exit_code == 0, result.output
    assert result.output.count("65536x8192x65536") == 2
    assert "with the network of h200-efa" in result.output
    assert "EFA, two 200 Gb/s devices" in words(result)
    assert "ConnectX-7" not in result.output


def test_what_does_not_fit_into_memory():
    """Weak scaling that no GPU could run: each gathers the rows of all."""
    arguments = ("all_gather_matmul", "65536x2048x8192", "--nodes", "2,64,128")
    assert "of a GPU: 155 GB on 128 nodes." in words(run(*arguments))
    found = json.loads(run(*arguments, "--json").stdout)["results"]
    # the rows of all ranks twice, for two calls in flight; this rank's, the weight and the result
    rows, own = 65536 * 64, 65536 // 16
    expected = 2 * (2 * rows * 8192 + own * 8192 + 2048 * 8192 + rows * 2048)
    assert found[2]["memory_gb"] == pytest.approx(expected / 1e9, rel=0.01)
    assert "not fit" not in run("all_gather_matmul", "65536x2048x8192", "--nodes", "2,64").output


def test_a_late_rank():
    result = run("matmul_reduce_scatter", "65536x8192x16384", "--nodes", "2", "--late", "2000", "--json")
    assert result.exit_code == 0, result.output
    (found,) = json.loads(result.stdout)["results"]
    assert found["late_us"] == pytest.approx(2000)
    assert found["fused_ms"] > 2
    assert "begins 2000 us after the others" in words(run("matmul_reduce_scatter", "--nodes", "2", "--late", "2000"))
    assert "--late" in run("--layer", "mlp", "--nodes", "2", "--late", "5").output


def test_json_and_a_page(tmp_path):
    path = tmp_path / "plan.html"
    result = run(
        "ring_attention", "1x16x65536x128", "--nodes", "1,2", "--causal", "--zigzag", "--json", "--html", str(path)
    )
    assert result.exit_code == 0, result.output
    first, second = json.loads(result.stdout)["results"]
    assert (first["shape"], second["shape"]) == ([1, 16, 65536, 128], [1, 16, 131072, 128])
    assert first["modelled"]
    assert first["options"] == {"causal": True, "zigzag": True}
    assert first["floor_fraction"] == pytest.approx(first["floor_ms"] / first["fused_ms"])
    text = path.read_text()
    for expected in (
        "All figures are modelled",
        'data-plot="times"',
        'data-plot="fractions"',
        'data-plot="timeline-2"',
    ):
        assert expected in text
    shown = json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])
    assert [one["fused_ms"] for one in shown["results"]] == [first["fused_ms"], second["fused_ms"]]


def test_layers():
    result = run("--layer", "mlp", "65536x8192x28672", "--nodes", "2,4", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)["results"]
    assert [(one["nodes"], one["way"]) for one in found] == [
        (n, way) for n in (2, 4) for way in ("forward", "backward")
    ]
    assert found[2]["shape"] == [131072, 8192, 28672]
    for one in found:
        assert one["fused_ms"] == pytest.approx(sum(part["fused_ms"] for part in one["parts"]))
    forward, backward = (one["fused_ms"] for one in found[:2])
    assert 1.5 * forward < backward < 3 * forward
    for name in ("attention", "moe"):
        result = run("--layer", name, "--nodes", "1,2")
        assert result.exit_code == 0, result.output
        assert result.output.count("forward") == result.output.count("backward") == 2
    assert "is not a shape of mlp" in words(run("--layer", "mlp", "3x4"))
    assert "there is no layer 'bakery'" in words(run("--layer", "bakery"))


def test_calibration_writes_a_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(calibrate, "ROUNDS", 5)
    monkeypatch.setattr(calibrate, "TRANSFERS", 2)
    monkeypatch.setattr(calibrate, "FLOODS", 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # test_calibrate.py has a GPU
    path = tmp_path / "here.json"
    result = run("--calibrate", str(path))
    assert result.exit_code == 0, result.output
    machine = load(str(path))
    assert machine.name == "here"
    assert machine.sm_flops == load("h200-cx7").sm_flops
    assert "was not measured" in machine.about
    for name in ("network", "network_seconds", "request_seconds"):
        assert getattr(machine, name) > 0
        assert machine.sources[name].startswith("measured: ")
    told = []
    calibrate.calibrate(path, "h200-efa", told.append)
    assert told == ["the latency of a request", "the rate of large transfers", "many requests"]
    assert (load(str(path)).rails, load(str(path)).network_share) == (1, 1.0)
    assert "must end in .json" in words(run("--calibrate", str(tmp_path / "here.txt")))


@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter", "moe_dispatch_matmul"])
def test_default_shapes_divide(op):
    result = run(op, "--nodes", "3", "--json")
    assert result.exit_code == 0, result.output
    (found,) = json.loads(result.stdout)["results"]
    operator = operators.find(op)
    for name, size in zip(operator.dimensions, found["shape"]):
        assert name not in operator.shared or size % 24 == 0


@pytest.mark.parametrize(("arguments", "kept", "left"), [
    (("matmul_reduce_scatter", "49152x8192x49152", "--nodes", "3:12", "--scaling", "strong"), [3, 6, 12], ""),
    (("matmul_reduce_scatter", "768x8192x49152", "--nodes", "8:64", "--scaling", "strong"), [8, 16, 32], "64 nodes"),
    (("--layer", "mlp", "--nodes", "256:1024"), [256, 512], "1024 nodes: 131072x8192x28672: inter"),
])  # fmt: skip
def test_what_does_not_divide_is_left_out_of_a_range(arguments, kept, left):
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    assert sorted({one["nodes"] for one in json.loads(result.stdout)["results"]}) == kept
    assert left in words(result)
    assert bool(left) == ("left out" in words(result))


@pytest.mark.parametrize(("arguments", "expected"), [
    ((), "name an operator"),
    (("moe_combine",), "has no model in its registry entry; operators that have one: all_gather_matmul,"),
    (("all_gather_matmul", "5x5"), "is not a shape of all_gather_matmul"),
    (("all_gather_matmul", "--nodes", "0"), "must be numbers of nodes"),
    (("all_gather_matmul", "--machine", "abacus"), "there is no machine 'abacus'"),
    (("all_gather_matmul", "32768x2048x8192", "--nodes", "2,3", "--scaling", "strong"), "must be divisible"),
    (("all_gather_matmul", "--dtype", "fp32"), "has no rates for float32"),
    (("all_gather_matmul", "16384x2048x8192", "--nodes", "3"), "must be divisible by the number of ranks (24)"),
    (("--layer", "mlp", "--nodes", "1024"), "inter of mlp (28672) must be divisible by 8192"),
    (("--layer", "mlp", "--nodes", "3:6"), "must be divisible by 24"),
    (("--layer", "attention", "32768x100x8", "--nodes", "2"), "hidden of attention (100) must be divisible by 128"),
    (("--layer", "mlp", "65536x8192x28672", "9x9"), "the shape of a layer is the only argument"),
    (("--layer", "mlp", "--search"), "not possible with --layer"),
    (("--layer", "mlp", "--html", "x.html"), "not possible with --layer"),
    (("--layer", "attention", "--causal"), "not possible with --layer"),
    (("--layer", "mlp", "--dtype", "fp32"), "has no rates for float32"),
    (("all_gather_matmul", "--causal"), "has no such option"),
    (("--calibrate", "x.json", "--html", "x.html"), "not possible with --calibrate, which only measures"),
    (("--calibrate", "x.json", "--causal"), "not possible with --calibrate, which only measures"),
    (("all_gather_matmul", "--calibrate", "x.json"), "only measures; predict with --machine x.json afterwards"),
])  # fmt: skip
def test_mistakes(arguments, expected):
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert expected in words(result)


@pytest.mark.parametrize(("op", "shape", "nodes", "options", "most"), [
    ("matmul_reduce_scatter", (65536, 8192, 16384), 2, {}, "multiply"),
    ("all_gather_matmul", (131072, 2048, 8192), 4, {}, "copy"),
    ("matmul_all_reduce", (4096, 8192, 65536), 16, {}, "network"),
    ("ring_attention", (1, 16, 65536, 128), 2, {"causal": True, "zigzag": True}, "attend"),
    ("moe_ffn", (16384, 2048, 2048), 2, {}, "multiply"),
])  # fmt: skip
def test_the_critical_path_has_all_of_the_time(op, shape, nodes, options, most):
    machine = load("h200-cx7")
    found = predict(op, shape, machine=machine, nodes=nodes, options=options, timeline=True)
    path = critical_path(found.engine)
    assert path[0].begin == pytest.approx(machine.launch_seconds)
    assert path[-1].end == pytest.approx(found.engine.end)
    for before, after in pairwise(path):
        assert after.begin == pytest.approx(before.end, abs=1e-9)
        assert before.begin < before.end
    parts = shares(path)
    assert sum(parts.values()) == pytest.approx(1.0)
    assert most in list(parts)[:2]


def test_a_critical_path_goes_where_the_time_does():
    """With a network that is far away, all the time is its own."""
    far = replace(load("h200-cx7"), network_seconds=0.1)
    found = predict("all_gather_matmul", (65536, 2048, 8192), machine=far, nodes=2, timeline=True)
    parts = shares(critical_path(found.engine))
    assert parts["network"] > 0.9
    slow = replace(load("h200-cx7"), copy=1e9)
    found = predict("all_gather_matmul", (65536, 2048, 8192), machine=slow, nodes=2, timeline=True)
    assert shares(critical_path(found.engine))["copy"] > 0.9


def test_short_pieces_join_their_neighbours():
    pieces = [Piece("a", 0, 1), Piece("a", 1, 2), Piece("b", 2, 2.001), Piece("a", 2.001, 4)]
    assert joined(pieces) == [Piece("a", 0, 4)]


def test_options_are_those_of_operators_that_can_be_planned():
    assert "--zigzag" in run("--help").output
    assert "--quantize" not in run("--help").output
