"""Every operator in several processes, against float64 and the inputs of all ranks. A program for torchrun:

    PYTHONPATH=src:tests torchrun --nproc-per-node 4 tests/support/every_operator.py [--gpus-per-node 2] [OPERATOR...]

On GPUs, which several processes may share, shapes are such that all kernels of an operator run: those for Hopper too.
Without a GPU it runs on CPUs, with small shapes.
"""

import argparse

import torch

import mkernel as mk
from support.attention_gradients import assert_gradients, inputs
from support.attention_reference import Case, assert_attention, exact
from support.patience import WAIT

BF16 = torch.bfloat16


def randn(group, *shape, scale=1.0, seed=0):
    """This rank's own numbers."""
    generator = torch.Generator().manual_seed(100 * seed + group.rank)
    return (torch.randn(*shape, generator=generator) * scale).to(BF16).to(group.device)


def everyones(group, *tensors):
    """What each rank has of these, in float64, on this rank's device."""
    told = group.exchange("inputs", [tensor.cpu() for tensor in tensors])
    return [[tensor.to(group.device).double() for tensor in theirs] for theirs in told]


def on_gpu(group, large, small):
    return large if group.device.type == "cuda" else small


def done(group, result):
    """The result of a call that is over. Nothing may be loaded, as a first use of a torch function would, while a
    kernel waits for the network."""
    group.synchronize()
    return result


def all_gather_matmul(group):
    shapes = on_gpu(group, [(256, 512, 256), (33, 20, 17)], [(33, 20, 17)])  # the first one suits Hopper's kernel
    for seed, (m, n, k) in enumerate(shapes):
        a, b = randn(group, m, k, seed=seed), randn(group, k, n, seed=10 + seed)
        y = done(group, mk.all_gather_matmul(a, b))
        gathered = torch.cat([theirs for (theirs,) in everyones(group, a)])
        error = (y.double() - gathered @ b.double()).abs().max().item()
        assert error <= 4 * k**0.5 * torch.finfo(BF16).eps, error


def all_gather_matmul_weight_grad(group):
    shapes = on_gpu(group, [(256, 512, 256), (33, 20, 17)], [(33, 20, 17)])
    for seed, (m, n, k) in enumerate(shapes):
        a, dy = randn(group, m, k, seed=seed), randn(group, group.size * m, n, seed=10 + seed)
        out = torch.empty(n, k, dtype=BF16, device=group.device).t()
        y = done(group, mk.all_gather_matmul_weight_grad(a, dy, out=out))
        gathered = torch.cat([theirs for (theirs,) in everyones(group, a)])
        error = (y.double() - gathered.t() @ dy.double()).abs().max().item()
        assert error <= 4 * len(dy) ** 0.5 * torch.finfo(BF16).eps, error


def check_sum(group, y, a, b, bias, rows):
    """Every part, and every node's sum, is rounded once on its way, and so is the result; fp32 sums at every term."""
    inputs = everyones(group, a, b)
    parts = [theirs @ its for theirs, its in inputs]
    total = sum(parts) + bias.double()
    terms = sum(theirs.abs() @ its.abs() for theirs, its in inputs) + bias.double().abs()
    rounded = (2 * sum(part.abs() for part in parts) + total.abs()) * torch.finfo(BF16).eps / 2
    bound = 1.02 * rounded + (a.shape[1] * group.size + group.size) * 2**-24 * terms
    assert y.shape == total[rows].shape
    error = (y.double() - total[rows]).abs()
    assert bool((error <= bound[rows]).all()), (error - bound[rows]).max().item()


def matmul_reduce_scatter(group):
    shapes = on_gpu(group, [(512, 512, 256), (36, 20, 17)], [(36, 20, 17)])  # the first one suits Hopper's kernel
    for seed, (m, n, k) in enumerate(shapes):
        a, b, bias = randn(group, m, k, seed=seed), randn(group, k, n, seed=10 + seed), torch.full((n,), 2.0).to(BF16)
        bias = bias.to(group.device)
        y = done(group, mk.matmul_reduce_scatter(a, b, bias=bias))
        share = m // group.size
        check_sum(group, y, a, b, bias, slice(group.rank * share, (group.rank + 1) * share))


def matmul_all_reduce(group):
    # in one node: in slices; with owners of tiles
    small = [((36, 20, 17), None)]
    shapes = [((64, 128, 96), None), ((512, 1024, 128), None), ((300, 264, 72), mk.Config(ctas=8))]
    for seed, ((m, n, k), config) in enumerate(on_gpu(group, shapes, small)):
        a, b, bias = randn(group, m, k, seed=seed), randn(group, k, n, seed=10 + seed), torch.full((n,), 2.0).to(BF16)
        bias = bias.to(group.device)
        y = done(group, mk.matmul_all_reduce(a, b, bias=bias, config=config))
        check_sum(group, y, a, b, bias, slice(None))
        assert all(torch.equal(y.cpu(), other) for other in group.exchange("results", y.cpu())), "bits differ"


def quantized(group, m, n, k, recipe, seed):
    """Operands in fp8 with scales, and the numbers that they stand for."""
    of_w = "BlockWise128x128" if recipe == "BlockWise1x128" else recipe
    a, scale_a = mk.quantize(randn(group, m, k, seed=seed), recipe)
    w, scale_w = mk.quantize(randn(group, n, k, seed=10 + seed), of_w)
    numbers = [mk.dequantize(*each, torch.float64) for each in ((a, scale_a), (w, scale_w))]
    return (a, w.t(), scale_a, scale_w.t() if scale_w.dim() else scale_w), numbers[0], numbers[1].t()


RECIPES = ("TensorWise", "RowWise", "BlockWise1x128")


def all_gather_scaled_matmul(group):
    m, n, k = on_gpu(group, (300, 384, 400), (13, 150, 140))
    for seed, recipe in enumerate(RECIPES):
        operands, a, b = quantized(group, m, n, k, recipe, seed)
        y = done(group, mk.all_gather_scaled_matmul(*operands))
        gathered = torch.cat([theirs for (theirs,) in everyones(group, a)])
        error = (y.double() - gathered @ b).abs().max().item()
        assert error <= 4 * k**0.5 * torch.finfo(BF16).eps, error


def scaled_matmul_reduce_scatter(group):
    m, n, k = on_gpu(group, (512, 384, 400), (36, 150, 140))
    for seed, recipe in enumerate(RECIPES):
        operands, a, b = quantized(group, m, n, k, recipe, seed)
        bias = torch.full((n,), 2.0, dtype=BF16, device=group.device)
        y = done(group, mk.scaled_matmul_reduce_scatter(*operands, bias=bias))
        share = m // group.size
        check_sum(group, y, a, b, bias, slice(group.rank * share, (group.rank + 1) * share))


def scaled_matmul_all_reduce(group):
    shapes = on_gpu(group, [(64, 128, 144), (512, 1024, 400)], [(37, 150, 140)])
    for seed, recipe in enumerate(RECIPES):
        for m, n, k in shapes:
            operands, a, b = quantized(group, m, n, k, recipe, seed)
            bias = torch.full((n,), 2.0, dtype=BF16, device=group.device)
            y = done(group, mk.scaled_matmul_all_reduce(*operands, bias=bias))
            check_sum(group, y, a, b, bias, slice(None))


def ring_attention(group):
    length, dim = on_gpu(group, (256, 128), (16, 64))
    for turn, (causal, layout) in enumerate([(False, "contiguous"), (True, "contiguous"), (True, "zigzag")]):
        case = Case(length, heads=4, kv_heads=2, dim=dim, dtype=BF16, causal=causal, layout=layout)
        inputs = [case.part(name, group.rank, turn).to(group.device) for name in ("query", "key", "value")]
        out, lse = done(group, mk.ring_attention(*inputs, return_lse=True, **case.arguments()))
        assert_attention(out, lse, exact(case, group.rank, group.size, turn, device=group.device), case)


def ring_attention_backward(group):
    length, dim = on_gpu(group, (256, 128), (16, 64))
    for turn, (causal, layout) in enumerate([(False, "contiguous"), (True, "contiguous"), (True, "zigzag")]):
        case = Case(length, heads=4, kv_heads=2, dim=dim, dtype=BF16, causal=causal, layout=layout)
        given, dlse = inputs(group, case, turn)
        given, dlse = [tensor.to(group.device) for tensor in given], dlse.to(group.device)
        found = done(group, mk.ring_attention_backward(*given, dlse=dlse, **case.arguments()))
        assert_gradients([gradient.cpu() for gradient in found], case, group.rank, group.size, turn)


class Layer:
    """A mixture of experts: ranks with other numbers of tokens, one of them with none, and of experts."""

    def __init__(self, group):
        hidden, inter, self.k = on_gpu(group, (256, 384, 4), (24, 20, 2))
        tokens = on_gpu(group, (96, 0, 129, 1), (9, 0, 17, 1))[group.rank % 4]
        self.experts = [(2, 3, 1, 2)[rank % 4] for rank in range(group.size)]
        self.group, self.hidden = group, hidden
        self.x = randn(group, tokens, hidden, seed=1)
        scores = torch.rand(tokens, sum(self.experts), generator=torch.Generator().manual_seed(group.rank))
        ids = scores.argsort(1)[:, : self.k]
        self.ids = torch.where(scores[:, : self.k] < 0.05, -1, ids).to(group.device)  # some are dropped
        self.weights = randn(group, tokens, self.k, seed=2).float().abs()
        mine = self.experts[group.rank]
        self.w = randn(group, mine, hidden, inter, seed=3, scale=hidden**-0.5)
        self.back = randn(group, mine, inter, hidden, seed=4, scale=inter**-0.5)
        self.gate_up = randn(group, mine, hidden, 2 * inter, seed=5, scale=hidden**-0.5)

    def rows(self):
        """(ranks, tokens, rows) of this rank's experts in order, a tensor of each for every expert."""
        told = everyones(self.group, self.x, self.ids)
        first = sum(self.experts[: self.group.rank])
        for expert in range(first, first + self.experts[self.group.rank]):
            at = [(ids == expert).nonzero()[:, 0] for _, ids in told]
            sources = torch.cat([torch.full_like(tokens, rank) for rank, tokens in enumerate(at)])
            yield sources, torch.cat(at), torch.cat([x[tokens] for (x, _), tokens in zip(told, at)])

    def weighted(self, function, *matrices):
        """(sum of weight * function(row, an expert's matrices), the sum of absolute values), of this rank's tokens."""
        x = self.x.double()
        total = size = torch.zeros_like(x)
        experts = [expert for theirs in everyones(self.group, *matrices) for expert in zip(*theirs)]
        for number, expert in enumerate(experts):
            share = (self.weights.double() * (self.ids == number)).sum(1, keepdim=True)
            value, magnitude = function(x, *expert)
            total, size = total + share * value, size + share * magnitude
        return total, size


def check_weighted(y, total, size):
    """Every value that is handed on is rounded once, at most 5 times on its way."""
    error = (y.double() - total).abs()
    assert y.shape == total.shape
    assert bool((error <= 4 * torch.finfo(BF16).eps * size + 1e-30).all()), error.max().item()


def two_products(x, w, back):
    inner = x @ w
    return inner @ back, inner.abs() @ back.abs()


def swiglu(x, gate_up, back):
    gate, up = (x @ gate_up).chunk(2, dim=1)
    inner = torch.nn.functional.silu(gate) * up
    return inner @ back, inner.abs() @ back.abs()


def moe_dispatch_matmul(group):
    """With moe_combine, which takes the rows back. In between a plain multiplication, as a layer would have one."""
    layer = Layer(group)
    y, handle = mk.moe_dispatch_matmul(layer.x, layer.ids, layer.w)
    done(group, y)
    sources, tokens, rows = zip(*layer.rows())
    counts = [len(part) for part in rows]
    assert handle.counts.tolist() == counts
    assert torch.equal(handle.source[: sum(counts)].long(), torch.cat(sources))
    assert torch.equal(handle.token[: sum(counts)].long(), torch.cat(tokens))
    products = torch.cat([part @ w.double() for part, w in zip(rows, layer.w)])
    error = (y[: sum(counts)].double() - products).abs()
    assert not error.numel() or error.max().item() <= 4 * torch.finfo(BF16).eps, error.max().item()

    z = torch.zeros(len(y), layer.hidden, dtype=BF16, device=group.device)
    for part, its, back in zip(z[: sum(counts)].split(counts), y[: sum(counts)].split(counts), layer.back):
        part.copy_(its.double() @ back.double())
    combined = done(group, mk.moe_combine(z, handle, layer.weights))
    check_weighted(combined, *layer.weighted(two_products, layer.w, layer.back))


def moe_dispatch_scaled_matmul(group):
    layer = Layer(group)
    of_weights = {"RowWise": "RowWise", "BlockWise1x128": "BlockWise128x128"}
    for recipe in of_weights:
        x, scale_x = mk.quantize(layer.x, recipe)
        w, scale_w = mk.quantize(layer.w.transpose(1, 2).contiguous(), of_weights[recipe])
        turned = w.transpose(1, 2), scale_w.transpose(1, 2)
        y, handle = mk.moe_dispatch_scaled_matmul(x, layer.ids, turned[0], scale_x, turned[1])
        z, _ = mk.moe_dispatch_scaled_matmul(layer.x, layer.ids, turned[0], None, turned[1], recipe_x=recipe)
        done(group, z)
        rows = int(handle.counts.sum())
        assert torch.equal(y[:rows], z[:rows])
        layer.x = mk.dequantize(x, scale_x)
        parts = zip(layer.rows(), mk.dequantize(w, scale_w, torch.float64).transpose(1, 2))
        products = torch.cat([part @ matrix for (_, _, part), matrix in parts])
        error = (y[:rows].double() - products).abs()
        assert not error.numel() or error.max().item() <= 4 * torch.finfo(BF16).eps, error.max().item()


def moe_dispatch(group):
    layer = Layer(group)
    rows, handle = mk.moe_dispatch(layer.x, layer.ids, len(layer.w))
    done(group, rows)
    expected = torch.cat([part for _, _, part in layer.rows()])
    assert torch.equal(rows[: int(handle.counts.sum())].double(), expected)


def moe_ffn(group):
    layer = Layer(group)
    y = done(group, mk.moe_ffn(layer.x, layer.ids, layer.weights, layer.gate_up, layer.back))
    check_weighted(y, *layer.weighted(swiglu, layer.gate_up, layer.back))


def scaled_moe_ffn(group):
    """The same bits whoever quantizes tokens; inner activations are rounded to fp8."""
    layer, inter = Layer(group), 128
    mine = len(layer.w)
    gate_up = mk.quantize(randn(group, mine, 2 * inter, layer.hidden, seed=5, scale=layer.hidden**-0.5))
    down = mk.quantize(randn(group, mine, layer.hidden, inter, seed=6, scale=inter**-0.5), "BlockWise128x128")
    (w1, scale_1), (w2, scale_2) = ([each.transpose(1, 2) for each in pair] for pair in (gate_up, down))
    x, scale_x = mk.quantize(layer.x)
    given = layer.ids, layer.weights, w1, w2
    y = done(group, mk.scaled_moe_ffn(x, *given, scale_x, scale_1, scale_2))
    z = done(group, mk.scaled_moe_ffn(layer.x, *given, None, scale_1, scale_2, recipe_x="RowWise"))
    assert torch.equal(y, z)
    layer.x = mk.dequantize(x, scale_x)
    matrices = (mk.dequantize(*pair).transpose(1, 2) for pair in (gate_up, down))
    total, size = layer.weighted(swiglu, *matrices)
    assert bool(((y.double() - total).abs() <= 0.07 * size + 1e-6).all())


OPERATORS = {
    operator.__name__: operator
    for operator in (
        all_gather_matmul, all_gather_matmul_weight_grad, matmul_reduce_scatter, matmul_all_reduce, ring_attention,
        ring_attention_backward, moe_dispatch_matmul, moe_dispatch_scaled_matmul, moe_dispatch, moe_ffn, scaled_moe_ffn,
        all_gather_scaled_matmul, scaled_matmul_reduce_scatter, scaled_matmul_all_reduce,
    )
}  # fmt: skip


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("operators", nargs="*", metavar="OPERATOR", help=f"of {', '.join(OPERATORS)}; all by default")
    parser.add_argument("--gpus-per-node", type=int)
    given = parser.parse_args()
    group = mk.init(timeout=WAIT, gpus_per_node=given.gpus_per_node)
    for name in given.operators or OPERATORS:
        for _ in range(2):  # the second call finds everything as the first one left it
            OPERATORS[name](group)
        where = f"rank {group.rank} of {group.nodes} x {group.gpus_per_node}, {group.device.type}"
        print(f"{name} is right on {where}\n", end="", flush=True)
    group.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
