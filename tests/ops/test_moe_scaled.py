"""moe_dispatch_scaled_matmul on simulated clusters: against float64 of what its operands stand for; bit for bit the
same whether tokens are quantized before the call or by it; how much moves; every synchronisation rule that packing
adds, broken; and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import triton
from support.broken_variants import ONE_HALF, WRONG, Broken, assert_caught
from support.moe_reference import LAYERS
from support.moe_scaled_reference import ScaledLayer, combine_scaled, dispatch_scaled
from support.operator_calls import assert_same, cluster_name, lay_out, run
from support.scaled_reference import E4M3, E5M2
from support.scenarios import ScaledRoutes

import mkernel as mk
from mkernel.ops.moe import packing, protocol
from mkernel.ops.moe.packing import pack_tokens
from mkernel.ops.moe.protocol import notify_held
from mkernel.ops.moe.scaled import explain

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TILES = mk.Config(tile_m=16, tile_n=32, tile_k=64, chunk_rows=4)
CTAS = mk.Config(tile_m=32, tile_n=256, tile_k=128, chunk_rows=2, ctas=7)
RECIPES = ("RowWise", "BlockWise1x128")


def scaled(cluster, **changes):
    of_cluster = LAYERS[cluster]
    return ScaledLayer(of_cluster.tokens, of_cluster.experts, of_cluster.k, **({"hidden": 160, "out": 150} | changes))


@pytest.mark.parametrize("quantizes", [False, True], ids=["quantized before", "quantizes"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("cluster", [(1, 1), (1, 2), (2, 1), (2, 2)], ids=cluster_name)
def test_clusters(cluster, recipe, quantizes):
    layer = scaled(cluster, recipe=recipe)

    def work(group):
        for turn, config in enumerate((TILES, CTAS)):
            combine_scaled(group, layer, turn, quantizes=quantizes, config=config)

    run(work, cluster=cluster, ctas=7)


@pytest.mark.parametrize(
    ("routing", "cluster"), [("zipf", (2, 1)), ("one", (2, 2)), ("none", (1, 2)), ("twice", (2, 1)), ("same", (1, 2))]
)
def test_routings(routing, cluster):
    layer = scaled(cluster, routing=routing, hidden=130, out=20)

    def work(group):
        combine_scaled(group, layer, quantizes=True, config=TILES)
        combine_scaled(group, layer, 1)

    run(work, cluster=cluster)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("wide", [BF16, FP16, FP32])
def test_bits_of_quantized_tokens(recipe, wide):
    """Also where one rank quantizes tokens before the call, and the other in it."""
    layer = scaled((1, 2), recipe=recipe, wide=wide, kinds=(E5M2, E4M3), hidden=261, out=24)

    def work(group):
        calls = [(False, False), (True, True), (False, True)]
        results = [dispatch_scaled(group, layer, quantizes=each[group.rank], max_tokens=9) for each in calls]
        rows = int(results[0][1].counts.sum())
        for y, _ in results[1:]:
            assert_same(y[:rows].contiguous(), results[0][0][:rows].contiguous())

    run(work, cluster=(1, 2))


@pytest.mark.parametrize("hidden", [1, 7, 128, 129, 272])
@pytest.mark.parametrize("quantizes", [False, True])
def test_sizes(hidden, quantizes):
    for recipe in RECIPES:
        layer = ScaledLayer((5, 6), (2, 1), hidden=hidden, out=130, dtype=FP32, recipe=recipe, has_bias=True)
        run(lambda group: dispatch_scaled(group, layer, quantizes=quantizes), cluster=(1, 2))


@pytest.mark.parametrize("layout", ["every second column", "odd column", "wide rows"])
def test_layouts(layout):
    layer = scaled((1, 2), out=20)

    def work(group):
        for quantizes in (False, True):
            dispatch_scaled(group, layer, quantizes=quantizes, lay_out=lambda each: lay_out(each, layout))
        w, scale_w = layer.quantized_w(group.rank)
        x, scale_x = layer.quantized_x(group.rank)
        ids = layer.ids(group.rank)
        y, handle = mk.moe_dispatch_scaled_matmul(x, ids, w.contiguous(), scale_x, scale_w.contiguous())
        rows = int(handle.counts.sum())
        assert_same(y[:rows].contiguous(), dispatch_scaled(group, layer)[0][:rows].contiguous())

    run(work, cluster=(1, 2))


def test_scales_of_rows_with_fast_accumulation():
    layer = scaled((2, 1), recipe="RowWise", hidden=261)
    run(lambda group: dispatch_scaled(group, layer, use_fast_accum=True), cluster=(2, 1))


def test_one_row_too_many_and_what_is_not_finite():
    layer = scaled((1, 2), hidden=130, out=20)

    def work(group):
        with pytest.raises(mk.CapacityError):
            dispatch_scaled(group, layer, capacity=3)
        x, scale_x = layer.wide_x(group.rank), None
        x[0, 129] = float("nan")
        w, scale_w = layer.quantized_w(group.rank)
        ids = layer.ids(group.rank)
        y, handle = mk.moe_dispatch_scaled_matmul(x, ids, w, scale_x, scale_w, recipe_x=layer.recipe)
        rows = int(handle.counts.sum())
        assert torch.equal(y[:rows].isnan().any(1), handle.token[:rows] == 0)
        combine_scaled(group, layer, 1)

    run(work, cluster=(1, 2))


# -- how much moves


@pytest.mark.parametrize("quantizes", [False, True])
def test_a_token_crosses_once_in_fp8_with_its_scales(quantizes):
    """240 elements and 2 scales, up to a multiple of 16 bytes: 256 bytes."""
    layer = ScaledLayer((9, 6), (2, 2), k=3, hidden=240, out=16)

    def crossings(source):
        ids = layer.ids(source)
        other = layer.first(1 - source)
        return int(((ids >= other) & (ids < other + 2)).any(1).sum())

    def work(group):
        dispatch_scaled(group, layer, quantizes=quantizes)
        group.barrier()
        return [list(row) for row in group.world.traffic.network], [list(row) for row in group.world.traffic.nvlink]

    network, _ = run(work, cluster=(2, 1))[0]
    _, nvlink = run(work, cluster=(1, 2))[0]
    for source in range(2):
        table = 16 * 4 + layer.tokens[source] * layer.k * 4
        assert network[source][1 - source] == table + crossings(source) * 256
    wide = replace(layer, tokens=layer.tokens)

    def plain(group):
        mk.moe_dispatch_matmul(wide.wide_x(group.rank), wide.ids(group.rank), wide.w(group.rank).bfloat16())
        group.barrier()
        return [list(row) for row in group.world.traffic.nvlink]

    for source, (fp8, bf16) in enumerate(zip(nvlink, run(plain, cluster=(1, 2))[0], strict=True)):
        assert sum(bf16) - sum(fp8) == crossings(source) * (480 - 256)


def test_the_plan():
    layer = scaled((1, 2), hidden=7168, out=16)

    def work(group):
        (x, scale_x), (w, scale_w) = layer.quantized_x(group.rank), layer.quantized_w(group.rank)
        plan = explain(x, layer.ids(group.rank), w, scale_x, scale_w, max_tokens=9)
        assert "moe_dispatch_scaled_matmul: tiles" in str(plan)
        assert "tokens travel in fp8, 7392 bytes with their scales; blocks of 1x128" in str(plan)
        plan = mk.explain(
            "moe_dispatch_scaled_matmul", layer.wide_x(group.rank), layer.ids(group.rank), w, None, scale_w,
            recipe_x="BlockWise1x128", max_tokens=9,
        )  # fmt: skip
        assert "to which the kernel quantizes them" in str(plan)

    run(work, cluster=(1, 2))


# -- broken on purpose


FAR, NODE = ScaledRoutes((2, 1)), ScaledRoutes((1, 2))
ALONE = ScaledRoutes((1, 1), ScaledLayer((7,), (2,), hidden=144, out=16))


@triton.jit
def send_at_once(comm, signals, rank, chunk):
    return True


@triton.jit
def place_at_once(comm, counted):
    return True


@triton.jit
def fetch_at_once(comm, signals, holder, source, chunk):
    return True


@triton.jit
def do_not_notify_held(comm, signals, rank, chunk):
    if chunk != 1:
        notify_held(comm, signals, rank, chunk)


@triton.jit
def pack_too_few(comm, dispatch, token, end):
    pack_tokens(comm, dispatch, token, end - 1)


BROKEN = {
    "tokens are sent before they are quantized": Broken(FAR, {protocol.wait_staged: send_at_once}),
    "tokens are sent before they are packed": Broken(
        replace(FAR, quantizes=False), {protocol.wait_staged: send_at_once}
    ),
    "own tokens are placed before they are counted": Broken(ALONE, {protocol.wait_counted: place_at_once}),
    "tokens of the node are fetched before they are quantized": Broken(NODE, {protocol.wait_held: fetch_at_once}),
    "packed tokens are not signalled": Broken(
        FAR, {protocol.notify_held: do_not_notify_held}, mk.CommTimeout, {"signal": "held", "seen": 0, "expected": 1}
    ),
    "one half for all epochs": Broken(replace(NODE, calls=2), ONE_HALF),
    "a token is not packed": Broken(ALONE, {packing.pack_tokens: pack_too_few}, (WRONG, mk.SimulatorError)),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken(name):
    assert_caught(BROKEN[name])


# -- what is refused

X, W = torch.ones(4, 300).bfloat16(), torch.ones(2, 200, 300).to(E4M3).transpose(1, 2)
RIGHT = dict(
    x=X, topk_ids=torch.zeros(4, 2, dtype=torch.int64), w=W, scale_x=None, scale_w=torch.ones(2, 1, 200),
    recipe_x="RowWise",
)  # fmt: skip
IN_FP8 = dict(recipe_x=None, x=X.to(E4M3))
REFUSED = {
    "one scale": (dict(recipe_x="TensorWise"), "recipe_x must be one of RowWise, BlockWise1x128; got"),
    "scales and a recipe": (dict(scale_x=torch.ones(4, 1)), "pass x and its scales, or scale_x=None"),
    "neither": (dict(recipe_x=None), "x has dtype torch.bfloat16: quantize it with mk.quantize, or pass recipe_x"),
    "no scales": (IN_FP8, "scale_x must be a torch.Tensor, got NoneType"),
    "tokens in fp8 to be quantized": (dict(x=X.to(E4M3)), "x has dtype torch.float8_e4m3fn; supported are"),
    "another dtype": (dict(dtype_x=FP16), "dtype_x must be torch.float8_e4m3fn or torch.float8_e5m2"),
    "w in bf16": (dict(w=W.bfloat16()), "w has dtype torch.bfloat16; moe_dispatch_scaled_matmul takes"),
    "scales of w of another shape": (dict(scale_w=torch.ones(2, 200, 1)), "it must have 2 x 1 x 200, one for each"),
    "scales of columns with blocks": (dict(recipe_x="BlockWise1x128"), "it must have 2 x 3 x 2, one for each block"),
    "scales of x of another shape": (IN_FP8 | dict(scale_x=torch.ones(4, 3)), "it must have 4 x 1"),
    "scales in fp64": (dict(scale_w=torch.ones(2, 1, 200).double()), "scale_w has dtype torch.float64"),
    "deep steps": (
        dict(recipe_x="BlockWise1x128", scale_w=torch.ones(2, 3, 2), config=mk.Config(tile_k=256)), "at most 128"
    ),
    "fast accumulation of blocks": (
        dict(recipe_x="BlockWise1x128", scale_w=torch.ones(2, 3, 2), use_fast_accum=True), "use_fast_accum=False"
    ),
    "a bias in another dtype": (dict(bias=torch.ones(2, 200)), "bias has dtype torch.float32, but the result has"),
    "gradients of scales": (
        dict(scale_w=torch.ones(2, 1, 200, requires_grad=True)), "scale_w requires grad, but neither what is in fp8"
    ),
    "gradients of fp8": (
        IN_FP8 | dict(x=X.to(E4M3).requires_grad_(), scale_x=torch.ones(4, 1)), "if the kernel quantizes them .recipe_x"
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused(what):
    changes, words = REFUSED[what]

    def work(group):
        with pytest.raises(mk.ArgumentError, match=words):
            mk.moe_dispatch_scaled_matmul(**(RIGHT | changes))
        mk.moe_dispatch_scaled_matmul(**RIGHT)  # the group can be used

    run(work, cluster=(1, 1))


def test_ranks_that_disagree():
    def work(group):
        with pytest.raises(mk.ArgumentError, match="dtype"):
            mk.moe_dispatch_scaled_matmul(**RIGHT, dtype_x=(E4M3, E5M2)[group.rank])
        mk.moe_dispatch_scaled_matmul(**RIGHT)

    run(work, cluster=(1, 2))
