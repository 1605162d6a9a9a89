"""The kernels of ring_attention compile for GPUs that are not there, and need what they should."""

from __future__ import annotations

import re
from functools import cache

import pytest
import torch
import triton
from compiled import NAMES, REGISTERS, SHARED_MEMORY, Compiled, constants_of
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mkernel.ops.ring_attention import ring_attention_kernel
from mkernel.runtime.operands import DTYPES, matmul_precision

# What a rank of such a group runs.
ONE_RANK = dict(SIZE=1, GPUS=1, SLOTS=1, SENDERS=0, INTRAS=0, CREDITS=False)
FOUR_RANKS = dict(SIZE=4, GPUS=4, SLOTS=3, SENDERS=0, INTRAS=2, CREDITS=True)
TWO_NODES = dict(SIZE=4, GPUS=2, SLOTS=4, SENDERS=1, INTRAS=1, CREDITS=True)

GROUPS = {
    "one rank": ONE_RANK,
    "one rank, causal": dict(ONE_RANK, CAUSAL=True),
    "four ranks": FOUR_RANKS,
    "four ranks, causal, zigzag": dict(FOUR_RANKS, CAUSAL=True, ZIGZAG=True, LSE=True),
    "two nodes": TWO_NODES,
    "everything at once": dict(TWO_NODES, CAUSAL=True, ZIGZAG=True, PACKED=True, LSE=True, PARTS=True, PACED=True),
}
TILES = {torch.bfloat16: (128, 128, 8, 2), torch.float16: (128, 128, 8, 2), torch.float32: (64, 32, 8, 2)}


def source_of(dtype: torch.dtype, dim: int, described: bool, tile_m: int, tile_n: int, **chosen) -> ASTSource:
    """The kernel with the types and constants that a launch would give it: large sizes, aligned tensors."""
    kernel = ring_attention_kernel
    wide = triton.next_power_of_2(dim)
    constants = dict(
        DTYPE=DTYPES[dtype], PARTS=False, PACED=False, ZIGZAG=False, CAUSAL=False, PACKED=False, LSE=False,
        DESCRIPTOR=described, K_FLAT=True, V_FLAT=True, PRECISION=matmul_precision(dtype),
        TILE_M=tile_m, TILE_N=tile_n, DIM=wide, COPY=32768 // dtype.itemsize, LOOKS=32,
    ) | chosen  # fmt: skip
    assert set(constants) == set(constants_of(kernel))
    pointer = "*" + NAMES[dtype]

    def operand(*block: int) -> str:
        return f"tensordesc<{NAMES[dtype]}{list(block)}>" if described else pointer

    types = {name: "i32" for name in kernel.arg_names if name not in constants}
    types |= dict(
        context="*i64", spans="*i64", schedule="*i64", lse="*fp32", partial="*fp32", scale="fp32", k=pointer, v=pointer,
        q=operand(1, 1, tile_m, wide), out=operand(1, 1, tile_m, wide),
        own_k=operand(1, 1, tile_n, wide), own_v=operand(1, 1, tile_n, wide), slots=operand(tile_n, wide),
    )  # fmt: skip
    # Triton makes constants of arguments that are None or 1, and knows which are divisible by 16
    constants |= dict.fromkeys((name for name in types if name.endswith("_column")), 1)
    if constants["SIZE"] == 1:
        constants |= dict(slots=None)
    if not constants["LSE"]:
        constants |= dict(lse=None)
    if not constants["PARTS"]:
        constants |= dict(partial=None, parts=1)
    whole = {"scale", "kv_heads", "blocks", "rounds", "window", "parts", "chunks", "stamps", "tasks"}
    aligned = [
        name for name, kind in types.items()
        if name not in constants and name not in whole and not kind.startswith("tensordesc")
    ]  # fmt: skip
    return ASTSource(
        kernel,
        signature={name: "constexpr" if name in constants else types[name] for name in kernel.arg_names},
        constexprs={(kernel.arg_names.index(name),): value for name, value in constants.items()},
        attrs={(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )


@cache
def _build(dtype, dim, capability, described, chosen):
    tile_m, tile_n, warps, stages = TILES[dtype]
    if dim > 128:
        tile_n = tile_n // 2
    compiled = triton.compile(
        source_of(dtype, dim, described, tile_m, tile_n, **dict(chosen)),
        target=GPUTarget("cuda", capability, 32),
        options=dict(num_warps=warps, num_stages=stages),
    )
    return Compiled(compiled)


def build(dtype, group, *, dim=128, capability=90, described=True):
    return _build(dtype, dim, capability, described, tuple(sorted(GROUPS[group].items())))


@pytest.mark.parametrize("group", GROUPS)
def test_hopper(group):
    """The default tile: tensor cores fed by TMA, everything in registers."""
    compiled = build(torch.bfloat16, group)
    assert ".target sm_90a" in compiled.ptx
    assert "wgmma.mma_async" in compiled.ptx
    assert re.search(r"cp\.async\.bulk\.tensor\.4d\.shared::(cluster|cta)\.global", compiled.ptx), "no TMA load"
    assert re.search(r"cp\.async\.bulk\.tensor\.4d\.global\.shared::cta", compiled.ptx), "no TMA store"
    assert not compiled.spills, compiled.usage
    assert compiled.shared <= SHARED_MEMORY
    assert compiled.usage["REG"] * 8 * 32 <= REGISTERS
