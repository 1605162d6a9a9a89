"""Benchmarks, without measuring: what is asked for, what is printed and written, what is said beside it."""

import csv
import inspect
import json
from pathlib import Path

import pytest
import torch
from support.bench_figures import result

import mkernel as mk
from mkernel import bench, operators
from mkernel.bench import page as bench_page
from mkernel.bench import published, shapes
from mkernel.bench.shapes import Wanted

ALL = list(operators.registered("bench").values())
GATHER, SCATTER, REDUCE = (
    operators.find(name) for name in ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
)
BY_NAME = {GATHER.name: GATHER, SCATTER.name: SCATTER}


# -- shapes


def test_shapes_are_read():
    assert shapes.parse(" 16384X2048x8192 ", GATHER, 4) == (16384, 2048, 8192)
    assert shapes.parse("64x8x12", GATHER, 4) == (64, 8, 12)


@pytest.mark.parametrize(
    ("text", "operator", "words"),
    [
        ("64x64", GATHER, "m_total x n x k as 3 integers"),
        ("64x0x64", GATHER, "1 or more: 16384x2048x8192"),
        ("64x-1x64", GATHER, "is not a shape"),
        ("", GATHER, "is not a shape"),
        ("66x8x8", GATHER, r"m_total of all_gather_matmul \(66\) must be divisible by the number of ranks \(4\)"),
        ("64x8x66", SCATTER, r"k of matmul_reduce_scatter \(66\)"),
    ],
)
def test_shapes_that_are_none(text, operator, words):
    with pytest.raises(mk.ArgumentError, match=words):
        shapes.parse(text, operator, 4)


def write(tmp_path, text):
    path = tmp_path / "shapes.txt"
    path.write_text(text)
    return path


def test_a_file_of_shapes(tmp_path):
    path = write(tmp_path, "# mine\nall_gather_matmul 64x32x16  # small\n\nmatmul_reduce_scatter 64x64x64\n")
    both = shapes.read(path, BY_NAME, None, 4)
    assert both == [Wanted("all_gather_matmul", (64, 32, 16)), Wanted("matmul_reduce_scatter", (64, 64, 64))]
    assert shapes.read(path, BY_NAME, "matmul_reduce_scatter", 4) == both[1:]
    assert shapes.read(write(tmp_path, "64x32x16"), BY_NAME, "all_gather_matmul", 4) == both[:1]


@pytest.mark.parametrize(
    ("text", "op", "words"),
    [
        ("64x64x64", None, ":1: write an operator and a shape, such as: all_gather_matmul 16384x2048x8192"),
        ("\nall_gather_matmul 64 x 64", None, ":2: write an operator"),
        ("all_gather 64x64x64", None, ":1: there is no operator 'all_gather'"),
        ("all_gather_matmul 64x64", None, ":1: '64x64' is not a shape"),
        ("# nothing", None, "has no shapes; write lines such as"),
        ("matmul_reduce_scatter 64x64x64", "all_gather_matmul", "has no shapes of all_gather_matmul"),
        ("\udcff", None, "cannot be read: it is not a text file"),
    ],
)
def test_files_that_say_something_else(tmp_path, text, op, words):
    path = tmp_path / "shapes.txt"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(mk.ArgumentError, match=words):
        shapes.read(path, BY_NAME, op, 4)


def test_no_file():
    with pytest.raises(mk.ArgumentError, match="'small', 'paper' or a file"):
        shapes.read(Path("no/such/file"), BY_NAME, None, 4)


@pytest.mark.parametrize("which", ["default", "small", "paper"])
@pytest.mark.parametrize("operator", ALL, ids=lambda operator: operator.name)
def test_sets(operator, which):
    if which == "paper" and operator.load("bench").published is None:
        with pytest.raises(mk.ArgumentError, match=f"there are no published figures for {operator.name}"):
            shapes.choose([operator], which, 4)
        return
    wanted = shapes.choose([operator], which, 4)
    assert wanted
    for one in wanted:
        assert len(one.shape) == len(operator.dimensions)
        assert (one.row is not None) == (which == "paper")


# -- published figures


def test_published_figures_have_their_source():
    known = published.figures()
    assert "UC Berkeley" in known["source"]
    assert "MIT" in known["licence"]
    assert set(known["ops"]) == {operator.name for operator in ALL if operator.load("bench").published is not None}
    for name in known["ops"]:
        rows = published.rows(name)
        assert rows
        assert all(row["size"] > 1000 and row["mkernel"] > 0 for row in rows)


@pytest.mark.parametrize(
    ("operator", "flops"),
    [
        (GATHER, lambda m, n, k: 2 * m * n * k),
        (SCATTER, lambda m, n, k: 2 * m * n * k / 4),
        (REDUCE, lambda m, n, k: 2 * m * n * k / 4),
    ],
    ids=["gather", "scatter", "reduce"],
)
def test_a_rank_computes_as_much_as_there(operator, flops):
    """m = k = M and n = M/16, or m = n = M and k = M/16 per rank: 2*M^3/16 FLOPs in all three."""
    for row in published.rows(operator.name):
        assert flops(*operator.load("bench").published.shape(row["size"], 4)) == 2 * row["size"] ** 3 / 16


def test_a_published_figure_with_its_floor():
    """At the largest shape the floor is the library's: a quarter of what 4 ranks on one GPU took for theirs."""
    row, how = published.rows("all_gather_matmul")[-1], GATHER.load("bench").published
    found = published.beside(how, row, result(library_ms=25.0), "NVIDIA H200")
    assert found["published_ms"] == 9.772
    assert found["published_nccl_ms"] == 11.811
    assert found["published_floor_fraction"] == pytest.approx(25.0 / 4 / 9.772)
    # with a fast library it is what 7 peers get over NVLink, from both nodes: 14 blocks of 2048 x 32768
    found = published.beside(how, row, result(library_ms=0.1), "NVIDIA H200")
    assert found["published_floor_fraction"] == pytest.approx(14 * 2048 * 32768 * 2 / 450e9 * 1e3 / 9.772)


def test_attention_has_fewer_blocks_of_keys():
    """4 ranks compute a quarter of what 16 do with each block; 4 of them share a GPU."""
    row, how = published.rows("ring_attention")[-1], operators.find("ring_attention").load("bench").published
    found = published.beside(how, row, result("ring_attention", library_ms=100.0), "NVIDIA H200")
    assert found["published_floor_fraction"] == pytest.approx(100.0 / 4 * 4 / 134.909)


@pytest.mark.parametrize("operator", ALL, ids=lambda operator: operator.name)
def test_every_operator_can_be_measured(operator):
    """What measures it takes a group, the numbers of a shape, what all of them take, and its options."""
    names = list(inspect.signature(operator.load("bench").measure).parameters)
    assert names[0] == "group"
    count = 1 + len(operator.dimensions)
    assert names[count : count + 3] == ["dtype", "config", "repeats"]
    assert names[count + 3 :] == [option.name for option in operator.options if option.bench]


def test_no_floor_without_its_gpu():
    row, how = published.rows("all_gather_matmul")[0], GATHER.load("bench").published
    found = published.beside(how, row, result(), "NVIDIA A100")
    assert found["published_floor_fraction"] is None
    assert "A100" in found["published_note"]


def test_no_floor_is_above_what_was_taken():
    """Links alone never take longer than a published call did."""
    for operator in ALL:
        for row in published.rows(operator.name):
            nvlink, network = operator.load("bench").published.traffic(row["size"])
            took = max(nvlink / published.NVLINK, network / published.NETWORK) * 1e3
            assert 0 < took < row["mkernel"], (operator.name, row)


# -- the run


@pytest.fixture
def fake(monkeypatch):
    """A GPU that gives figures from nowhere; what was asked for is in the list."""
    asked = []

    def run(op, wanted, **options):
        asked.append((op, wanted, options))
        return [result(op, wanted[0])]

    monkeypatch.setattr(bench, "run", run)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200")
    return asked


OPTIONS = dict(ranks=4, nodes=1, dtype="bf16", link=450.0, network=50.0)


def test_the_table(fake, capsys):
    wanted = [Wanted("all_gather_matmul", (16384, 2048, 8192)), Wanted("matmul_reduce_scatter", (4096, 8192, 8192))]
    assert bench.main(wanted, **OPTIONS) == 0
    assert [(op, shape) for op, shape, _ in fake] == [(one.op, [one.shape]) for one in wanted]
    assert fake[0][2] == dict(ranks=4, nodes=1, dtype=torch.bfloat16, link=450.0, network=50.0, against=(), options=())
    text = capsys.readouterr().out
    assert text.count(" emulated") == 2
    for words in ("all_gather_matmul", "matmul_reduce_scatter", "m_total", "floor fraction", "0.900", "4.200"):
        assert words in text
    header, _, line = (line for line in text.split("\nall_gather_matmul\n")[1].splitlines()[:6] if line.strip())
    assert header.index("floor fraction") + len("floor fraction") == line.index("0.900") + len("0.900")


def test_published_figures_stand_beside(fake, capsys):
    wanted = shapes.choose([GATHER], "paper", 4)[-1:]
    assert bench.main(wanted, **OPTIONS) == 0
    text = capsys.readouterr().out
    assert "9.772" in text
    assert "not the same: 1 node x 4 ranks on 1 GPU instead of 2 nodes x 8 H200" in text
    assert "UC Berkeley" in text


def test_a_wrong_result_and_a_failure(fake, monkeypatch, capsys, tmp_path):
    def run(op, wanted, **options):
        if wanted[0][0] == 64:
            raise mk.CommTimeout("rank 0 waited\nfor long")
        return [result(max_error=float("inf"))]

    monkeypatch.setattr(bench, "run", run)
    path = tmp_path / "figures.json"
    wanted = [Wanted("all_gather_matmul", (m, 64, 64)) for m in (64, 128)]
    assert bench.main(wanted, **OPTIONS, json_path=path) == 1
    text = capsys.readouterr().out
    assert "failed: rank 0 waited" in text
    assert "WRONG RESULT" in text
    written = json.loads(path.read_text(), parse_constant=pytest.fail)  # no Infinity, which is no JSON
    assert [one.get("failed") for one in written["results"]] == ["rank 0 waited", None]
    assert written["results"][1]["max_error"] is None
    assert "WRONG RESULT" in bench_page.page(written)


def test_files(fake, tmp_path):
    paths = {f"{kind}_path": tmp_path / f"figures.{kind}" for kind in ("json", "csv", "html")}
    wanted = shapes.choose([GATHER], "paper", 4)[:2] + [Wanted("matmul_reduce_scatter", (4096, 8192, 8192))]
    assert bench.main(wanted, **OPTIONS, **paths) == 0
    written = json.loads(paths["json_path"].read_text())
    assert written["machine"]["gpu"] == "NVIDIA H200"
    assert [tuple(one["shape"]) for one in written["results"]] == [one.shape for one in wanted]
    with open(paths["csv_path"], newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["op"] for row in rows] == [one.op for one in wanted]
    assert {row["emulated"] for row in rows} == {"True"}
    assert [row["published_ms"] for row in rows] == ["0.356", "0.741", ""]
    page = paths["html_path"].read_text()
    assert "Emulated figures" in page
    assert page.count("emulated") > 3


def test_no_gpu(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench.main([], **OPTIONS) == 1
    assert "needs a GPU" in capsys.readouterr().out
