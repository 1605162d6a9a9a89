"""The kernels for Hopper of scaled_matmul_reduce_scatter and scaled_matmul_all_reduce, in the simulator."""

import pytest
import torch
from support.broken_variants import RELAXED_NOTIFY
from support.edited_functions import edited
from support.operator_calls import assert_same, run
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
from mkernel.lang import hopper_scaled
from mkernel.ops.reduce import hopper as sums
from mkernel.runtime import hopper

SCATTER, REDUCE = "matmul_reduce_scatter", "matmul_all_reduce"
CONFIG = mk.Config(ctas=3)
thorough = pytest.mark.thorough


def simulated(work, ranks=2, seed=0, **options):
    return run(work, cluster=(1, ranks), seed=seed, **dict(ctas=3, capability=(9, 0)) | options)


def multiply(group, op, case, turn=0, kernel=True, config=CONFIG, **more):
    """A call on this rank, whose result is checked. kernel: must the kernel for Hopper take it?"""
    a, scale_a = case.how.rows(case.m, case.depth(group.rank), (group.rank, turn))
    b, scale_b = case.how.columns(case.depth(group.rank), case.n, (group.rank, turn))
    given = more | {name: None for name in ("bias", "residual", "lay_out") if name in more}
    given.pop("lay_out", None)
    lay_out = more.get("lay_out", lambda tensor: tensor)
    plan = str(
        mk.explain(
            f"scaled_{op}", *map(lay_out, (a, b, scale_a, scale_b)), group=group, config=config,
            out_dtype=case.dtype, **given,
        )
    )  # fmt: skip
    assert ("the kernel for Hopper: " in plan) == kernel, plan
    assert ("the portable kernel, not that for Hopper: " in plan) != kernel, plan
    return call_sum(group, op, case, turn, config=config, **more)


def sum_of(op, ranks, n=520, k=272, dtype=torch.bfloat16, rows=None, **how):
    """The smallest sums for which all CTAs have work; the last columns fill no tile. all_reduce may have any number of
    rows, and so may one rank."""
    rows = rows or (128 * max(ranks, 2) if op == SCATTER and ranks > 1 else 200)
    return ScaledSum(rows, n, k, dtype, how=Quantized(**how))


@pytest.mark.parametrize("recipe", RECIPES, ids=recipe_name)
@pytest.mark.parametrize("op", [SCATTER, REDUCE])
@pytest.mark.parametrize("ranks", [2, pytest.param(1, marks=thorough), pytest.param(3, marks=thorough)])
def test_recipes(ranks, op, recipe):
    """k that fills no step, in both halves of the workspace; on all ranks of all_reduce, the same bits."""
    case = sum_of(op, ranks, recipe=recipe)
    first, *others = simulated(lambda group: [multiply(group, op, case, turn) for turn in range(2)], ranks, ranks)
    if op == REDUCE:
        for other in others:
            for one, theirs in zip(first, other):
                assert_same(one, theirs)


@pytest.mark.parametrize("op", [SCATTER, REDUCE])
@pytest.mark.parametrize("ranks", [1, 2])
def test_bias_and_residual(ranks, op):
    case = sum_of(op, ranks, dtype=torch.float16, kinds=(E5M2, E4M3))
    simulated(lambda group: multiply(group, op, case, bias=True, residual=True), ranks)


@pytest.mark.parametrize("op", [SCATTER, REDUCE])
@pytest.mark.parametrize("recipe", [TENSORS, ROWS], ids=recipe_name)
def test_fast_accumulation(op, recipe):
    """On tensor cores, it has fewer bits; here it is the same."""
    case = sum_of(op, 2, k=656, recipe=recipe, kinds=(E4M3, E5M2))
    exactly, fast = (
        simulated(lambda group: multiply(group, op, case, use_fast_accum=fast)) for fast in (False, True)
    )  # fmt: skip
    for one, other in zip(exactly, fast):
        assert torch.allclose(one.float(), other.float(), rtol=2**-7)


@pytest.mark.parametrize("op", [SCATTER, REDUCE])
@pytest.mark.parametrize("depths", [(272, 16), (128, 1040)])
def test_ranks_with_other_depths(op, depths):
    simulated(lambda group: multiply(group, op, sum_of(op, 2, k=depths, recipe=BLOCKS)))


@pytest.mark.parametrize("op", [SCATTER, REDUCE])
def test_the_same_bits_whatever_the_timing(op):
    case = sum_of(op, 2, recipe=BLOCKS)
    results = [simulated(lambda group: multiply(group, op, case), seed=seed) for seed in (1, 2)]
    for one, other in zip(*results, strict=True):
        assert_same(one, other)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("op", [SCATTER, REDUCE])
def test_schedules(op, seed):
    case = sum_of(op, 2, n=512, k=144)
    options = [{}, {"slow": {1: 1e-3}}, {"late": {0: 3000}}][seed]
    simulated(lambda group: [multiply(group, op, case, turn) for turn in range(2)], seed=seed, **options)


@thorough
@pytest.mark.parametrize("recipe", [ROWS, BLOCKS], ids=recipe_name)
@pytest.mark.parametrize("op", [SCATTER, REDUCE])
def test_a_rank_that_cannot_run_it_has_the_same_tiles(op, recipe):
    """Its b is not a transposed view. Both kernels round partials alike."""
    case = sum_of(op, 2, recipe=recipe)

    def lay_out(tensor):
        return tensor.contiguous() if tensor.dim() == 2 and tensor.stride(0) == 1 else tensor

    def work(group):
        odd = group.rank == 1
        return multiply(group, op, case, kernel=not odd, lay_out=lay_out if odd else lambda tensor: tensor)

    simulated(work)


@pytest.mark.parametrize("op", [SCATTER, REDUCE])
@pytest.mark.parametrize(
    ("shape", "arguments"),
    [
        (dict(dtype=torch.float32), {}),
        (dict(), dict(reduce_dtype=torch.float32)),
        (dict(k=136), {}),
        (dict(), dict(config=mk.Config(ctas=3, warps=8))),
        (dict(), dict(config=mk.Config(ctas=3, tile_n=128))),
    ],
    ids=["dtype", "reduce_dtype", "alignment", "warps", "tile"],
)
def test_other_calls_take_the_portable_kernel(op, shape, arguments):
    simulated(lambda group: multiply(group, op, sum_of(op, 2, **shape), kernel=False, **arguments))


def test_one_rank_of_all_reduce_has_the_kernel_of_reduce_scatter():
    case = sum_of(REDUCE, 1)
    one, other = (simulated(lambda group: multiply(group, op, case), 1)[0] for op in (SCATTER, REDUCE))
    assert_same(one, other)


@pytest.mark.parametrize("recipe", [ROWS, BLOCKS], ids=recipe_name)
@pytest.mark.parametrize(("op", "ranks"), [(SCATTER, 1), (REDUCE, 1), (SCATTER, 2)])
def test_few_rows(op, ranks, recipe):
    """Each team of CTAs computes a tile, with the rows of all ranks."""
    case = ScaledSum(18, 72, 1040, torch.bfloat16, how=Quantized(recipe))

    def work(group):
        (a, scale_a), (b, scale_b) = case.how.rows(18, 1040, (group.rank, 0)), case.how.columns(1040, 72, (0, 0))
        assert mk.explain(f"scaled_{op}", a, b, scale_a, scale_b).few_rows
        for turn in range(2):
            call_sum(group, op, case, turn, bias=True, residual=True)

    simulated(work, ranks, ctas=8)


# -- rules of synchronization, broken


def change(function, *edits):
    return {function: edited(function, *edits)}


ARRIVE = "mbarrier.arrive(stages.freed.index(stage), count=1)"
BROKEN = {
    "a stage is read before it is loaded": (
        change(
            hopper_scaled._multiply_promoted,
            ("mbarrier.wait(stages.filled.index(stage), (step // STAGES) & 1)", "pass"),
        ),
        "nobody has written|must wait for",
        ROWS,
    ),
    "a stage is freed before the second half": (
        change(
            hopper_scaled._multiply_promoted,
            (ARRIVE, "pass"),
            (
                "x, y = _operands(stages, stage, 1, WARPGROUP, BY_ROWS)",
                f"{ARRIVE}\nx, y = _operands(stages, stage, 1, WARPGROUP, BY_ROWS)",
            ),
        ),
        "race on|nothing orders|warpgroup_mma_wait",
        BLOCKS,
    ),
    "a partial is signalled without a release": (RELAXED_NOTIFY, "race on |not by a release", TENSORS),
    "partials are read before they are loaded": (
        change(sums._staged_rows, ("mbarrier.wait(stages.filled.index(stage), (step // STAGES) & 1)", "pass")),
        "must wait for|nobody has written|in _staged_rows",
        ROWS,
    ),
}


@pytest.mark.parametrize("op", [SCATTER, pytest.param(REDUCE, marks=thorough)])
@pytest.mark.parametrize("name", BROKEN)
def test_broken_variants_are_found(name, op):
    replaced, match, recipe = BROKEN[name]
    case = sum_of(op, 2, k=1040, recipe=recipe)
    with pytest.raises(mk.SimulatorError, match=match):
        simulated(lambda group: multiply(group, op, case), seed=3, timeout=1e-4, slow={1: 1.0}, replace=replaced)


def test_a_tile_of_the_portable_kernel_is_as_wide():
    """If no rank can run the kernel for Hopper, for reasons that ranks need not share."""
    case = sum_of(SCATTER, 2)
    tiles = []

    def work(group):
        b = case.how.columns(272, case.n, (group.rank, 0))[0]
        a, scale_a = case.how.rows(case.m, 272, (group.rank, 0))
        scale_b = case.how.columns(272, case.n, (group.rank, 0))[1]
        plan = mk.explain("scaled_matmul_reduce_scatter", a, b.contiguous(), scale_a, scale_b, config=CONFIG)
        tiles.append((plan.hopper, plan.config.tile_m, plan.config.tile_n))

    simulated(work)
    assert tiles == [(False, hopper.TILE_M, hopper.TILE_N)] * 2
