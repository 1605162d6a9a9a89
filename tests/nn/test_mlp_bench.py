"""The steps of the benchmark of the whole MLP, in the simulator."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

import mkernel as mk
from mkernel.nn import bench
from mkernel.runtime.world import Launch


@pytest.mark.parametrize("ranks", [1, 2])
def test_fused_steps_compute_the_mlp_and_its_gradients(ranks):
    tokens, hidden, inner = 16 * ranks, 24, 20

    def work(group):
        t = bench.draw(group, tokens, hidden, inner, torch.float32)
        for result in t.results():
            result.fill_(float("nan"))
        for step in bench.fused(group, t):
            if isinstance(step, Launch):
                group.launch(step)
            else:
                step()
        group.synchronize()
        return t

    everyone = mk.spawn(work, gpus_per_node=ranks, device="cpu")
    x = torch.cat([t.x for t in everyone]).double().requires_grad_()
    weights = [(t.up.double().requires_grad_(), t.down.double().requires_grad_()) for t in everyone]
    y = torch.zeros_like(x)
    for up, down in weights:
        gate, linear = (x @ up.t()).chunk(2, 1)
        y = y + (F.silu(gate) * linear) @ down.t()
    y.backward(torch.cat([t.dy for t in everyone]).double())
    for rank, (t, (up, down)) in enumerate(zip(everyone, weights, strict=True)):
        own = slice(rank * 16, (rank + 1) * 16)
        for found, exact in ((t.y, y[own]), (t.dx, x.grad[own]), (t.dup, up.grad), (t.ddown, down.grad)):
            torch.testing.assert_close(found.double(), exact.detach(), rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would measure")
def test_without_a_gpu_it_says_so():
    done = subprocess.run([sys.executable, "-m", "mkernel.nn.bench"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "needs a GPU" in done.stdout
