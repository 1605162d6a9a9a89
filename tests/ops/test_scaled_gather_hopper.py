"""The kernel of all_gather_scaled_matmul for Hopper, in the simulator."""

import pytest
import torch
import triton
from support.operator_calls import assert_same
from support.scaled_reference import (
    BLOCKS,
    E4M3,
    E5M2,
    RECIPES,
    ROWS,
    TENSORS,
    Quantized,
    ScaledGather,
    call_gather,
    recipe_name,
)
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma

import mkernel as mk
from mkernel.lang import hopper_scaled
from mkernel.lang.hopper import ROWS as HALF
from mkernel.lang.hopper import STAGES
from mkernel.ops.all_gather_matmul import hopper as gathers
from mkernel.ops.all_gather_matmul import protocol
from mkernel.sim.scheduler import Options

OP = "all_gather_scaled_matmul"
ON_HOPPER = dict(capability=(9, 0), ctas=3)
PORTABLE = mk.Config(warps=8)
thorough = pytest.mark.thorough


def calls(group, case, count, arguments):
    """(result, plan) of the last of some calls, each checked."""
    for turn in range(count):
        y = call_gather(group, case, turn, **arguments)
    (a, scale_a), (b, scale_b) = case.rows(group.rank), case.columns(group.rank)
    return y, str(mk.explain(OP, a, b, scale_a, scale_b, group=group, out_dtype=case.dtype, **arguments))


def run(ranks, case, count=2, seed=0, options=None, hopper=True, **arguments):
    """The results of the ranks. hopper: must the kernel for Hopper take the calls?"""
    sim = Options(**ON_HOPPER | (options or {}))
    results = mk.spawn(
        calls, case, count, arguments, gpus_per_node=ranks, device="cpu", seed=seed, timeout=5.0, sim=sim
    )  # fmt: skip
    assert all(("Hopper kernel" in plan) == hopper for _, plan in results)
    return [y for y, _ in results]


@pytest.mark.parametrize("recipe", RECIPES, ids=recipe_name)
@pytest.mark.parametrize("ranks", [2, pytest.param(1, marks=thorough), pytest.param(3, marks=thorough)])
def test_recipes(ranks, recipe):
    """Columns and k that fill no tile and no step; one call in an even epoch, one in an odd one."""
    run(ranks, ScaledGather(256, 136, 272, how=Quantized(recipe)), seed=ranks)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("ranks", "case", "arguments"),
    [
        (2, ScaledGather(256, 264, 656, torch.float16), dict(use_fast_accum=True)),
        (2, ScaledGather(512, 128, 128, how=Quantized(ROWS, (E5M2, E4M3))), dict(config=mk.Config(chunk_rows=24))),
        (1, ScaledGather(256, 392, 656, how=Quantized(ROWS, (E4M3, E5M2))), {}),
        (3, ScaledGather(256, (16, 128, 272), 64), dict(config=mk.Config(ctas=2, group_m=1))),
    ],
)
def test_sizes(ranks, case, arguments, seed):
    run(ranks, case, count=1, seed=seed, **arguments)


def test_the_same_bits_whatever_the_timing():
    case = ScaledGather(256, 136, 272, how=Quantized(BLOCKS))
    for one, other in zip(*(run(2, case, count=1, seed=seed) for seed in (1, 2)), strict=True):
        assert_same(one, other)


@pytest.mark.parametrize(
    ("case", "arguments"),
    [
        (ScaledGather(384, 136, 144), {}),
        (ScaledGather(256, 130, 144), {}),
        (ScaledGather(256, 136, 136), {}),
        (ScaledGather(256, 136, 144, torch.float32), {}),
        (ScaledGather(256, 136, 144), dict(config=PORTABLE)),
    ],
    ids=["rows", "columns", "alignment", "dtype", "configuration"],
)
def test_other_calls_take_the_portable_kernel(case, arguments):
    run(2, case, count=1, hopper=False, **arguments)


@pytest.mark.parametrize("recipe", [ROWS, BLOCKS, pytest.param(TENSORS, marks=thorough)], ids=recipe_name)
@pytest.mark.parametrize(("ranks", "rows"), [(1, 5), (2, 9), (2, 70)])
def test_few_rows(ranks, rows, recipe):
    """A tile has the rows of all ranks, and teams of CTAs share k where they are long enough."""
    case = ScaledGather(rows, 72, 1040, how=Quantized(recipe))
    fast = recipe != BLOCKS and ranks == 2

    def work(group):
        for turn in range(2):
            call_gather(group, case, turn, use_fast_accum=fast)
        (a, scale_a), (b, scale_b) = case.rows(group.rank), case.columns(group.rank)
        return mk.explain(OP, a, b, scale_a, scale_b, group=group, use_fast_accum=fast)

    sim = Options(capability=(9, 0), ctas=8)
    for plan in mk.spawn(work, gpus_per_node=ranks, device="cpu", timeout=5.0, sim=sim):
        assert plan.few_rows
        assert plan.config.tile_k == (256 if fast else 128)
        assert (plan.config.team_ctas > 1) == (rows < 64)


def test_chunks():
    """Small ones, so that they arrive in the order of tiles, and the same whether a rank quantizes its rows or not."""

    def chunk(group, m, recipe=None):
        w, scale_w = mk.quantize(torch.zeros(136, 256), "RowWise")
        a, scale_a = torch.zeros(m, 256, dtype=torch.bfloat16), None
        if recipe is None:
            a, scale_a = mk.quantize(a, "RowWise")
        more = {} if recipe is None else dict(recipe_a=recipe)
        return mk.explain(OP, a, w.t(), scale_a, scale_w.t(), group=group, **more).config.chunk_rows

    def work(group):
        return [chunk(group, m, recipe) for m in (8192, 2048) for recipe in (None, "RowWise")]

    sim = Options(**ON_HOPPER)
    assert mk.spawn(work, gpus_per_node=2, device="cpu", sim=sim) == [[32, 32, 8, 8]] * 2


# -- rules of synchronization, broken


@gluon.jit
def scales_ahead_of_the_rows(
    stages, step, factors, WARPGROUP: gl.constexpr, BY_ROWS: gl.constexpr, BLOCKWISE: gl.constexpr
):  # fmt: skip
    of_upper, of_lower = hopper_scaled._scales_of_step(factors, step * 0, WARPGROUP, BY_ROWS)
    upper, lower, step = hopper_scaled._multiply_promoted(stages, step, factors, WARPGROUP, BY_ROWS, BLOCKWISE)
    return upper + gl.expand_dims(of_upper, 1), lower + gl.expand_dims(of_lower, 1), step


@gluon.jit
def free_after_the_first_half(
    stages, step, factors, WARPGROUP: gl.constexpr, BY_ROWS: gl.constexpr, BLOCKWISE: gl.constexpr
):  # fmt: skip
    zeros = gl.zeros([HALF, hopper_scaled.COLUMNS], gl.float32, hopper_scaled.half_layout())
    upper = zeros
    lower = zeros
    first: gl.constexpr = WARPGROUP * 2 * HALF
    for _ in range(gl.cdiv(factors.k, hopper_scaled.BLOCK)):
        stage = step % STAGES
        mbarrier.wait(stages.filled.index(stage), (step // STAGES) & 1)
        y = stages.b.index(stage).permute((1, 0))
        x = stages.a.index(stage)
        upper += warpgroup_mma(x.slice(first, HALF), y, zeros, use_acc=False)
        mbarrier.arrive(stages.freed.index(stage), count=1)
        lower += warpgroup_mma(x.slice(first + HALF, HALF), y, zeros, use_acc=False)
        step += 1
    return upper, lower, step


@gluon.jit
def push_no_scales(comm, call, row, rows):
    pass


@triton.jit
def signal_only(comm, gather, peer, source, chunk):
    """`notify_chunk` without the barrier and the release in front of the signal."""
    segment = gathers.segment_of(comm.context, peer, triton.language.int64)
    word = segment + protocol.word_of(gather.arrived, comm.epoch, source, chunk)
    triton.language.atomic_xchg(word, comm.epoch, sem="relaxed", scope="sys")


PROMOTED = hopper_scaled._multiply_promoted
BROKEN = {
    "scales are read before the rows have arrived": (
        {PROMOTED: scales_ahead_of_the_rows},
        BLOCKS,
    ),
    "a stage is freed before the second half": ({PROMOTED: free_after_the_first_half}, ROWS),
    "scales are not pushed": ({gathers._push_scales: push_no_scales}, TENSORS),
    "a chunk is signalled without a release": ({protocol.notify_chunk: signal_only}, ROWS),
}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", BROKEN)
def test_broken_variants_are_found(name, seed):
    replaced, recipe = BROKEN[name]
    with pytest.raises((mk.RaceError, mk.SimulatorError), match=r"nothing orders|nobody has written"):
        run(2, ScaledGather(256, 136, 1040, how=Quantized(recipe)), seed=seed, options=dict(replace=replaced))
