"""Operators that sum over ranks as machine code, with no GPU: one pipelined loop, wide stores, nothing spilled."""

import re
from functools import cache

import pytest
import torch
from compiling import NAMES, REGISTERS, SHARED_MEMORY, compiled
from mkernel.ops.matmul_all_reduce import one_shot_kernel, two_level_kernel
from mkernel.ops.matmul_all_reduce_multicast import multicast_kernel
from mkernel.ops.matmul_all_reduce_sliced import sliced_kernel
from mkernel.ops.matmul_reduce_scatter import matmul_reduce_scatter_kernel

from mkernel.runtime.operands import DTYPES, matmul_precision
from mkernel.runtime.planning import default_tiles, settings_of_sum

KERNELS = {
    "reduce_scatter": matmul_reduce_scatter_kernel,
    "all_reduce": two_level_kernel,
    "one_shot": one_shot_kernel,
    "sliced": sliced_kernel,
    "multicast": multicast_kernel,
}
ONE_RANK = dict(SIZE=1, GPUS=1)
FOUR_RANKS = dict(SIZE=4, GPUS=4)
TWO_NODES = dict(SIZE=4, GPUS=2)
GROUPS = {
    "one rank": ONE_RANK,
    "four ranks": FOUR_RANKS,
    "two nodes": TWO_NODES,
    "bias and residual": dict(FOUR_RANKS, BIAS=True, RESIDUAL=True, RESIDUAL_DESCRIPTOR=True),
    "paced": dict(FOUR_RANKS, PACED=True),
    "two nodes, bias and residual": dict(TWO_NODES, BIAS=True, RESIDUAL=True, RESIDUAL_DESCRIPTOR=True),
    "two nodes, paced": dict(TWO_NODES, PACED=True),
    "b not transposed": dict(FOUR_RANKS, B_TRANSPOSED=False),
    "in switch": dict(FOUR_RANKS, IN_SWITCH=True),
    "in switch, bias and residual": dict(
        FOUR_RANKS, BIAS=True, RESIDUAL=True, RESIDUAL_DESCRIPTOR=True, IN_SWITCH=True
    ),
}


@pytest.fixture(scope="session")
def build(tmp_path_factory):
    """build(dtype, constants, ...) -> Compiled; each is compiled once."""

    @cache
    def kept(kernel, dtype, reduce_dtype, capability, described, tile, chosen):
        device = torch.device("cuda")
        defaults = default_tiles(device, dtype, 8192, True)
        tile_m, tile_n = tile or (defaults.tile_m, defaults.tile_n)
        settings = settings_of_sum(device, dtype, tile_m, tile_n, described, 132, None)
        tile_k = settings.tile_k
        constants = dict(
            DTYPE=DTYPES[reduce_dtype], PACED=False, IN_SWITCH=False,
            BIAS=False, RESIDUAL=False, RESIDUAL_DESCRIPTOR=False,
            A_DESCRIPTOR=described, B_DESCRIPTOR=described, B_TRANSPOSED=described, C_DESCRIPTOR=described,
            PRECISION=matmul_precision(dtype), TILE_M=tile_m, TILE_N=tile_n, TILE_K=tile_k, GROUP=settings.group_m,
            OUT=DTYPES[dtype], c_column_stride=1, a_column_stride=1,
        ) | dict(chosen)  # fmt: skip
        constants = {name: value for name, value in constants.items() if name in KERNELS[kernel].arg_names}
        pointer = "*" + NAMES[dtype]

        def operand(use: bool, *block: int) -> str:
            return f"tensordesc<{NAMES[dtype]}{list(block)}>" if use else pointer

        types = dict(
            context="*i64", data_start="i64", half="i64", bias=pointer,
            a=operand(described, 1, tile_m, tile_k),
            b=operand(described, *((tile_n, tile_k) if constants["B_TRANSPOSED"] else (tile_k, tile_n))),
            c=operand(constants["C_DESCRIPTOR"], 1, tile_m, tile_n // 2),
            residual=operand(constants["RESIDUAL_DESCRIPTOR"], 1, tile_m, tile_n // 2),
        )  # fmt: skip
        if not constants["BIAS"]:
            constants |= dict(bias=None)
        if not constants["RESIDUAL"]:
            constants |= dict(residual=None)
        return compiled(
            KERNELS[kernel], types, constants, unaligned=("signals", "nanoseconds_per_mib"),
            capability=capability, folder=tmp_path_factory.mktemp("compiled"),
            num_warps=settings.warps, num_stages=settings.stages,
        )  # fmt: skip

    def build(
        dtype, chosen, *, kernel="reduce_scatter", reduce_dtype=None, capability=90, described=True, tile=None, **more
    ):
        chosen = tuple(sorted((chosen | more).items()))
        return kept(kernel, dtype, reduce_dtype or dtype, capability, described, tile, chosen)

    return build


FOR_MULTICAST = ["four ranks", "bias and residual", "in switch", "in switch, bias and residual"]
FOR_ALL_REDUCE = ["one rank", "four ranks", "two nodes", "two nodes, bias and residual", "two nodes, paced"]


@pytest.mark.parametrize(
    ("kernel", "group"),
    [
        *(("reduce_scatter", group) for group in GROUPS if "switch" not in group),
        *(("all_reduce", group) for group in FOR_ALL_REDUCE),
        *(("multicast", group) for group in FOR_MULTICAST),
    ],
)
@pytest.mark.thorough
def test_hopper(build, group, kernel):
    """The default tile: tensor cores fed by TMA, one step ahead, everything in registers."""
    made = build(torch.bfloat16, GROUPS[group], kernel=kernel)
    assert ".target sm_90a" in made.ptx
    assert re.search(r"cp\.async\.bulk\.tensor\.\dd\.shared::(cluster|cta)\.global", made.ptx), "no TMA load"
    assert made.ptx.count("wgmma.mma_async") == 4, "the multiplication is there once: 4 instructions of depth 16"
    assert "wgmma.wait_group.sync.aligned 1;" in made.ptx, "the loop is not pipelined"
    assert not made.remarks, "the multiplication waits for itself"
    assert made.usage["STACK"] <= 8, made.usage  # two scalars, when there is everything at once
    assert made.shared <= SHARED_MEMORY
    assert made.usage["REG"] * 8 * 32 <= REGISTERS


@pytest.mark.parametrize(("kernel", "stored", "loaded"), [("reduce_scatter", 1, 1), ("all_reduce", 2, 3)])
def test_tiles_go_from_registers_to_memory_and_back(build, kernel, stored, loaded):
    """16 bytes at a time, and not through shared memory: parts, and finished tiles (read in two places)."""
    made = build(torch.bfloat16, FOUR_RANKS, kernel=kernel)
    pieces = 128 * 256 * 2 // (8 * 32 * 16)
    assert made.ptx.count("st.global.v4.b32") == stored * pieces
    assert made.ptx.count("ld.global.v4.b32") == loaded * pieces
    for narrow in ("st.global.b8", "st.global.b16", "st.global.v2.b16", "st.global.v4.b16"):
        assert narrow not in made.ptx, narrow


@pytest.mark.parametrize("in_switch", [False, True])
@pytest.mark.parametrize("reduce_dtype", [torch.bfloat16, torch.float32])
def test_multicast(build, in_switch, reduce_dtype):
    """The switch gets 16 bytes at a time, straight from registers, and adds every one of them once."""
    made = build(torch.bfloat16, FOUR_RANKS, kernel="multicast", reduce_dtype=reduce_dtype, IN_SWITCH=in_switch)
    stored = 128 * 256 * 2 // (8 * 32 * 16)
    parts = 128 * 256 * reduce_dtype.itemsize // (8 * 32 * 16)
    assert made.ptx.count("multimem.st.relaxed.sys.global.v4.f32") == stored
    kind = "acc::f32.v4.bf16x2" if reduce_dtype == torch.bfloat16 else "v4.f32"
    assert made.ptx.count(f"multimem.ld_reduce.relaxed.sys.global.add.{kind}") == (parts if in_switch else 0)
    assert made.instructions("LDGMC") == (parts if in_switch else 0)
    # one before either place where finished tiles are announced, and one before the sum
    assert made.ptx.count("fence.proxy.alias;") == (3 if in_switch else 2)
    assert made.usage["STACK"] <= 8, made.usage  # some scalars
    assert made.shared <= SHARED_MEMORY
    assert "multimem" not in build(torch.bfloat16, FOUR_RANKS, kernel="all_reduce").ptx


def test_multicast_in_fp16(build):
    made = build(torch.float16, FOUR_RANKS, kernel="multicast", IN_SWITCH=True)
    assert "multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.f16x2" in made.ptx


@pytest.mark.parametrize("case", ["pointers", "64x64", "128x64", "128x128"])
def test_the_switch_adds_once(build, case):
    """Triton copies an instruction when it likes to; a second sum might have other bits."""
    options = dict(CASES[case])
    made = build(torch.bfloat16, FOUR_RANKS, kernel="multicast", IN_SWITCH=True, **options)
    rows, columns = options.get("tile", (128, 256))
    warps = 4 if rows == 64 else 8
    assert made.instructions("LDGMC") == rows * columns * 2 // (warps * 32 * 16)
    assert made.usage["STACK"] <= 16, made.usage
    assert made.shared <= SHARED_MEMORY


def test_pacing_costs_nothing_when_there_is_none(build):
    plain, paced = (build(torch.bfloat16, FOUR_RANKS, PACED=paced).ptx for paced in (False, True))
    assert paced.count("%globaltimer") > plain.count("%globaltimer")


def test_a_rank_alone_has_nothing_to_wait_for(build):
    for kernel in ("reduce_scatter", "all_reduce"):
        ptx = build(torch.bfloat16, ONE_RANK, kernel=kernel).ptx
        assert "%globaltimer" not in ptx
        assert ".sys." not in ptx


CASES = {
    "parts in fp32": dict(reduce_dtype=torch.float32),
    "fp32": dict(dtype=torch.float32),
    "fp32 as tf32": dict(dtype=torch.float32, PRECISION="tf32"),
    "pointers": dict(described=False),
    "64x64": dict(tile=(64, 64)),
    "128x64": dict(tile=(128, 64)),
    "128x128": dict(tile=(128, 128)),
}


@pytest.mark.parametrize(
    ("kernel", "case"),
    [
        *(("reduce_scatter", case) for case in CASES),
        *(("all_reduce", case) for case in ("parts in fp32", "fp32", "pointers", "128x64")),
        *(("one_shot", case) for case in ("pointers", "128x64", "64x64")),
        *(("multicast", case) for case in ("parts in fp32", "fp32", "pointers", "128x64")),
    ],
)
def test_no_spills(build, case, kernel):
    options = dict(CASES[case])
    made = build(options.pop("dtype", torch.bfloat16), FOUR_RANKS, kernel=kernel, **options)
    assert made.usage["STACK"] <= 16, made.usage  # some scalars
    assert made.shared <= SHARED_MEMORY


@pytest.mark.parametrize("kernel", KERNELS)
def test_sizes_of_one(build, kernel):
    """Triton makes constants of arguments that are 1: a kernel must not take them for tensors."""
    names = ("rows", "m", "n", "k", "signals", "a_row_stride", "b_row_stride", "b_column_stride", "c_row_stride",
             "residual_row_stride", "residual_column_stride")  # fmt: skip
    ones = {name: 1 for name in names if name in KERNELS[kernel].arg_names}
    build(torch.bfloat16, dict(TWO_NODES, RESIDUAL=True), kernel=kernel, described=False, tile=(64, 64), **ones)


@pytest.mark.parametrize(
    ("kernel", "capability"), [("reduce_scatter", 80), ("reduce_scatter", 100), ("all_reduce", 100), ("multicast", 100)]
)
def test_other_gpus(build, capability, kernel):
    made = build(torch.bfloat16, FOUR_RANKS, kernel=kernel, capability=capability, described=capability >= 90,
                 tile=(128, 128))  # fmt: skip
    assert ("tcgen05.mma" if capability == 100 else "mma.sync") in made.ptx


@pytest.mark.parametrize("tile", [(128, 256), (128, 128), (64, 128)])
@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_slices(build, gpus, tile):
    """Parts go straight from the accumulator to the peers, and nothing is spilled."""
    chosen = dict(SIZE=gpus, GPUS=gpus, C_DESCRIPTOR=False, BIAS=gpus == 4)
    made = build(torch.bfloat16, chosen, kernel="sliced", tile=tile)
    assert "wgmma.mma_async" in made.ptx
    assert made.usage["STACK"] <= 16, made.usage  # some scalars
    assert made.shared <= SHARED_MEMORY
