"""Gradients in several processes, which may share a GPU, against float64. A program for torchrun:

    PYTHONPATH=src:tests torchrun --nproc-per-node 4 tests/support/gradients_on_gpus.py [--gpus-per-node 2] CASE...

CASE is one of `gradient_cases.gpu_cases`, or "compiled", a tensor-parallel block under torch.compile.
"""

import argparse

import torch
from torch._dynamo.utils import counters

import mkernel as mk
from support import gradient_cases
from support.gradient_reference import check

K, INNER, ROWS, STEPS = 256, 512, 256, 5


class Block(torch.nn.Module):
    """Two layers: the features of the first are divided among the ranks, as are the inputs of the second."""

    def __init__(self, group):
        super().__init__()
        generator = torch.Generator().manual_seed(group.rank)
        shapes = {"up": (INNER // group.size, K), "gate": (INNER // group.size, K), "down": (K, INNER // group.size)}
        for name, shape in shapes.items():
            values = torch.randn(shape, generator=generator) * K**-0.5
            setattr(self, name, torch.nn.Parameter(values.to(group.device, torch.bfloat16)))

    def forward(self, x):
        gate, up = mk.all_gather_matmul(x, [self.gate.t(), self.up.t()])
        return mk.matmul_reduce_scatter(torch.nn.functional.silu(gate) * up, self.down.t())


def train(group, compiled):
    """Losses of a few steps, and the gradients of the last."""
    model = Block(group)
    forward = torch.compile(model, fullgraph=True) if compiled else model
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(100 + group.rank)
    x = torch.randn(ROWS, K, generator=generator).to(group.device, torch.bfloat16).requires_grad_()
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        x.grad = None
        loss = forward(x).float().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    group.synchronize()
    return torch.stack(losses).cpu(), {name: each.grad for name, each in model.named_parameters()} | {"x": x.grad}


def check_compiled(group):
    """The same loss and gradients as without torch.compile, by one graph without breaks for all steps."""
    expected, exact = train(group, compiled=False)
    counters.clear()
    losses, gradients = train(group, compiled=True)
    assert not counters["graph_break"], counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 1, counters["stats"]
    torch.testing.assert_close(losses, expected, rtol=5e-3, atol=0)
    for name, gradient in gradients.items():
        # silu is rounded once where it was rounded twice
        scale = exact[name].float().abs().max().item()
        torch.testing.assert_close(gradient, exact[name], rtol=0, atol=0.02 * scale, msg=lambda m: f"{name}: {m}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", metavar="CASE")
    parser.add_argument("--gpus-per-node", type=int)
    given = parser.parse_args()
    for kind in ("bf16", "fp16"):  # PyTorch's products; their bound allows no partial sums in 16 bits
        setattr(torch.backends.cuda.matmul, f"allow_{kind}_reduced_precision_reduction", False)
    group = mk.init(timeout=60.0, gpus_per_node=given.gpus_per_node)
    for name in given.cases:
        if name == "compiled":
            check_compiled(group)
        else:
            check(group, gradient_cases.gpu_cases(group.size)[name])
    place = f"{group.nodes} x {group.gpus_per_node}, {group.device.type}"
    print(f"gradients are right on rank {group.rank} of {place}", flush=True)
    group.close()
    torch.distributed.destroy_process_group()
