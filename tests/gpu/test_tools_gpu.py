"""Demo, bench and doctor on a GPU. Compiling takes most of the time: about a minute for each operator."""

import json

import pytest
import torch

import mkernel as mk
from mkernel import bench, operators
from mkernel.bench import baselines, shapes
from mkernel.ops.reduce.bench import bound_of

ALL = list(operators.registered("bench").values())

SHOWN = (
    "fused_ms", "library_ms", "wire_ms", "network_ms", "host_driven_ms", "speedup", "floor_fraction",
    "sustained_floor_fraction", "max_error", "error_bound",
)  # fmt: skip


@pytest.mark.parametrize("operator", ALL, ids=lambda operator: operator.name)
def test_bench_measures_what_tables_and_pages_show(operator):
    (result,) = bench.run(operator.name, operator.small, ranks=2, dtype=torch.bfloat16, link=450.0, repeats=4)
    assert result["op"] == operator.name
    for name in SHOWN:
        assert isinstance(result[name], float), name
    assert result["max_error"] <= result["error_bound"]
    assert result["emulated"] == (torch.cuda.device_count() < 2 or result["link_gb_per_s"] is not None)
    assert (result["ranks"], result["nodes"], result["gpus"]) == (2, 1, torch.cuda.device_count())


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter"])
def test_backward_passes_are_measured(op, nodes):
    shapes = operators.find(op).small
    options = dict(dtype=torch.bfloat16, link=450.0, network=50.0, repeats=4, options=["backward"])
    (result,) = bench.run(op, shapes, ranks=2, nodes=nodes, **options)
    for name in SHOWN:
        assert isinstance(result[name], float), name
    assert result["max_error"] <= result["error_bound"], result["errors"]


@pytest.mark.parametrize("name", baselines.LIBRARIES)
@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"])
def test_other_ways_in_processes(name, op, monkeypatch):
    """With one GPU both processes take it: then the times mean nothing, but the results do."""
    if torch.cuda.device_count() < 2:
        if name == "nccl":
            pytest.skip("NCCL wants a GPU for each rank")
        for variable in ("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "TORCH_SYMMMEM_ALLOW_OVERLAPPING_DEVICES"):
            monkeypatch.setenv(variable, "1")
    bound = bound_of(512, 256, 2, torch.bfloat16)
    options = dict(ranks=2, dtype=torch.bfloat16, bound=bound, fused_ms=1.0, repeats=4)
    figures = baselines.measure(name, op, (512, 512, 512), **options)
    assert figures[f"{name}_status"] == "measured", figures
    assert figures[f"{name}_ms"] > 0


def test_bench_writes_its_files(tmp_path, capsys):
    pytest.importorskip("plotly")
    paths = {f"{kind}_path": tmp_path / f"figures.{kind}" for kind in ("json", "csv", "html")}
    wanted = shapes.choose([ALL[0]], "paper", 2)[:1]
    code = bench.main(wanted, ranks=2, nodes=1, dtype="bf16", link=450.0, network=50.0, **paths)
    assert code == 0, capsys.readouterr().out
    (result,) = json.loads(paths["json_path"].read_text())["results"]
    assert result["published_ms"] == 0.356
    assert all(path.stat().st_size for path in paths.values())


@pytest.mark.parametrize("operator", ALL, ids=lambda operator: operator.name)
def test_demo(operator):
    pytest.importorskip("rich")
    from mkernel import demo

    shown = demo._measure(operator, 2, 0, lambda: None)
    assert shown.wrong == []
    assert 0 < shown.times["fused"] < 1000
    assert 0 < shown.times["library"] < 1000


def test_doctor_sees_the_gpu():
    diagnosis = mk.diagnose()
    text = str(diagnosis)
    assert "could not be examined" not in text
    assert "GPU 0: " in text
    assert torch.cuda.get_device_name(0) in text
    assert any(finding.name == "dma-buf" for finding in diagnosis.findings)
