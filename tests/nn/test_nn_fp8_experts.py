"""A mixture-of-experts layer in fp8 in the simulator: gradients beside float64 of what the fp8 stands for."""

import pytest
import torch
from support.operator_calls import run

import mkernel as mk
from mkernel import nn
from mkernel.nn.fp8 import RECIPES

HIDDEN, INNER, EXPERTS, TOP_K = 144, 128, 2, 2  # EXPERTS: of a rank


class Quantized(torch.autograd.Function):
    """What a tensor is after it was quantized, in float64; the straight-through estimator."""

    @staticmethod
    def forward(ctx, tensor, recipe):
        return mk.dequantize(*mk.quantize(tensor.float(), recipe), torch.float64)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def loss_of(layers, inputs, gradients, recipe):
    """The sum of all ranks' losses, in float64. layers: the parameters of each rank."""
    of_tokens, of_gate_up = RECIPES[recipe]

    def expert(x, parameters, name, number):
        gate_up = Quantized.apply(parameters[f"experts.{name}gate_up_proj"], of_gate_up)[number]
        down = Quantized.apply(parameters[f"experts.{name}down_proj"], "BlockWise128x128")[number]
        gate, up = (x @ gate_up.t()).chunk(2, dim=1)
        return (torch.nn.functional.silu(gate) * up) @ down.t()

    loss = 0
    for rank, (x, gradient) in enumerate(zip(inputs, gradients)):
        weights, ids = (x @ layers[rank]["gate.weight"].t()).softmax(1).topk(TOP_K)
        weights, tokens = weights / weights.sum(1, keepdim=True), Quantized.apply(x, of_tokens)
        y = expert(tokens, layers[rank], "shared_", 0)
        for number in range(EXPERTS * len(layers)):
            its_weights = (weights * (ids == number)).sum(1, keepdim=True)
            y = y + its_weights * expert(tokens, layers[number // EXPERTS], "", number % EXPERTS)
        loss = loss + (y * gradient).sum()
    return loss


@pytest.mark.parametrize(("recipe", "cluster"), [("RowWise", (2, 1)), ("BlockWise", (1, 2))])
def test_gradients(recipe, cluster):
    def work(group):
        generator = torch.Generator().manual_seed(group.rank)
        x, gradient = (torch.randn(5 + group.rank, HIDDEN, generator=generator) for _ in range(2))
        layer = nn.ExpertParallelMoE(
            HIDDEN, INNER, EXPERTS * group.size, TOP_K, shared_experts=1, fp8=recipe,
            generator=torch.Generator().manual_seed(7),
        )  # fmt: skip
        y = layer(x.requires_grad_())
        y.backward(gradient)
        with torch.no_grad():
            assert torch.equal(layer(x), y)
        assert f"fp8={recipe!r}" in str(layer)
        named = dict(layer.named_parameters())
        found = {name: parameter.grad for name, parameter in named.items()} | {"x": x.grad}
        return x.detach(), gradient, {name: each.detach() for name, each in named.items()}, found

    inputs, gradients, parameters, found = zip(*run(work, cluster=cluster))
    inputs = [each.double().requires_grad_() for each in inputs]
    layers = [{name: each.double().requires_grad_() for name, each in mine.items()} for mine in parameters]
    loss_of(layers, inputs, gradients, recipe).backward()
    for rank, mine in enumerate(found):
        for name, gradient in mine.items():
            exact = inputs[rank].grad if name == "x" else layers[rank][name].grad
            if "shared" in name or name == "gate.weight":  # replicated
                exact = sum(layer[name].grad for layer in layers)
            torch.testing.assert_close(gradient.double(), exact, rtol=1e-5, atol=3e-6 * float(exact.abs().max()))


def test_mixed_precision():
    """Results have the dtype of the input, and gradients those of parameters."""

    def work(group):
        layer = nn.ExpertParallelMoE(48, 20, 2, 1, fp8="RowWise", activation="gelu", capacity_factor=2.0, max_tokens=4)
        x = torch.randn(2, 2, 48, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            y = layer(x)
        assert (y.dtype, y.shape) == (torch.bfloat16, x.shape)
        y.sum().backward()
        assert all(each.grad.dtype == torch.float32 and each.grad.any() for each in (x, *layer.experts.parameters()))

    run(work, cluster=(1, 1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(fp8="TensorWise"), "fp8 must be None or one of RowWise, BlockWise for experts; got 'TensorWise'"),
        (dict(fp8="RowWise", bias=True), "fp8 needs bias=False"),
        (dict(fp8="RowWise", save="activations"), "fp8 needs save='inputs', got 'activations'"),
        (dict(fp8="BlockWise"), "intermediate_size is 20, but must be a multiple of 128 with fp8='BlockWise'"),
    ],
)
def test_what_is_refused(options, message):
    def work(group):
        with pytest.raises(mk.ArgumentError, match=message):
            nn.ExpertParallelMoE(48, 20, 2, 1, **options)

    run(work, cluster=(1, 1))
