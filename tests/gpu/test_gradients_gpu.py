"""Gradients of the GEMM operators on a GPU that several ranks share: as threads, as processes, compiled, in a model."""

from pathlib import Path

import pytest
import torch
from support import gradient_cases
from support.forked_processes import run_python, torchrun
from support.gradient_reference import check

import mkernel as mk

EXAMPLE = Path(__file__).parents[2] / "examples" / "07_train_llama.py"
SUPPORT = Path(__file__).parents[1] / "support"


@pytest.fixture(autouse=True)
def sums_in_fp32(monkeypatch):
    """Local products are PyTorch's; their bound allows no partial sums in 16 bits."""
    for name in ("bf16", "fp16"):
        monkeypatch.setattr(torch.backends.cuda.matmul, f"allow_{name}_reduced_precision_reduction", False)


@pytest.mark.parametrize("cluster", [(1, 1), (1, 2), (1, 4), (2, 2)])
@pytest.mark.parametrize("name", gradient_cases.gpu_cases(1))
def test_threads(name, cluster):
    nodes, gpus = cluster
    case = gradient_cases.gpu_cases(nodes * gpus)[name]
    mk.spawn(check, case, nodes=nodes, gpus_per_node=gpus, device="cuda", timeout=30.0)


@pytest.mark.parametrize(("nodes", "gpus_per_node"), [(1, 4), (2, 2)])
def test_processes(nodes, gpus_per_node):
    arguments = ["gather", "scatter", "reduce", f"--gpus-per-node={gpus_per_node}"]
    output = torchrun(SUPPORT / "gradients_on_gpus.py", 4, seconds=300, arguments=arguments)
    for rank in range(4):
        assert f"gradients are right on rank {rank} of {nodes} x {gpus_per_node}, cuda" in output, output


def test_compiled():
    output = torchrun(SUPPORT / "gradients_on_gpus.py", 2, seconds=300, arguments=["compiled"])
    assert output.count("gradients are right on rank") == 2, output


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("ranks", ["processes", "threads"])
def test_a_model_is_trained(ranks, dtype):
    """The example compares its loss with that of the model on one device, at every step."""
    arguments = ["--bf16"] if dtype == "bf16" else []
    if ranks == "processes":
        output = torchrun(EXAMPLE, 4, seconds=300, arguments=arguments)
    else:
        output = run_python([str(EXAMPLE), "cuda", *arguments], seconds=300)
    assert output.count("in 20 steps, relative difference") == 4, output
