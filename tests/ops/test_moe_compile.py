"""The mixture-of-experts kernels as machine code, with no GPU: tensor cores, TMA, wide copies, no spills."""

import re
from functools import cache

import pytest
import torch
from compiling import NAMES, REGISTERS, SHARED_MEMORY, built, constants_of, source_with

from mkernel.bench.moe import _gemm_alone_kernel
from mkernel.ops.moe_combine import COPY_BYTES, WARPS, moe_combine_kernel
from mkernel.ops.moe_dispatch_matmul import moe_dispatch_matmul_kernel
from mkernel.ops.moe_ffn import moe_ffn_kernel
from mkernel.runtime.experts import short_tile
from mkernel.runtime.operands import DTYPES, matmul_precision
from mkernel.runtime.planning import default_tiles

KERNELS = {
    "moe_dispatch_matmul": moe_dispatch_matmul_kernel,
    "moe_combine": moe_combine_kernel,
    "moe_ffn": moe_ffn_kernel,
}

ONE_RANK = dict(SIZE=1, GPUS=1, RANKS=2, SENDERS=0, INTRAS=4, NEAR_INTRAS=2, FAR_INTRAS=1)
FOUR_RANKS = dict(SIZE=4, GPUS=4, RANKS=8, SENDERS=0, INTRAS=4, NEAR_INTRAS=2, FAR_INTRAS=2)
TWO_NODES = dict(SIZE=4, GPUS=2, RANKS=8, SENDERS=1, INTRAS=4, NEAR_INTRAS=2, FAR_INTRAS=2)
GROUPS = {"one rank": ONE_RANK, "four ranks": FOUR_RANKS, "two nodes": TWO_NODES}

# arguments that are pointers to the tokens' type, to 64-bit numbers, and 64-bit numbers themselves
VALUES = {"x", "w", "y_rows", "packed_rows", "inner_rows", "out", "y", "w_gate_up", "w_down"}
LONG = {"context": "*i64", "ids": "*i64", "weights": "*fp32"}
WIDE = {"tables_at", "half_words", "staged_at", "departing_at", "landing_at", "half", "partial_at", "returning_at",
        "returned_at"}  # fmt: skip
# sizes that a launch does not divide by 16
ODD = {"blocks", "tokens", "most_tokens", "experts", "room", "chunks", "signals", "nanoseconds_per_mib",
       "ids_stride", "weights_stride"}  # fmt: skip
ONES = {"x_column_stride", "ids_column_stride", "weights_column_stride", "w_column_stride", "y_column_stride",
        "out_column_stride", "gate_column_stride", "down_column_stride"}  # fmt: skip


def source_of(kernel, dtype, blocks, constants):
    """A kernel with the types and constants that a launch would give it. blocks: of the descriptors."""
    names = kernel.arg_names
    known = set(constants_of(kernel))
    constants = {name: value for name, value in constants.items() if name in known}
    assert set(constants) == known, known ^ set(constants)
    scalars = {
        "x_stride", "w_expert_stride", "w_row_stride", "y_stride", "hidden", "n", "table_words", "row_stride",
        "inter", "out_stride", "columns",
    }  # fmt: skip
    types = {}
    for name in names:
        if name in constants:
            types[name] = "constexpr"
        elif name in blocks:
            types[name] = f"tensordesc<{NAMES[dtype]}{list(blocks[name])}>"
        elif name in LONG:
            types[name] = LONG[name]
        elif name in VALUES:
            types[name] = "*" + NAMES[dtype]
        elif name in WIDE:
            types[name] = "i64"
        elif name in ODD | ONES | scalars or name.endswith("_stride"):
            types[name] = "i32"
        else:
            types[name] = "*i32"  # a table
    constants |= {name: 1 for name in ONES & set(names)}
    aligned = [
        name for name, kind in types.items() if name not in constants and name not in ODD and "tensordesc" not in kind
    ]
    return source_with(kernel, types, constants, aligned)


def descriptors(op, tiles, described, transposed) -> dict[str, tuple[int, ...]]:
    """The blocks of the arguments that are descriptors."""
    m, n, k = tiles.tile_m, tiles.tile_n, tiles.tile_k
    if op == "moe_combine":
        return {}
    if op == "moe_dispatch_matmul":
        matrices = {"w": (1, n, k) if transposed else (1, k, n)}
        short = short_tile(torch.device("cuda"), m)
        return dict(packed=(m, k), packed_short=(short, k), y=(1, m, n), **(matrices if described else {}))
    matrices = dict(w_gate_up=(1, k, n // 2), w_down=(1, k, n))
    return dict(packed=(m, k), inner=(m, k), packed_store=(1, m, n), **(matrices if described else {}))


@pytest.fixture(scope="session")
def build(tmp_path_factory):
    """build(op, dtype, group, ...) -> Compiled; each is compiled once."""

    @cache
    def kept(op, dtype, group, described, capability, chosen):
        tiles = default_tiles(torch.device("cuda"), dtype, 2048, described)
        constants = dict(
            DTYPE=DTYPES[dtype], K=8, SLOTS=8, CHUNK=32, PACED=False, W_DESCRIPTOR=described, W_TRANSPOSED=False,
            PRECISION=matmul_precision(dtype), TILE_M=tiles.tile_m, TILE_N=tiles.tile_n, TILE_K=tiles.tile_k,
            SHORT_M=short_tile(torch.device("cuda"), tiles.tile_m), GROUP=tiles.group_m,
            COPY_ROWS=4, COPY_COLUMNS=tiles.copy_bytes // dtype.itemsize // 4,
            GATE_DESCRIPTOR=described, GATE_TRANSPOSED=False, DOWN_DESCRIPTOR=described, DOWN_TRANSPOSED=False,
            SUM_COLUMNS=tiles.copy_bytes // dtype.itemsize // 16,
        ) | GROUPS[group] | dict(chosen)  # fmt: skip
        if op == "moe_combine":
            constants["COPY_COLUMNS"] = COPY_BYTES[dtype] // dtype.itemsize // 4
        blocks = descriptors(op, tiles, described, constants["W_TRANSPOSED"])
        source = source_of(KERNELS[op], dtype, blocks, constants)
        folder = tmp_path_factory.mktemp("compiled")
        warps = WARPS if op == "moe_combine" else tiles.warps
        return built(source, folder, capability, num_warps=warps, num_stages=tiles.stages)

    def build(op, dtype, group, *, described=True, capability=90, **chosen):
        return kept(op, dtype, group, described, capability, tuple(sorted(chosen.items())))

    return build


CASES = [
    ("moe_dispatch_matmul", "one rank", torch.bfloat16),
    ("moe_dispatch_matmul", "four ranks", torch.bfloat16),
    ("moe_dispatch_matmul", "two nodes", torch.float16),
    ("moe_ffn", "one rank", torch.float16),
    ("moe_ffn", "two nodes", torch.bfloat16),
]


def check(compiled, op):
    assert "wgmma.mma_async" in compiled.ptx
    # the layer keeps a few scalars on the stack, none of which its loops over k need
    assert compiled.usage["STACK"] <= (64 if op == "moe_ffn" else 0), compiled.usage
    assert compiled.usage["LOCAL"] == 0, compiled.usage
    assert compiled.shared <= SHARED_MEMORY
    assert compiled.usage["REG"] * 8 * 32 <= REGISTERS


@pytest.mark.parametrize(("op", "group", "dtype"), CASES, ids=lambda value: NAMES.get(value, value))
def test_hopper(build, op, group, dtype):
    """The default tile: tensor cores fed by TMA, everything in registers, 16 bytes a copy."""
    compiled = build(op, dtype, group)
    assert ".target sm_90a" in compiled.ptx
    assert re.search(r"cp\.async\.bulk\.tensor\.\dd\.shared::(cluster|cta)\.global", compiled.ptx), "no TMA load"
    assert re.search(r"cp\.async\.bulk\.tensor\.\dd\.global\.shared::cta", compiled.ptx), "no TMA store"
    check(compiled, op)
    assert compiled.ptx.count("st.global.v4") >= 16
    for narrow in ("st.global.b16", "st.global.v2.b16"):
        assert compiled.ptx.count(narrow) <= 16, narrow  # NaN, where nothing was computed


@pytest.mark.parametrize("group", GROUPS)
def test_a_result_leaves_while_the_next_tile_begins(build, group):
    """It has a place of its own in shared memory, beside the operands' stages. Triton gives it one only in a loop with
    a count."""
    tiles = default_tiles(torch.device("cuda"), torch.bfloat16, 2048, True)
    operands = (tiles.tile_m + tiles.tile_n) * tiles.tile_k * tiles.stages
    compiled = build("moe_dispatch_matmul", torch.bfloat16, group)
    assert compiled.shared >= 2 * (operands + tiles.tile_m * tiles.tile_n)


def test_the_compute_role_alone(tmp_path):
    """As `mkernel bench` runs it: in the shared memory of the whole kernel, and with tiles of both heights."""
    tiles = default_tiles(torch.device("cuda"), torch.bfloat16, 2048, True)
    constants = dict(
        W_DESCRIPTOR=True, W_TRANSPOSED=False, PRECISION="ieee", TILE_M=tiles.tile_m,
        SHORT_M=short_tile(torch.device("cuda"), tiles.tile_m), TILE_N=tiles.tile_n, TILE_K=tiles.tile_k,
    )  # fmt: skip
    blocks = descriptors("moe_dispatch_matmul", tiles, True, False)
    source = source_of(_gemm_alone_kernel, torch.bfloat16, blocks, constants)
    compiled = built(source, tmp_path, 90, num_warps=tiles.warps, num_stages=tiles.stages)
    check(compiled, "moe_dispatch_matmul")
    assert {"n128k16", "n256k16"} <= set(re.findall(r"wgmma\.mma_async\.sync\.aligned\.m64(n\d+k16)", compiled.ptx))


def test_tiles_of_the_layer_are_in_memory_before_they_are_signalled(build):
    ptx = build("moe_ffn", torch.bfloat16, "two nodes").ptx
    assert re.search(r"cp\.async\.bulk\.wait_group\s+0", ptx)
    assert "fence.proxy.async.global" in ptx


@pytest.mark.parametrize("chosen", [dict(W_TRANSPOSED=True, PACED=True), dict(described=False)], ids=str)
def test_hopper_variants(build, chosen):
    check(build("moe_dispatch_matmul", torch.bfloat16, "two nodes", **chosen), "moe_dispatch_matmul")


def test_fp32(build):
    compiled = build("moe_dispatch_matmul", torch.float32, "two nodes")
    assert "fma.rn.f32" in compiled.ptx
    assert not compiled.spills, compiled.usage


@pytest.mark.parametrize(("group", "dtype"), [("one rank", torch.float32), ("two nodes", torch.bfloat16)], ids=str)
def test_combine(build, group, dtype):
    """Rows are read and written 16 bytes at a time, and none is spilled."""
    compiled = build("moe_combine", dtype, group)
    # the assembler keeps some scalars on the stack to have more warps; more would be a piece of a row
    assert compiled.usage["STACK"] <= 128, compiled.usage
    assert compiled.ptx.count("ld.global.v4") >= 8
    assert compiled.ptx.count("st.global.v4") >= 2
