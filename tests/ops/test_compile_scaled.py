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
SUMS = {
    "scatter, rows": dict(op="reduce_scatter", cluster=(1, 4), recipe="rows"),
    "scatter, blocks, two nodes": dict(op="reduce_scatter", cluster=(2, 2), recipe="blocks"),
    "scatter, fast, e5m2": dict(op="reduce_scatter", cluster=(1, 4), recipe="rows", fast=True, kind=torch.float8_e5m2),
    "reduce, rows": dict(op="all_reduce", cluster=(1, 4), recipe="rows"),
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
    steps = min((loop for loop in made.loops() if any("QGMMA" in each for each in loop)), key=len)
    assert sum("QGMMA" in each for each in steps) == 2 * 128 // 32


@pytest.mark.parametrize("name", SUMS)
@pytest.mark.thorough
def test_sums(name):
    assert_good(total(name), "e5m2" if "e5m2" in name else "e4m3")


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
