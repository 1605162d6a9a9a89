"""NCCL and PyTorch's symmetric memory beside the fused operators: in processes, over gloo instead of GPUs."""

import contextlib
import csv
import json
import os
import re
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from support import gloo_ranks
from support.bench_figures import result
from support.patience import HANG
from torch.distributed import _symmetric_memory as symmetric_memory

from mkernel import bench, operators
from mkernel.bench import baselines, nccl, peers, shared_gpu
from mkernel.bench import page as bench_page
from mkernel.bench.benchmark import Benchmark
from mkernel.bench.problems import Problem
from mkernel.bench.shapes import Wanted
from mkernel.ops.moe import bench as moe

PRODUCTS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
EXPERTS = ("moe_dispatch_matmul", "moe_ffn")


# -- what can be measured


@pytest.mark.parametrize(
    ("name", "ranks", "nodes", "gpus", "words"),
    [
        ("nccl", 2, 2, 4, "got --nodes 2; use --nodes 1"),
        ("symm_mem", 1, 1, 1, "2 or more ranks, got --ranks 1"),
        ("nccl", 4, 1, 1, "there are 1 for 4 ranks; --against host works with one"),
        ("nccl", 8, 1, 4, "there are 4 for 8 ranks; --ranks 4 or fewer would work"),
        ("nccl", 2, 1, 2, None),
        ("symm_mem", 2, 1, 2, None),
        ("symm_mem", 4, 1, 1, "need MPS, but there is no nvidia-cuda-mps-control here"),
    ],
)
def test_where_they_can_be_measured(monkeypatch, tmp_path, name, ranks, nodes, gpus, words):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setenv("PATH", str(tmp_path))
    refused = baselines.refusal(name, ranks, nodes)
    assert (refused is None) if words is None else (words in refused)


@pytest.mark.parametrize(
    ("op", "shape", "dtype", "words"),
    [
        ("ring_attention", (1, 2, 16, 4), torch.bfloat16, "no symmetric-memory operator for attention"),
        ("matmul_all_reduce", (64, 64, 64), torch.float16, "bf16 and fp32, not fp16"),
        ("matmul_all_reduce", (65, 63, 64), torch.bfloat16, "m x n must be even"),
        ("moe_ffn", (64, 64, 64), torch.bfloat16, "needs NVSHMEM"),
        ("a_new_operator", (64, 64), torch.bfloat16, "a_new_operator has no such baseline yet"),
        ("all_gather_matmul", (65, 63, 64), torch.float16, None),
        ("matmul_all_reduce", (65, 63, 64), torch.float32, None),
    ],
)
def test_what_symmetric_memory_has_not(monkeypatch, op, shape, dtype, words):
    new = operators.Operator(
        "a_new_operator", "does nothing", len, len, ("rows", "columns"), (), ((64, 64),), bench=Benchmark(dict)
    )
    monkeypatch.setitem(operators._registered, new.name, new)
    monkeypatch.setattr(symmetric_memory, "is_nvshmem_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(peers, "run", lambda *_, **__: {"status": "measured", "ms": 1.5})
    figures = baselines.measure("symm_mem", op, shape, ranks=2, dtype=dtype, bound=1.0, fused_ms=1.0, repeats=4)
    if words is None:
        assert (figures["symm_mem_status"], figures["symm_mem_ms"], figures["symm_mem_speedup"]) == (
            "measured",
            1.5,
            1.5,
        )
    else:
        assert figures["symm_mem_status"] == "not available"
        assert words in figures["symm_mem_note"]
        assert figures["symm_mem_ms"] is None


@pytest.mark.parametrize("broken", [False, True])
def test_ranks_that_share_a_gpu(monkeypatch, broken):
    """Symmetric memory is measured under MPS, with the fused operator beside it, and the remark says so."""
    asked = []

    def measure(*given):
        asked.append(given)
        if broken:
            raise peers.PeerFailure("rank 1: ValueError: no")
        return [dict(status="measured", ours_ms=2.0, ms=3.0, way="that way", max_error=0.5, note="n")]

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(shared_gpu, "measure", measure)
    options = dict(ranks=4, dtype=torch.bfloat16, bound=1.0, fused_ms=1.0, repeats=4)
    figures = baselines.measure("symm_mem", "matmul_all_reduce", (64, 64, 64), **options)
    assert asked == [([("matmul_all_reduce", (64, 64, 64))], 4, torch.bfloat16)]
    remark = baselines.remarks(figures)["symm_mem"]
    if broken:
        assert remark == "symm_mem: failed: rank 1: ValueError: no"
        return
    assert (figures["symm_mem_ms"], figures["symm_mem_fused_ms"], figures["symm_mem_speedup"]) == (3.0, 2.0, 1.5)
    assert "that way takes 1.50 times the fused time; 4 processes share a GPU under MPS, links are not paced" in remark
    assert "2.000 fused, 3.000 that way; n" in remark
    monkeypatch.setattr(symmetric_memory, "is_nvshmem_available", lambda: True)
    figures = baselines.measure("symm_mem", "moe_ffn", (64, 64, 64), **options)
    assert figures["symm_mem_note"] == "moe_ffn is not measured in processes that share a GPU"


def test_a_torch_without_nccl(monkeypatch):
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    assert "without NCCL" in nccl.refusal(Problem, (64, 64, 64), torch.bfloat16)


def test_no_process_reports(monkeypatch):
    def run(*_, **__):
        raise peers.PeerFailure("rank 1: ValueError: no")

    monkeypatch.setattr(peers, "run", run)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    shape, options = (64, 64, 64), dict(ranks=2, dtype=torch.bfloat16, bound=1.0, fused_ms=1.0, repeats=4)
    figures = baselines.measure("nccl", "all_gather_matmul", shape, **options)
    assert (figures["nccl_status"], figures["nccl_note"]) == ("failed", "rank 1: ValueError: no")
    assert not baselines.is_right(figures)


# -- processes


@pytest.mark.thorough
def test_every_way_of_every_operator():
    """The same code as on GPUs, over gloo; the errors are against float64."""
    single, half = torch.float32, torch.bfloat16
    cases = [(name, op, (12, 6, 10), single, 1e-4, 4, ()) for name in baselines.LIBRARIES for op in PRODUCTS]
    cases += [(name, op, (8, 4, 6), single, 1e-5, 4, ()) for name in baselines.LIBRARIES for op in EXPERTS]
    cases += [("nccl", "all_gather_matmul_weight_grad", (12, 6, 10), single, 1e-4, 4, ())]
    masks = [(), ("causal",), ("zigzag",), ("causal", "zigzag")]
    cases += [("nccl", "ring_attention", (1, 2, 16, 4), single, 1.0, 4, mask) for mask in masks]
    right = len(cases)
    cases += [
        ("symm_mem", "matmul_all_reduce", (12, 6, 10), half, 1.0, 4, ()),
        ("symm_mem", "matmul_all_reduce", (gloo_ranks.SPOILED, 6, 10), single, 1e-4, 4, ()),
        ("nccl", "matmul_all_reduce", (12, 6, 10), single, 1e-12, 4, ()),
    ]
    reports = peers.run(gloo_ranks.measure_all, 2, cases, seconds=HANG)
    assert len(reports) == len(cases)
    for case, report in zip(cases[:right], reports):
        assert report["status"] == "measured", (case, report)
        assert 0 < report["ms"] < 1e3 * HANG
        assert 0 < report["max_error"] <= case[4]
        assert (case[0] == "nccl") == ("then" in report["way"] and "vdev" not in report["way"])
    no_multicast, spoiled, too_wrong = reports[right:]
    assert no_multicast["way"] in ("one_shot_all_reduce", "two_shot_all_reduce_")
    assert "multimem_all_reduce_ was skipped" in no_multicast["note"]
    assert re.search(r"(one|two)_shot_all_reduce_? takes \d+\.\d+ ms", no_multicast["note"])
    assert (spoiled["status"], spoiled["way"]) == ("wrong", "two_shot_all_reduce_")
    assert "one_shot_all_reduce has an error of 1, but at most 0.0001 is allowed; it was not timed" in spoiled["note"]
    assert "multimem_all_reduce_ failed: multicast is out of order" in spoiled["note"]
    assert too_wrong["status"] == "wrong"
    assert "ms" not in too_wrong
    # both kinds of experts were there: with rows, and without any
    chosen = torch.cat([moe.tokens_of(rank, 2, 4, 6, single, torch.device("cpu")).ids.flatten() for rank in range(2)])
    assert 0 < len(chosen.unique()) < 2 * moe.EXPERTS


def are_gone(folder, ranks):
    for rank in range(ranks):
        with pytest.raises(ProcessLookupError):
            os.kill(int((folder / f"rank {rank}").read_text()), 0)


@pytest.mark.thorough
def test_a_rank_that_fails_ends_the_others(tmp_path):
    with pytest.raises(peers.PeerFailure, match=r"^rank 1: ValueError: no such memory$"):
        peers.run(gloo_ranks.fail, 2, tmp_path, seconds=HANG)
    are_gone(tmp_path, 2)


@pytest.mark.thorough
def test_a_rank_that_is_killed(tmp_path):
    with pytest.raises(peers.PeerFailure, match=r"^process 0 terminated with signal SIGKILL; rank 0: out of memory$"):
        peers.run(gloo_ranks.be_killed, 1, tmp_path, seconds=HANG)
    are_gone(tmp_path, 1)


@pytest.mark.thorough
def test_ranks_that_hang_are_ended(tmp_path, monkeypatch):
    """As soon as both hang, the time is over."""
    real = time.monotonic

    def monotonic():
        hanging = [(tmp_path / f"hangs {rank}").exists() for rank in range(2)]
        return real() + (2 * HANG if all(hanging) else 0.0)

    monkeypatch.setattr(peers, "time", SimpleNamespace(monotonic=monotonic))
    with pytest.raises(peers.PeerFailure, match=rf"^it took longer than {HANG:g} s; rank 0: hanging, rank 1: hanging$"):
        peers.run(gloo_ranks.hang, 2, tmp_path, seconds=HANG)
    are_gone(tmp_path, 2)


def test_a_call_is_timed_from_when_all_have_come(monkeypatch):
    """On a fake GPU: with the cache cleared, after a barrier, and as long as the slowest rank takes."""
    done = []

    class Event:
        def __init__(self, enable_timing):
            pass

        def record(self, stream):
            done.append("event")

        def elapsed_time(self, end):
            return 2.0

    class Stream:
        def __init__(self, device):
            self.device = device
            self.wait_event = self.wait_stream = self.synchronize = lambda *_: None

    for name, fake in (
        ("Event", Event),
        ("Stream", Stream),
        ("stream", lambda _: contextlib.nullcontext()),
        ("current_stream", lambda: Stream("cpu")),
        ("_sleep", lambda _: None),
    ):
        monkeypatch.setattr(torch.cuda, name, fake)
    cache = SimpleNamespace(zero_=lambda: done.append("clear"))
    monkeypatch.setattr(torch, "empty", lambda *_, **__: cache)
    peer = SimpleNamespace(exchange=lambda times: [times, [5.0 for _ in times]])
    watch = baselines.PeerStopwatch(peer, lambda: done.append("barrier"))
    assert watch.bursts({"way": lambda: done.append("call")}, 4) == {"way": 5.0}
    assert done == ["clear", "barrier", "event", "call", "event"] * 8  # four to warm up


# -- beside the fused operator


def figures_of(name, **changes):
    found = {
        "ms": 3.75,
        "speedup": 1.25,
        "way": "that way",
        "max_error": 0.4,
        "status": "measured",
        "note": "",
    } | changes
    return {f"{name}_{key}": value for key, value in found.items()}


NOT_THERE = figures_of(
    "symm_mem", ms=None, speedup=None, way=None, max_error=None, status="not available", note="no operator"
)
BROKEN = figures_of(
    "nccl", ms=None, speedup=None, way=None, max_error=None, status="failed", note="rank 1: ValueError: no"
)
WRONG = figures_of("symm_mem", ms=4.5, speedup=1.5, status="wrong", note="another way is wrong by 7")

FASTER = "NCCL: that way takes 1.25 times the fused time\n"


@pytest.fixture
def gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200")


OPTIONS = dict(ranks=4, nodes=1, dtype="bf16", link=None, network=None)
WANTED = [Wanted("all_gather_matmul", (64, 64, 64)), Wanted("all_gather_matmul", (128, 64, 64))]


def test_they_are_measured_after_the_fused_operator(gpus, monkeypatch):
    asked = []

    def measure(name, op, shape, **options):
        asked.append((name, op, shape, options))
        return figures_of(name)

    monkeypatch.setattr(bench, "spawn", lambda *_, **__: [result(error_bound=2.5)])
    monkeypatch.setattr(baselines, "measure", measure)
    (figures,) = bench.run(
        "ring_attention", [(1, 2, 16, 4)], ranks=4, dtype=torch.bfloat16, link=None, repeats=8,
        against=("symm_mem", "host", "nccl"), options=("causal",),
    )  # fmt: skip
    given = dict(ranks=4, dtype=torch.bfloat16, bound=2.5, fused_ms=3.0, repeats=8, options=("causal",))
    assert asked == [(name, "ring_attention", (1, 2, 16, 4), given) for name in ("nccl", "symm_mem")]
    assert figures["fused_ms"] == 3.0
    assert figures["nccl_ms"] == figures["symm_mem_ms"] == 3.75


@pytest.mark.parametrize(
    ("added", "code", "words"),
    [
        (figures_of("nccl") | NOT_THERE, 0, (FASTER, "symm_mem: not available: no operator\n", " 3.750")),
        (BROKEN | figures_of("symm_mem", note="n"), 1, ("NCCL: failed: rank 1: ValueError: no\n", "time; n\n")),
        (
            figures_of("nccl") | WRONG,
            1,
            (FASTER, "symm_mem: WRONG RESULT: another way is wrong by 7; that way takes 1.50 times", "4.500"),
        ),
    ],
)
def test_the_table_and_the_files(gpus, monkeypatch, capsys, tmp_path, added, code, words):
    monkeypatch.setattr(bench, "run", lambda op, shapes, **_: [result(op, shapes[0], emulated=False) | added])
    paths = {f"{kind}_path": tmp_path / f"figures.{kind}" for kind in ("json", "csv", "html")}
    assert bench.main(WANTED, **OPTIONS, against=("host", "nccl", "symm_mem"), **paths) == code
    text = capsys.readouterr().out
    for each in words:
        assert text.count(each) == len(WANTED)
    header, _, *lines = (line for line in text.split("\nall_gather_matmul\n")[1].splitlines()[:6] if line.strip())
    for name, figure in (("fused", "3.000"), ("NCCL", "3.750" if added["nccl_ms"] else "-")):
        for line in lines[: len(WANTED)]:
            assert header.index(name) + len(name) == line.index(figure, header.index(name) - 8) + len(figure)
    written = json.loads(paths["json_path"].read_text())["results"]
    assert all(one.items() >= added.items() for one in written)
    with open(paths["csv_path"], newline="") as file:
        rows = list(csv.DictReader(file))
    assert all(row[key] == ("" if value is None else str(value)) for row in rows for key, value in added.items())
    page = paths["html_path"].read_text()
    for said in baselines.remarks(added).values():
        assert f"128x64x64: {said}" in page
    for key in ("nccl_ms", "symm_mem_ms"):
        assert (bench_page.BARS[key] in page) == (added[key] is not None)


@pytest.mark.parametrize("against", [("nccl",), ("host", "nccl", "symm_mem")])
def test_too_few_gpus_are_told_before_anything_is_measured(gpus, monkeypatch, capsys, against):
    monkeypatch.setattr(bench, "run", lambda *_, **__: pytest.fail("measured"))
    assert bench.main(WANTED, **(OPTIONS | dict(ranks=8)), against=against) == 2
    text = capsys.readouterr().out
    assert "--against nccl: it needs one GPU per rank, but there are 4 for 8 ranks; --ranks 4 or fewer" in text
