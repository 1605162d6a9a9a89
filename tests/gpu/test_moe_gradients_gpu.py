"""Gradients of the mixture-of-experts operators on a GPU that several ranks share."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.forked_processes import run_python, torchrun
from support.moe_gradients import ffn_gradients, halves_gradients, rows_gradients
from support.moe_reference import Layer

import mkernel as mk

EXAMPLE = Path(__file__).parents[2] / "examples" / "09_train_moe.py"
LAYERS = {
    (1, 1): Layer((70,), (3,), hidden=136, out=72),
    (1, 2): Layer((90, 50), (2, 3), hidden=128, out=64),
    (2, 2): Layer((90, 3, 117, 0), (2, 1, 2, 3), k=4, hidden=128, out=64),
}


@pytest.mark.parametrize("call", [ffn_gradients, halves_gradients])
@pytest.mark.parametrize("save", ["inputs", "activations"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("cluster", LAYERS)
def test_threads(cluster, dtype, save, call):
    nodes, gpus = cluster
    layer = replace(LAYERS[cluster], dtype=dtype)

    def on_rank(group):
        results = [call(group, layer, turn, save=save, max_tokens=120) for turn in (0, 1, 0)]
        for one, other in zip(results[0], results[2], strict=True):
            assert torch.equal(one, other), "the same inputs give the same bits"

    mk.spawn(on_rank, nodes=nodes, gpus_per_node=gpus, device="cuda", timeout=30.0)


@pytest.mark.parametrize("call", [ffn_gradients, halves_gradients, rows_gradients])
@pytest.mark.parametrize("cluster", LAYERS)
def test_biases_and_rows_alone(cluster, call):
    """With biases, forward and backward; and a dispatch without a GEMM."""
    layer = replace(LAYERS[cluster], has_bias=call is not rows_gradients)

    def on_rank(group):
        for turn in (0, 1):
            call(group, layer, turn, max_tokens=120)

    mk.spawn(on_rank, nodes=cluster[0], gpus_per_node=cluster[1], device="cuda", timeout=30.0)


@pytest.mark.parametrize("ranks", ["processes", "threads"])
def test_a_model_is_trained(ranks):
    """The example compares its loss with that of the model on one device, at every step."""
    if ranks == "processes":
        output = torchrun(EXAMPLE, 4, seconds=300)
    else:
        output = run_python([str(EXAMPLE), "cuda"], seconds=300)
    assert output.count("in 20 steps, relative difference") == 4, output
