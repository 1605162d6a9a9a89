"""Calls with few rows in one node: which of them take the kernels for few rows, and what these compile to, without a
GPU."""

from __future__ import annotations

import re
from functools import cache, partial

import pytest
import torch
from support.compiled_launches import gathers, reduces, scaled_gathers, scaled_reduces

import mkernel as mk
from mkernel.compiling import SHARED_MEMORY, compile_launch

GATHER, SCATTER, REDUCE = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"
FEW = dict(n=1024, k=8192)
DECODE = dict(m=16, **FEW)


def kernel_of(launch):
    return launch.kernel.fn.__name__


@cache
def compiled(op, capability, call):
    make = gathers if op == GATHER else partial(reduces, op.removeprefix("matmul_"))
    launch = make(capability=capability, **dict(call))
    return launch, compile_launch(launch, capability)


def build(op, capability=90, **call):
    return compiled(op, capability, tuple(call.items()))


@pytest.mark.parametrize("capability", [90, *(pytest.param(each, marks=pytest.mark.thorough) for each in (80, 100))])
def test_which_kernel_gpus_take(capability):
    """Ampere has no TMA: calls that gather, or have one rank, take other kernels there unless they ask for teams."""
    has_tma = capability >= 90
    rows = partial(gathers, capability=capability, **FEW)
    assert (kernel_of(rows((1, 4), m=4)) == "few_rows_kernel") == has_tma
    assert (kernel_of(rows((1, 1), m=16)) == "few_rows_kernel") == has_tma
    assert kernel_of(rows((1, 4), m=4, config=mk.Config(team_ctas=8))) == "few_rows_kernel"
    assert kernel_of(rows((1, 4), m=65)) != "few_rows_kernel"
    assert kernel_of(rows((2, 2), m=4)) != "few_rows_kernel"
    assert kernel_of(rows((1, 4), m=4, dtype=torch.float32)) != "few_rows_kernel"
    assert kernel_of(rows((1, 4), m=4, config=mk.Config(warps=8))) != "few_rows_kernel"
    sums = partial(reduces, capability=capability, **DECODE)
    assert kernel_of(sums("reduce_scatter", (1, 4))) == "reduce_few_rows_kernel"
    assert kernel_of(sums("reduce_scatter", (2, 2))) != "reduce_few_rows_kernel"
    for op in ("reduce_scatter", "all_reduce"):
        assert (kernel_of(sums(op, (1, 1))) == "reduce_few_rows_kernel") == has_tma
        assert kernel_of(sums(op, (1, 1), config=mk.Config(team_ctas=8))) == "reduce_few_rows_kernel"
    assert kernel_of(sums("all_reduce", (1, 4))) != "reduce_few_rows_kernel"


def test_which_kernel_takes_fp8():
    """Tensor cores read fp8 along k only, so a b that is not a transposed view has other kernels."""
    rows = partial(scaled_gathers, recipe="rows", **FEW)
    for call in (dict(cluster=(1, 4), m=4), dict(cluster=(1, 1), m=16)):
        assert kernel_of(rows(**call)) == "few_rows_kernel"
        assert kernel_of(rows(**call, wide=torch.bfloat16)) != "few_rows_kernel"
    assert kernel_of(rows(cluster=(1, 4), m=65)) != "few_rows_kernel"
    for op in ("reduce_scatter", "all_reduce"):
        sums = partial(scaled_reduces, op, (1, 1), "rows", **DECODE)
        assert kernel_of(sums()) == "reduce_few_rows_kernel"
        assert kernel_of(sums(transposed=False)) != "reduce_few_rows_kernel"
    assert kernel_of(scaled_reduces("reduce_scatter", (1, 4), "blocks", **DECODE)) == "reduce_few_rows_kernel"


@pytest.mark.parametrize("gpus", [1, 4])
@pytest.mark.parametrize(("recipe", "fast"), [("rows", False), ("tensors", True), ("blocks", False)])
@pytest.mark.parametrize("m", [16, 128, 256])
@pytest.mark.thorough
def test_fp8(gpus, recipe, fast, m):
    """Nothing spills, products are not serialized, and enough of b is in flight."""
    for launch in (
        scaled_gathers((1, gpus), recipe, m=m // gpus, n=8192 // gpus, k=8192, fast=fast),
        scaled_reduces("reduce_scatter", (1, gpus), recipe, m=m, n=8192 // gpus, k=8192, fast=fast),
    ):
        assert "few_rows_kernel" in kernel_of(launch)
        made = compile_launch(launch)
        assert re.search(r"wgmma\.mma_async\.sync\.aligned\.m64n(64|128)k32\.f32\.e4m3\.e4m3", made.ptx)
        assert not made.warnings
        assert made.spilled == 0
        assert made.shared <= SHARED_MEMORY


COMPILED = {
    "one rank": (GATHER, dict(cluster=(1, 1), **DECODE)),
    "one rank, 64 rows": (GATHER, dict(cluster=(1, 1), m=64, **FEW)),
    "one rank, 128 rows": (GATHER, dict(cluster=(1, 1), m=128, n=8192, k=1024)),
    "one rank, b not transposed": (GATHER, dict(cluster=(1, 1), transposed=False, **DECODE)),
    "one rank, a sum": (SCATTER, dict(cluster=(1, 1), **DECODE)),
    "one rank, a sum with all": (REDUCE, dict(cluster=(1, 1), bias=True, residual=True, **DECODE)),
    "four ranks": (GATHER, dict(cluster=(1, 4), m=4, **FEW)),
    "four ranks, strided and paced": (GATHER, dict(cluster=(1, 4), m=4, strided=True, paced=True, **FEW)),
    "four ranks, a sum": (SCATTER, dict(cluster=(1, 4), **DECODE)),
    "three ranks, a sum with all": (
        SCATTER, dict(cluster=(1, 3), m=96, bias=True, residual=True, reduce_dtype=torch.float32, paced=True, **FEW)
    ),
    "four ranks, a sum through pointers": (SCATTER, dict(cluster=(1, 4), described=False, **DECODE)),
}  # fmt: skip


@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.thorough
def test_hopper(name):
    op, call = COMPILED[name]
    launch, made = build(op, **call)
    assert "few_rows_kernel" in kernel_of(launch)
    assert ".target sm_90a" in made.ptx
    assert made.spilled == 0
    assert made.shared <= SHARED_MEMORY
    if "pointers" not in name:
        assert "cp.async.bulk.tensor" in made.ptx, "no TMA load"


@pytest.mark.parametrize(
    ("capability", "name"),
    [(80, "one rank, a sum"), (80, "four ranks"), (100, "one rank"), (100, "four ranks, a sum")],
)
@pytest.mark.thorough
def test_other_gpus(capability, name):
    """Both kernels, with one rank and with several."""
    op, call = COMPILED[name]
    config = mk.Config(team_ctas=8, tile_m=16, tile_n=64) if capability == 80 else None
    launch, made = build(op, capability, **call, config=config)
    assert "few_rows_kernel" in kernel_of(launch)
    assert made.spilled <= (0 if call["cluster"] == (1, 1) else 16)  # some scalars
    assert made.shared <= (163 if capability == 80 else 227) * 1024


@pytest.mark.parametrize(("op", "ranks", "team"), [(GATHER, 1, 16), (GATHER, 2, 1), (SCATTER, 2, 16), (REDUCE, 1, 1)])
@pytest.mark.thorough
def test_sizes_of_one_compile(op, ranks, team):
    """Triton makes constants of arguments that are 1, and a unit may have a single row."""
    call = dict(cluster=(1, ranks), m=ranks if op == SCATTER else 1, n=1, k=1, described=False)
    launch, _ = build(op, **call, config=mk.Config(team_ctas=team, tile_m=16))
    assert "few_rows_kernel" in kernel_of(launch)
