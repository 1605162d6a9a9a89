"""scaled_moe_ffn on simulated clusters: against float64 of what its operands stand for, with inner activations in fp8;
the same bits whoever quantizes tokens; synchronisation rules, broken; and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import triton
from support.broken_variants import Broken, assert_caught
from support.moe_reference import LAYERS
from support.moe_scaled_reference import ScaledFfn, ffn_scaled
from support.operator_calls import assert_same, cluster_name, lay_out, run
from support.scaled_reference import E4M3, E5M2
from support.scenarios import ScaledFfns

import mkernel as mk
from mkernel.ops.moe import ffn, protocol

TILES = mk.Config(tile_m=16, tile_n=32, tile_k=64, chunk_rows=4)
RECIPES = ("RowWise", "BlockWise1x128")


def layer_of(cluster, **changes):
    plain = LAYERS[cluster]
    return ScaledFfn(plain.tokens, plain.experts, plain.k, **({"hidden": 144, "out": 256} | changes))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("cluster", [(1, 1), (1, 2), (2, 1), (2, 2)], ids=cluster_name)
def test_clusters(cluster, recipe):
    """Whoever quantizes tokens, the bits are the same."""
    layer = layer_of(cluster, recipe=recipe)

    def work(group):
        for turn, config in enumerate((TILES, None)):
            results = [ffn_scaled(group, layer, turn, quantizes=each, config=config) for each in (False, True)]
            assert_same(*results)

    run(work, cluster=cluster, ctas=7)


@pytest.mark.parametrize(
    ("routing", "cluster"), [("zipf", (2, 1)), ("one", (2, 2)), ("none", (1, 2)), ("twice", (2, 1))]
)
def test_routings(routing, cluster):
    layer = layer_of(cluster, routing=routing, hidden=130, out=128)
    run(lambda group: ffn_scaled(group, layer, quantizes=True), cluster=cluster)


@pytest.mark.parametrize(("hidden", "inter"), [(1, 1), (7, 20), (129, 150), (272, 129)])
@pytest.mark.parametrize("activation", ["silu", "gelu", "none"])
def test_sizes(hidden, inter, activation):
    """With scales of rows, any inter."""
    layer = ScaledFfn((5, 6), (2, 1), hidden=hidden, out=inter, recipe="RowWise", activation=activation)
    run(lambda group: ffn_scaled(group, layer), cluster=(1, 2))


def test_inner_activations_have_the_bits_of_quantize():
    """Where fp32 is exact and down is the identity, so that nothing else is rounded."""

    def work(group):
        generator = torch.Generator().manual_seed(1)
        x = torch.randint(-3, 4, (9, 16), generator=generator).float()
        gate_up = torch.randint(-1, 2, (1, 256, 16), generator=generator).float()
        inner = (x @ gate_up[0, :128].T) * (x @ gate_up[0, 128:].T)
        inner[:, 0] = 448.0
        gate_up[0, 0], gate_up[0, 128] = 0.0, 0.0  # what follows makes column 0 so large that the scale is 1
        x = torch.cat([x, torch.ones(9, 1)], dim=1)
        gate_up = torch.cat([gate_up, torch.zeros(1, 256, 1)], dim=2)
        gate_up[0, 0, 16], gate_up[0, 128, 16] = 28.0, 16.0
        down = torch.eye(128).expand(1, 128, 128)[:, :17].contiguous()
        one, scales = torch.ones(9, 1), (torch.ones(1, 1, 256), torch.ones(1, 1, 1))
        w1, w2 = (each.to(E4M3).transpose(1, 2) for each in (gate_up, down))
        y = mk.scaled_moe_ffn(
            x.to(E4M3), torch.zeros(9, 1, dtype=torch.int64), one, w1, w2, one, *scales, activation="none"
        )
        narrow, scale = mk.quantize(inner, "BlockWise1x128")
        assert (scale == 1).all()
        assert torch.equal(y, mk.dequantize(narrow, scale)[:, :17].bfloat16())

    run(work, cluster=(1, 1))


def test_layouts_results_and_the_plan():
    layer = layer_of((1, 2))

    def work(group):
        expected = ffn_scaled(group, layer)
        for layout in ("every second column", "wide rows"):
            y = ffn_scaled(group, layer, lay_out=lambda each: lay_out(each, layout))
            assert_same(y, expected)
        out = torch.zeros(layer.tokens[group.rank], 144, dtype=torch.bfloat16)
        assert ffn_scaled(group, layer, out=out) is out
        plan = mk.explain("scaled_moe_ffn", *given(layer, group.rank), max_tokens=9)
        assert "scaled_moe_ffn: tiles" in str(plan)
        assert "tokens travel in fp8, 160 bytes with their scales" in str(plan)

    run(work, cluster=(1, 2))


@pytest.mark.parametrize("name", ["scale_x", "scale_gate_up", "scale_down"])
def test_the_result_must_not_overlap_scales(name):
    memory = torch.zeros(4, 144, dtype=torch.bfloat16)
    shape = dict(zip(NAMES, RIGHT))[name].shape
    shared = memory.view(torch.float32).flatten()[: shape.numel()].view(shape)

    def work(group):
        with pytest.raises(mk.ArgumentError, match=f"out overlaps {name} in memory"):
            mk.scaled_moe_ffn(**(dict(zip(NAMES, RIGHT)) | {name: shared}), out=memory)

    run(work, cluster=(1, 1))


def given(layer, rank):
    pairs = [[each.transpose(1, 2) for each in layer.pair(name, rank)] for name in ("gate_up", "down")]
    x, scale_x = layer.quantized_x(rank)
    return x, layer.ids(rank), layer.weights(rank), pairs[0][0], pairs[1][0], scale_x, pairs[0][1], pairs[1][1]


def test_over_capacity():
    layer = layer_of((1, 2), hidden=130, out=128)

    def work(group):
        with pytest.raises(mk.CapacityError):
            ffn_scaled(group, layer, capacity=3)
        ffn_scaled(group, layer, 1)

    run(work, cluster=(1, 2))


@triton.jit
def wait_for_no_gates(context, counters, gates, block):
    return True


@triton.jit
def send_at_once(comm, signals, rank, chunk):
    return True


ALONE = ScaledFfns((1, 1), layer=ScaledFfn((20,), (2,), hidden=48, out=256))
BROKEN = {
    "the second GEMM does not wait for the first, and its scales": Broken(ALONE, {ffn._wait_gated: wait_for_no_gates}),
    "tokens are sent before they are quantized": Broken(ScaledFfns((2, 1)), {protocol.wait_staged: send_at_once}),
    "tokens are sent before they are packed": Broken(
        replace(ScaledFfns((2, 1)), quantizes=False), {protocol.wait_staged: send_at_once}
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken(name):
    assert_caught(BROKEN[name])


RIGHT = given(ScaledFfn((4,), (2,), hidden=144, out=128), 0)
NAMES = ("x", "topk_ids", "topk_weights", "w_gate_up", "w_down", "scale_x", "scale_gate_up", "scale_down")
REFUSED = {
    "tokens in bf16": (dict(x=RIGHT[0].bfloat16()), "pass recipe_x, and the kernel does; or call moe_ffn"),
    "half a block": (
        dict(w_gate_up=RIGHT[3][:, :, :200], w_down=RIGHT[4][:, :100], scale_down=RIGHT[7]), "must be a multiple of 256"
    ),
    "w_down in bf16": (dict(w_down=RIGHT[4].bfloat16()), "w_down has dtype torch.bfloat16"),
    "scales of columns of w_down": (dict(scale_down=torch.ones(2, 1, 144)), "2 x 1 x 2, one for each block"),
    "scales of gate_up": (dict(scale_gate_up=torch.ones(2, 3, 3)), "scale_gate_up has shape .* but w_gate_up is"),
    "a result in fp32": (dict(out=torch.empty(4, 144)), "out has dtype torch.float32"),
    "gradients of fp8": (dict(w_down=RIGHT[4].detach().requires_grad_()), "w_down requires grad, but neither"),
    "gradients and a result": (
        dict(topk_weights=torch.ones(4, 2, requires_grad=True), out=torch.empty(4, 144, dtype=torch.bfloat16)),
        "out cannot be combined with tensors that require grad",
    ),
    "another dtype": (dict(dtype_x=E5M2, recipe_x="RowWise"), "scale_x is given, and so is recipe_x"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused(what):
    changes, words = REFUSED[what]
    right = dict(zip(NAMES, RIGHT))

    def work(group):
        with pytest.raises(mk.ArgumentError, match=words):
            mk.scaled_moe_ffn(**(right | changes))
        mk.scaled_moe_ffn(**right)  # the group can be used

    run(work, cluster=(1, 1))
