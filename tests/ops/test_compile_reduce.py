"""matmul_reduce_scatter as machine code, with no GPU: one pipelined loop, wide stores, nothing spilled."""

import re
from functools import cache

import pytest
import torch
from compiling import REGISTERS, SHARED_MEMORY, compiled

from mkernel.ops.matmul_reduce_scatter import matmul_reduce_scatter_kernel
from mkernel.runtime.operands import DTYPES, matmul_precision
from mkernel.runtime.planning import default_tiles, depth_of_tile

NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
ONE_RANK = dict(SIZE=1, GPUS=1)
FOUR_RANKS = dict(SIZE=4, GPUS=4)
TWO_NODES = dict(SIZE=4, GPUS=2)
GROUPS = {
    "one rank": ONE_RANK,
    "four ranks": FOUR_RANKS,
    "two nodes": TWO_NODES,
    "eight ranks": dict(SIZE=8, GPUS=8),
    "bias and residual": dict(FOUR_RANKS, BIAS=True, RESIDUAL=True, RESIDUAL_DESCRIPTOR=True),
    "paced": dict(FOUR_RANKS, PACED=True),
    "two nodes, bias and residual": dict(TWO_NODES, BIAS=True, RESIDUAL=True, RESIDUAL_DESCRIPTOR=True),
    "two nodes, paced": dict(TWO_NODES, PACED=True),
    "b not transposed": dict(FOUR_RANKS, B_TRANSPOSED=False),
}


@pytest.fixture(scope="session")
def build(tmp_path_factory):
    """build(dtype, constants, ...) -> Compiled; each is compiled once."""

    @cache
    def kept(dtype, reduce_dtype, capability, described, tile, chosen):
        defaults = default_tiles(torch.device("cuda"), dtype, 8192, described)
        tile_m, tile_n = tile or (defaults.tile_m, defaults.tile_n)
        tile_k = depth_of_tile(defaults, tile_n, described)
        constants = dict(
            DTYPE=DTYPES[reduce_dtype], PACED=False, BIAS=False, RESIDUAL=False, RESIDUAL_DESCRIPTOR=False,
            A_DESCRIPTOR=described, B_DESCRIPTOR=described, B_TRANSPOSED=described, C_DESCRIPTOR=described,
            PRECISION=matmul_precision(dtype), TILE_M=tile_m, TILE_N=tile_n, TILE_K=tile_k, GROUP=defaults.group_m,
            c_column_stride=1, a_column_stride=1,
        ) | dict(chosen)  # fmt: skip
        pointer = "*" + NAMES[dtype]

        def operand(use: bool, *block: int) -> str:
            return f"tensordesc<{NAMES[dtype]}{list(block)}>" if use else pointer

        types = dict(
            context="*i64", data_start="i64", half="i64", bias=pointer,
            a=operand(described, 1, tile_m, tile_k),
            b=operand(described, *((tile_n, tile_k) if constants["B_TRANSPOSED"] else (tile_k, tile_n))),
            c=operand(described, 1, tile_m, tile_n // 2),
            residual=operand(constants["RESIDUAL_DESCRIPTOR"], 1, tile_m, tile_n // 2),
        )  # fmt: skip
        if not constants["BIAS"]:
            constants |= dict(bias=None)
        if not constants["RESIDUAL"]:
            constants |= dict(residual=None)
        return compiled(
            matmul_reduce_scatter_kernel, types, constants,
            unaligned=("signals", "nanoseconds_per_mib"),
            capability=capability, folder=tmp_path_factory.mktemp("compiled"),
            num_warps=defaults.warps, num_stages=defaults.stages,
        )  # fmt: skip

    def build(dtype, chosen, *, reduce_dtype=None, capability=90, described=True, tile=None, **more):
        return kept(dtype, reduce_dtype or dtype, capability, described, tile, tuple(sorted((chosen | more).items())))

    return build


@pytest.mark.parametrize("group", GROUPS)
def test_hopper(build, group):
    """The default tile: tensor cores fed by TMA, one step ahead, everything in registers."""
    made = build(torch.bfloat16, GROUPS[group])
    assert ".target sm_90a" in made.ptx
    assert re.search(r"cp\.async\.bulk\.tensor\.\dd\.shared::(cluster|cta)\.global", made.ptx), "no TMA load"
    assert made.ptx.count("wgmma.mma_async") == 4, "the multiplication is there once: 4 instructions of depth 16"
    assert "wgmma.wait_group.sync.aligned 1;" in made.ptx, "the loop is not pipelined"
    assert not made.remarks, "the multiplication waits for itself"
    assert made.usage["STACK"] <= 8, made.usage  # two scalars, when there is everything at once
    assert made.shared <= SHARED_MEMORY
    assert made.usage["REG"] * 8 * 32 <= REGISTERS


def test_parts_go_from_registers_to_memory_and_back(build):
    """16 bytes at a time, and not through shared memory."""
    made = build(torch.bfloat16, FOUR_RANKS)
    pieces = 128 * 256 * 2 // (8 * 32 * 16)
    assert made.ptx.count("st.global.v4.b32") == pieces
    assert made.ptx.count("ld.global.v4.b32") == pieces
    for narrow in ("st.global.b8", "st.global.b16", "st.global.v2.b16", "st.global.v4.b16"):
        assert narrow not in made.ptx, narrow
    stages = 3 * (128 + 256) * 64 * 2
    assert made.shared <= stages + 128 * 128 * 2 + 2048, "more than the operands and half a tile of the result"


CASES = {
    "parts in fp32": dict(reduce_dtype=torch.float32),
    "fp16": dict(dtype=torch.float16),
    "fp32": dict(dtype=torch.float32),
    "fp32 as tf32": dict(dtype=torch.float32, PRECISION="tf32"),
    "pointers": dict(described=False, tile=(128, 256)),
    "64x64": dict(tile=(64, 64)),
    "64x128": dict(tile=(64, 128)),
    "128x128": dict(tile=(128, 128)),
}


@pytest.mark.parametrize("case", CASES)
def test_no_spills(build, case):
    options = dict(CASES[case])
    made = build(options.pop("dtype", torch.bfloat16), FOUR_RANKS, **options)
    assert not made.spills, made.usage
    assert made.shared <= SHARED_MEMORY
