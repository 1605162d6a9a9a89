"""Captured graphs of every operator, beside eager calls with the same inputs. Also a program for torchrun:

    PYTHONPATH=src:tests torchrun --nproc-per-node 2 tests/support/graph_calls.py [OPERATOR...]

Operators compute the same bits for the same inputs, so a replay is compared with an eager call. Eager calls have tests
of their own. Graphs are captured without a call before them on the stream that captures; with other addresses, and of
several sizes, so that workspaces grow while graphs refer to them.
"""

import sys

import torch

import mkernel as mk

BF16 = torch.bfloat16


def randn(group, *shape, seed=0, scale=1.0):
    """This rank's own numbers."""
    generator = torch.Generator().manual_seed(100 * seed + group.rank)
    return (torch.randn(*shape, generator=generator) * scale).to(BF16).to(group.device)


def gather(group, size, turn):
    bias = randn(group, 384, seed=turn + 30)
    return [randn(group, size, 256, seed=turn), randn(group, 256, 384, seed=turn + 10), bias]


def products(group, size, turn):
    return [randn(group, size * group.size, 256, seed=turn), randn(group, 256, 384, seed=turn + 10)]


def weight(group, size, turn):
    return [randn(group, size, 256, seed=turn), randn(group, size * group.size, 384, seed=turn + 10)]


def attention(group, size, turn):
    return [randn(group, 1, 4, size, 128, seed=turn + 10 * i) for i in range(3)]


def experts(group, size, turn):
    """Tokens and their routing change, the matrices do not."""
    generator = torch.Generator().manual_seed(7 * turn + group.rank)
    ids = torch.rand(size, 2 * group.size, generator=generator).topk(2, dim=1).indices.to(group.device)
    weights = torch.rand(size, 2, generator=generator).to(group.device)
    gate_up = randn(group, 2, 256, 512, seed=70, scale=1 / 16)
    return [randn(group, size, 256, seed=turn), ids, weights, gate_up, randn(group, 2, 256, 256, seed=71, scale=1 / 16)]


def attend_and_back(q, k, v):
    out, lse = mk.ring_attention(q, k, v, is_causal=True, return_lse=True)
    return (out, *mk.ring_attention_backward(out, q, k, v, out, lse, is_causal=True))


def dispatch_and_combine(x, ids, weights, gate_up, w):
    y, handle = mk.moe_dispatch_matmul(x, ids, w, max_tokens=len(x))
    return (mk.moe_combine(y, handle, weights),)


def decode(*given):
    """With memory for twice the expected load, however many ranks there are."""
    return (mk.moe_ffn(*given, max_tokens=len(given[0]), capacity_factor=2.0),)


def move_and_combine(x, ids, weights, gate_up, w):
    y, handle = mk.moe_dispatch(x, ids, len(w), max_tokens=len(x))
    return (mk.moe_combine(y, handle, weights),)


# operator -> (inputs of a size and a turn, a call of them, sizes)
CASES = {
    "all_gather_matmul": (gather, lambda a, b, bias: (mk.all_gather_matmul(a, b, bias=bias),), (128, 4, 600)),
    "all_gather_matmul_weight_grad": (weight, lambda a, dy: (mk.all_gather_matmul_weight_grad(a, dy),), (128, 256)),
    "matmul_reduce_scatter": (products, lambda a, b: (mk.matmul_reduce_scatter(a, b),), (128, 4, 600)),
    "matmul_all_reduce": (products, lambda a, b: (mk.matmul_all_reduce(a, b),), (128, 4, 600)),
    "ring_attention": (attention, attend_and_back, (256, 512)),
    "moe_ffn": (experts, lambda *given: (mk.moe_ffn(*given, max_tokens=len(given[0])),), (64, 128)),
    "moe_ffn_decoding": (experts, decode, (32, 64)),
    "moe_dispatch_matmul": (experts, dispatch_and_combine, (64, 128)),
    "moe_dispatch": (experts, move_and_combine, (64, 128)),
}


class Captured:
    """A graph of a call, its inputs and its results."""

    def __init__(self, group, make, call, size):
        self.group, self.make, self.call, self.size = group, make, call, size
        self.inputs = make(group, size, 0)
        self.graph = torch.cuda.CUDAGraph()
        with group.capture(self.graph):
            self.results = call(*self.inputs)

    def check(self, turn):
        """A replay with new inputs computes what an eager call computes."""
        group = self.group
        for tensor, new in zip(self.inputs, self.make(group, self.size, turn)):
            tensor.copy_(new)
        for result in self.results:
            result.fill_(float("nan"))
        group.synchronize()
        group.barrier()  # nothing may be loaded while a kernel waits for a thread that loads
        self.graph.replay()
        group.synchronize()
        expected = self.call(*self.inputs)
        group.synchronize()
        for i, (result, theirs) in enumerate(zip(self.results, expected, strict=True)):
            assert not result.isnan().any(), (group.rank, self.size, turn, i)
            assert torch.equal(result, theirs), (group.rank, self.size, turn, i)


def check_operator(group, name):
    """Several graphs, replayed in turns, and eager calls in between."""
    make, call, sizes = CASES[name]
    warm = call(*make(group, sizes[0], 1))  # compiles, on another stream than those that capture
    for size in sizes[1:] if group.nodes > 1 else ():
        call(*make(group, size, 1))  # only without a network can first calls be captured
    group.synchronize()
    graphs = [Captured(group, make, call, size) for size in sizes]
    graphs.append(Captured(group, make, call, sizes[0]))
    for turn in (1, 2, 3):
        for captured in graphs:
            captured.check(turn)
    for captured in reversed(graphs):
        captured.check(4)
    assert all(torch.equal(one, other) for one, other in zip(warm, call(*make(group, sizes[0], 1))))
    group.synchronize()


def main():
    group = mk.init(timeout=60.0)
    for name in sys.argv[1:] or CASES:
        check_operator(group, name)
        print(f"graphs of {name} are right on rank {group.rank} of {group.size}", flush=True)
    group.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
