"""Operators with scales as machine code, with no GPU: fp8 tensor cores, fed by TMA, and nothing spilled."""

import re
from functools import cache

import pytest
import torch
from support.compiled_launches import scaled_gathers, scaled_reduces
from support.workloads import workload_of

import mkernel as mk
from mkernel.compiling import REGISTERS, SHARED_MEMORY, compile_launch, launched

PORTABLE = mk.Config(warps=8)  # the default; given, it keeps calls from the kernel for Hopper
GATHERS = {
    "rows": dict(cluster=(1, 4), recipe="rows", config=PORTABLE),
    "blocks, two nodes": dict(cluster=(2, 2), recipe="blocks"),
    "fast, one rank": dict(cluster=(1, 1), recipe="tensors", fast=True, config=PORTABLE),
    "rows, quantized": dict(cluster=(1, 4), recipe="rows", wide=torch.bfloat16),
    "blocks, quantized, two nodes": dict(cluster=(2, 2), recipe="blocks", wide=torch.bfloat16),
    "blocks, with what is gathered": dict(cluster=(1, 4), recipe="blocks", gathered=True),
}
NARROW = mk.Config(tile_m=128, tile_n=128)  # tiles that the kernel for Hopper does not take
SUMS = {
    "scatter, rows": dict(op="reduce_scatter", cluster=(1, 4), recipe="rows", config=NARROW),
    "scatter, blocks, two nodes": dict(op="reduce_scatter", cluster=(2, 2), recipe="blocks"),
    "scatter, fast, e5m2": dict(
        op="reduce_scatter", cluster=(1, 4), recipe="rows", fast=True, kind=torch.float8_e5m2, config=NARROW
    ),
    "reduce, rows": dict(op="all_reduce", cluster=(1, 4), recipe="rows", config=NARROW),
    "reduce, blocks, in slices": dict(op="all_reduce", cluster=(1, 4), recipe="blocks", m=128, n=8192),
}


@cache
def gather(name):
    return compile_launch(scaled_gathers(**GATHERS[name]), 90)


@cache
def total(name):
    return compile_launch(scaled_reduces(**SUMS[name]), 90)


def assert_good(made, kind="e4m3"):
    assert f"wgmma.mma_async.sync.aligned.m64n128k32.f32.{kind}.e4m3" in made.ptx
    assert re.search(r"cp\.async\.bulk\.tensor\.\dd\.shared::(cluster|cta)\.global", made.ptx), "no TMA load"
    assert not made.warnings, "the multiplication waits for itself"
    assert made.spilled == 0
    assert made.shared <= SHARED_MEMORY
    assert made.registers * 8 * 32 <= REGISTERS


def steps_of(made):
    """The machine code of both warpgroups' loops over steps."""
    loops = (loop for loop in made.loops() if any("QGMMA" in each for each in loop))
    return sorted(loops, key=len)[:2]


@pytest.mark.parametrize("name", GATHERS)
@pytest.mark.thorough
def test_gathers(name):
    assert_good(gather(name))


@pytest.mark.parametrize(
    ("cluster", "recipe", "fast"),
    [((1, 4), "blocks", False), ((1, 4), "rows", False), ((1, 2), "rows", True), ((1, 1), "tensors", False)],
)
@pytest.mark.thorough
def test_gathers_by_the_kernel_for_hopper(cluster, recipe, fast):
    """No instruction of the loop over steps is a spill, and both halves of a warpgroup's rows are multiplied there."""
    launch = scaled_gathers(cluster, recipe, fast=fast)
    assert launch.kernel.fn.__name__ == "all_gather_scaled_matmul_hopper_kernel"
    made = compile_launch(launch)
    assert_good(made)
    for steps in steps_of(made):
        assert sum("QGMMA" in each for each in steps) == 2 * 128 // 32


@pytest.mark.parametrize("name", SUMS)
@pytest.mark.thorough
def test_sums(name):
    assert_good(total(name), "e5m2" if "e5m2" in name else "e4m3")


@pytest.mark.parametrize("op", ["reduce_scatter", "all_reduce"])
@pytest.mark.parametrize(
    ("gpus", "recipe", "more"),
    [
        (4, "blocks", dict(bias=False)),
        (4, "rows", dict(bias=False)),
        (2, "rows", dict(bias=False, fast=True, paced=True)),
        (4, "tensors", dict(bias=True, residual=True)),
        (1, "rows", dict(bias=False)),
    ],
)
@pytest.mark.thorough
def test_sums_by_the_kernels_for_hopper(op, gpus, recipe, more):
    """Beside a total, the sums of only one half are in registers: no loop over steps spills more than a value. What
    is spilled is spilled between tiles."""
    launch = scaled_reduces(op, (1, gpus), recipe, **more)
    assert launch.kernel.fn.__name__.endswith("_hopper_kernel")
    made = compile_launch(launch)
    assert "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3" in made.ptx
    assert not made.warnings
    assert made.shared <= SHARED_MEMORY
    assert made.spilled <= (0 if gpus == 1 else 600 if op == "reduce_scatter" else 1100)
    for steps in steps_of(made):
        assert sum("QGMMA" in each for each in steps) == 2 * 128 // 32
        assert sum("LDL" in each or "STL" in each for each in steps) <= 1


@pytest.mark.parametrize("op", ["reduce_scatter", "all_reduce"])
@pytest.mark.thorough
def test_ranks_that_cannot_run_the_kernels_for_hopper_have_as_wide_tiles(op):
    launch = scaled_reduces(op, (1, 4), "rows", transposed=False)
    assert launch.kernel.fn.__name__ in ("matmul_reduce_scatter_kernel", "two_level_kernel")
    assert "f32.e4m3.e4m3" in compile_launch(launch).ptx


@pytest.mark.thorough
def test_rows_of_fp8_are_copied_in_16_bytes():
    made = gather("rows")
    assert "st.global.v4.b32" in made.ptx
    for narrow in ("st.global.b8", "ld.global.b8"):
        assert narrow not in made.ptx, narrow


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["rows, quantized", "blocks, quantized, two nodes"])
def test_rows_are_quantized_in_instructions_of_hopper(name):
    """With a quotient that is rounded right, as PyTorch's, and numbers below the normal ones kept."""
    made = gather(name)
    assert "cvt.rn.satfinite.e4m3x2.f32" in made.ptx
    assert "div.rn.f32" in made.ptx
    for other in (".ftz", "div.full", "ld.global.b16"):
        assert other not in made.ptx, other


OF_EXPERTS = [dict(blockwise=True), dict(quantize=True), dict(blockwise=True, quantize=True)]


@pytest.mark.parametrize("options", OF_EXPERTS, ids=str)
@pytest.mark.parametrize("cluster", [(1, 1), (2, 2)], ids=str)
@pytest.mark.thorough
def test_experts(cluster, options):
    """Tokens, too, are copied 16 bytes at a time."""

    def prepare(group):
        call = workload_of("moe_dispatch_scaled_matmul").make(group, (4096, 2048, 7168), torch.bfloat16, **options)
        return call.tried.prepare(None)

    made = compile_launch(launched(prepare, cluster), 90)
    assert_good(made)
    assert made.ptx.count("st.global.v4") >= 12  # of unrolled loops: a few for each copy
    for narrow in ("st.global.b16", "ld.global.b8"):
        assert narrow not in made.ptx, narrow


@pytest.mark.parametrize("options", OF_EXPERTS, ids=str)
@pytest.mark.parametrize(("cluster", "spilled"), [((1, 4), 0), ((2, 2), 72)], ids=str)
@pytest.mark.thorough
def test_layer_of_experts(options, cluster, spilled):
    """Both tiles of sums and a product are in registers; with several nodes, some bytes of a thread are not."""

    def prepare(group):
        call = workload_of("scaled_moe_ffn").make(group, (4096, 2048, 7168), torch.bfloat16, **options)
        return call.tried.prepare(None)

    made = compile_launch(launched(prepare, cluster), 90)
    assert "f32.e4m3.e4m3" in made.ptx
    assert made.spilled <= spilled
    assert made.shared <= SHARED_MEMORY
    assert made.registers * 8 * 32 <= REGISTERS


@pytest.mark.parametrize("calls", [dict(described=False), dict(transposed=False), dict(config=mk.Config(tile_k=256))])
@pytest.mark.thorough
def test_what_is_slower_compiles(calls):
    made = compile_launch(scaled_reduces("reduce_scatter", (1, 4), "rows", **calls), 90)
    assert "f32.e4m3.e4m3" in made.ptx
