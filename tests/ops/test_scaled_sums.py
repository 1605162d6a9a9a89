"""scaled_matmul_reduce_scatter and scaled_matmul_all_reduce on simulated clusters, against float64 of what the fp8
operands stand for: all recipes, odd shapes, layouts, other kernels than the default; and what is refused."""

from __future__ import annotations

import pytest
import torch
from support.operator_calls import CLUSTERS, assert_same, cluster_name, run
from support.reduce_reference import ONE_NODE, WAYS, choose, mine, name_of
from support.scaled_reference import (
    BLOCKS,
    E4M3,
    E5M2,
    RECIPES,
    ROWS,
    TENSORS,
    Quantized,
    ScaledSum,
    call_sum,
    recipe_name,
)

import mkernel as mk

TILES = mk.Config(tile_m=16, tile_n=64, tile_k=64)
WIDE = mk.Config(tile_m=16, tile_n=256, tile_k=64)  # columns of several blocks
TEAMS = mk.Config(tile_m=16, tile_n=16, tile_k=32, team_ctas=2)
# which recipe, kinds, result, what travels, and configuration go together: each in several places
CASES = [
    (TENSORS, (E4M3, E4M3), torch.bfloat16, None, TILES),
    (ROWS, (E5M2, E4M3), torch.float32, None, TILES),
    (("TensorWise", "RowWise"), (E4M3, E5M2), torch.float16, torch.float32, None),
    (("RowWise", "TensorWise"), (E4M3, E4M3), torch.bfloat16, torch.float32, WIDE),
    (BLOCKS, (E4M3, E4M3), torch.bfloat16, torch.float32, TILES),
    (BLOCKS, (E5M2, E4M3), torch.float32, None, WIDE),
]


def sum_of(way, cluster, rows, n, k, dtype=torch.float32, **how):
    """A case with so many rows per rank, and one row more where rows are not divided."""
    size = cluster[0] * cluster[1]
    m = rows * size if name_of(way) == "matmul_reduce_scatter" else rows * size + 1
    return ScaledSum(m, n, k, dtype, how=Quantized(**how))


def places():
    """Every way with every case on two ranks, and on another cluster or two that suit it."""
    for way in WAYS:
        for number in range(len(CASES)):
            for cluster in sorted({(1, 2), CLUSTERS[number], CLUSTERS[(number + 4) % 7]}):
                one_node = cluster[0] == 1 and cluster[1] > 1
                if (one_node or way not in ONE_NODE) and (way != "sliced" or cluster == (1, 2)):
                    yield way, cluster, number


@pytest.mark.parametrize(("way", "cluster", "number"), list(places()), ids=cluster_name)
def test_recipes(way, cluster, number, monkeypatch):
    """Three blocks of k and three of n, all of them with a remainder; with bias and residual now and then."""
    choose(way, monkeypatch)
    recipe, kinds, dtype, reduce_dtype, config = CASES[number]
    case = sum_of(way, cluster, 9, 270, 261, dtype, recipe=recipe, kinds=kinds)
    more = dict(bias=recipe != ROWS, residual=recipe != TENSORS)

    def work(group):
        return call_sum(group, way, case, reduce_dtype=reduce_dtype, config=config, **more)

    first, *others = run(work, cluster=cluster)
    if name_of(way) == "matmul_all_reduce":
        for other in others:
            assert_same(other, first)


@pytest.mark.parametrize("recipe", [ROWS, BLOCKS], ids=recipe_name)
@pytest.mark.parametrize(("op", "cluster"), [("matmul_reduce_scatter", (1, 2)), ("matmul_all_reduce", (1, 1))])
def test_teams(op, cluster, recipe):
    """The kernel for few rows, whose tiles have rows of several ranks, and whose CTAs share k."""
    case = ScaledSum(5 * cluster[1], 40, 300, torch.float32, how=Quantized(recipe))
    run(lambda group: call_sum(group, op, case, config=TEAMS), cluster=cluster)


SHAPES = [(1, 1, 1), (3, 2, 128), (16, 128, 129), (1, 129, 17)]  # rows of a rank, n, k


@pytest.mark.parametrize("recipe", RECIPES, ids=recipe_name)
def test_shapes(recipe):
    """Where row-wise scales look like those of blocks, or of a tensor, they mean the same."""

    def work(group):
        for way in ("matmul_reduce_scatter", "matmul_all_reduce"):
            for rows, n, k in SHAPES:
                call_sum(group, way, ScaledSum(rows * group.size, n, k, how=Quantized(recipe)))

    run(work, cluster=(1, 2))


def test_ranks_with_other_depths():
    """One of them has nothing to multiply, another less than a block."""
    for recipe in (ROWS, BLOCKS):
        case = ScaledSum(6, 20, (300, 0, 100), how=Quantized(recipe))
        for way in ("matmul_reduce_scatter", "matmul_all_reduce"):
            run(lambda group: call_sum(group, way, case, config=TILES), cluster=(1, 3))


LAYOUTS = {
    "column-major": lambda x: x.t().contiguous().t() if x.dim() == 2 else x,
    "every second": lambda x: x.repeat_interleave(2, -1)[..., ::2] if x.dim() else x,
    "wide rows": lambda x: torch.cat([x, x, x], -1)[..., x.shape[-1] : 2 * x.shape[-1]] if x.dim() else x,
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout):
    """Of operands and scales, which PyTorch wants column-major for blocks."""
    for recipe in (TENSORS, ROWS, BLOCKS):
        case = ScaledSum(6, 140, 150, torch.bfloat16, how=Quantized(recipe))
        run(lambda group: call_sum(group, "matmul_reduce_scatter", case, lay_out=LAYOUTS[layout]), cluster=(1, 2))


def test_more_dimensions():
    case = ScaledSum(12, 10, 140, how=Quantized(BLOCKS))

    def work(group):
        (a, scale_a), (b, scale_b) = case.how.rows(12, 140, (group.rank, 0)), case.how.columns(140, 10, (group.rank, 0))
        shaped = a.view(3, 4, 140), b, scale_a.view(3, 4, 2), scale_b
        y = mk.scaled_matmul_all_reduce(*shaped, out_dtype=torch.float32)
        assert torch.equal(
            y, mk.scaled_matmul_all_reduce(a, b, scale_a, scale_b, out_dtype=torch.float32).view(3, 4, 10)
        )
        z = mk.scaled_matmul_reduce_scatter(*shaped, out_dtype=torch.float32, scatter_dim=1)
        half = slice(group.rank * 2, group.rank * 2 + 2)
        assert torch.equal(z, y[:, half])
        out = torch.empty(3, 4, 10)
        assert mk.scaled_matmul_all_reduce(*shaped, out=out) is out
        assert torch.equal(out, y)
        # one scale, of all rows or of the only one, with as many dimensions as a
        rows, scale = mk.quantize(torch.ones(1, 1, 140), "RowWise")
        one = torch.ones(1, 10)
        for more, call in (((1, 1), mk.all_gather_scaled_matmul), ((1, 1), mk.scaled_matmul_all_reduce),
                           ((4, 1), mk.scaled_matmul_reduce_scatter)):  # fmt: skip
            given = rows.expand(*more, 140)
            flat = call(given.reshape(-1, 140), b, scale.view(1, 1), one)
            assert torch.equal(call(given, b, scale, one).flatten(0, 1), flat)

    run(work, cluster=(1, 2))


def test_fast_accumulation_and_repeated_calls():
    """On tensor cores, fast accumulation has fewer bits; here it is the same."""
    case = ScaledSum(12, 34, 150, torch.bfloat16, how=Quantized(ROWS))

    def work(group):
        for way in ("matmul_reduce_scatter", "matmul_all_reduce"):
            for turn in range(3):
                exactly = call_sum(group, way, case, turn, config=TILES)
                assert torch.equal(call_sum(group, way, case, turn, config=TILES, use_fast_accum=True), exactly)
                mk.matmul_all_reduce(torch.ones(4, 4), torch.ones(4, 4))  # in the same workspace
            call_sum(group, way, case, config=mk.Config(tile_m=16, tile_n=16, tile_k=256))

    run(work, cluster=(1, 2))


def test_a_residual_may_be_the_result():
    case = ScaledSum(6, 20, 40, torch.float16, how=Quantized(ROWS))

    def work(group):
        residual = mine(group, "matmul_reduce_scatter", case.residual()).clone()
        (a, scale_a), (b, scale_b) = case.how.rows(6, 40, (group.rank, 0)), case.how.columns(40, 20, (group.rank, 0))
        call = mk.scaled_matmul_reduce_scatter
        y = call(a, b, scale_a, scale_b, residual=residual, out_dtype=torch.float16)
        assert torch.equal(call(a, b, scale_a, scale_b, residual=residual, out=residual), y)

    run(work, cluster=(1, 2))


# -- what is refused

A, B = torch.ones(4, 300).to(E4M3), torch.ones(200, 300).to(E4M3).t()
RIGHT = dict(a=A, b=B, scale_a=torch.ones(4, 1), scale_b=torch.ones(1, 200))
OF_BLOCKS = RIGHT | dict(scale_a=torch.ones(4, 3), scale_b=torch.ones(3, 2))
REFUSED = {
    "no fp8": (dict(a=torch.ones(4, 300)), "a has dtype torch.float32.*quantize it with mk.quantize, or call matmul_"),
    "no tensor": (dict(scale_b=1.0), "scale_b must be a torch.Tensor, got float"),
    "scales of another dtype": (dict(scale_a=torch.ones(4, 1).half()), "scale_a has dtype torch.float16, .*float32$"),
    "scales of MXFP8": (
        dict(scale_a=torch.ones(4, 10).to(torch.float8_e8m0fnu)), r"blocks of 1 x 32 \(MXFP8\) .* are not supported",
    ),
    "scales with too many dimensions": (dict(scale_a=torch.ones(4, 1, 2)), "at most 2 dimensions"),
    "scales of columns for rows": (
        dict(scale_a=torch.ones(1, 300)),
        r"scale_a has shape \(1, 300\), but a is 4 x 300: it must have one element, or 4 x 1, .* or 4 x 3, one for "
        "each block of 1 x 128",
    ),
    "scales of rows for columns": (
        dict(scale_b=torch.ones(200, 1)), "but b is 300 x 200 .*: it must have one element, or 1 x 200, .*, or 3 x 2",
    ),
    "a vector of scales": (dict(scale_a=torch.ones(4)), "4 x 1, one for each row"),
    "blocks of a alone": (dict(scale_a=torch.ones(4, 3)), "scale_a has shape .4, 3.: it must have 3 x 2, one for each"),
    "blocks of b alone": (dict(scale_b=torch.ones(3, 2)), "1 x 200.*3 x 2.*and then scale_a 4 x 3"),
    "blocks rounded down": (OF_BLOCKS | dict(scale_b=torch.ones(3, 1)), "must have 3 x 2, one for each block of 128"),
    "fast accumulation of blocks": (OF_BLOCKS | dict(use_fast_accum=True), "pass use_fast_accum=False"),
    "fast accumulation that is no truth value": (dict(use_fast_accum=1), "must be True or False, got 1"),
    "steps that are too small": (dict(config=mk.Config(tile_k=16)), "config.tile_k is 16, but must be at least 32"),
    "steps of several blocks": (OF_BLOCKS | dict(config=mk.Config(tile_k=256)), "256, but may be at most 128"),
    "a result of another dtype": (dict(out_dtype=torch.float64), "out_dtype must be one of torch.bfloat16"),
    "a result in fp8": (dict(out_dtype=E4M3), "out_dtype must be one of torch.bfloat16"),
    "a given result of another dtype": (
        dict(out=torch.empty(4, 200), out_dtype=torch.float16), "out has dtype torch.float32, but the result has",
    ),
    "a bias of another dtype": (dict(bias=torch.ones(200)), "bias has dtype torch.float32, but the result has"),
    "partials of another dtype": (dict(reduce_dtype=torch.float16), "reduce_dtype must be torch.float32 or the result"),
    "scales with gradients": (dict(scale_a=torch.ones(4, 1, requires_grad=True)), "scale_a requires grad"),
    "a bias with gradients": (dict(bias=torch.ones(200).bfloat16().requires_grad_()), "has no backward pass"),
    "rows that are not columns": (dict(b=B[:299]), r"a's columns \(300\) must be b's rows \(299\)"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused(what):
    changes, words = REFUSED[what]

    def work(group):
        for function in (mk.scaled_matmul_all_reduce, mk.scaled_matmul_reduce_scatter):
            with pytest.raises(mk.ArgumentError, match=words):
                function(**(RIGHT | changes))
        mk.scaled_matmul_all_reduce(**RIGHT)  # the group can be used

    run(work, cluster=(1, 1))


def test_the_result_must_not_overlap_the_scales():
    def work(group):
        memory = torch.ones(4, 200)
        with pytest.raises(mk.ArgumentError, match="out overlaps scale_a"):
            mk.scaled_matmul_all_reduce(**RIGHT | dict(scale_a=memory[:, :1]), out=memory)

    run(work, cluster=(1, 1))


def test_without_scales_fp8_is_refused():
    def work(group):
        for function in (mk.matmul_all_reduce, mk.matmul_reduce_scatter, mk.all_gather_matmul):
            with pytest.raises(mk.ArgumentError, match="multiplied by the operators with scales"):
                function(A, B)

    run(work, cluster=(1, 1))


def test_ranks_that_disagree():
    def work(group):
        with pytest.raises(mk.ArgumentError, match="out_dtype"):
            mk.scaled_matmul_all_reduce(**RIGHT, out_dtype=(torch.float16, torch.float32)[group.rank])
        with pytest.raises(mk.ArgumentError, match="same calls"):
            (mk.scaled_matmul_all_reduce, mk.scaled_matmul_reduce_scatter)[group.rank](**RIGHT)
        mk.scaled_matmul_all_reduce(**RIGHT)

    run(work, cluster=(1, 2))


def test_the_plan_says_what_the_scales_are():
    from mkernel.ops.reduce.all_reduce.scaled import explain

    def work(group):
        assert "a scale for each row of a, for each column of b" in str(explain(**RIGHT))
        assert "blocks of 1x128 of a and 128x128 of b" in str(explain(**OF_BLOCKS))
        assert str(explain(**RIGHT)).startswith("scaled_matmul_all_reduce: tiles")

    run(work, cluster=(1, 1))
