"""The kernel of all_gather_matmul for Hopper as machine code, with no GPU."""

import re

import pytest
import torch
from compiling import NAMES, SHARED_MEMORY, built, source_with
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from mkernel.lang.hopper import STORED, TILE_K, TILE_M, TILE_N
from mkernel.ops.all_gather_matmul_hopper import all_gather_matmul_hopper_kernel
from mkernel.runtime.operands import DTYPES


def source_of(dtype: torch.dtype, **constants) -> GluonASTSource:
    kernel = all_gather_matmul_hopper_kernel
    name = NAMES[dtype]

    def operand(*block: int) -> str:
        layout = gl.NVMMASharedLayout.get_default_for(list(block), DTYPES[dtype])
        return f"tensordesc<{name}{list(block)},{layout!r}>"

    rows = operand(TILE_M.value, TILE_K.value)
    columns = (TILE_N.value, TILE_K.value) if constants["B_TRANSPOSED"] else (TILE_K.value, TILE_N.value)
    types = {argument: "i32" for argument in kernel.arg_names} | dict(
        context="*i64", a="*" + name, data_start="i64", half="i64", own=rows, even=rows, odd=rows,
        b=operand(*columns), c=operand(TILE_M.value // 2, STORED.value),
    )  # fmt: skip
    aligned = ["context", "a", "a_stride", "m", "n", "k", "row_stride", "data_start", "half"]
    return source_with(kernel, types, constants, aligned, GluonASTSource)


@pytest.mark.parametrize(
    ("dtype", "gpus", "transposed", "paced"),
    [
        (torch.bfloat16, 4, True, False),
        (torch.float16, 2, False, True),
        (torch.bfloat16, 8, False, False),
        (torch.bfloat16, 1, True, False),
    ],
)
def test_tensor_cores_tma_and_no_spills(tmp_path, dtype, gpus, transposed, paced):
    source = source_of(dtype, B_TRANSPOSED=transposed, GPUS=gpus, GROUP=8, PACED=paced)
    compiled = built(source, tmp_path, num_warps=4)
    assert not compiled.spills
    assert compiled.shared <= SHARED_MEMORY
    assert "wgmma.mma_async.sync.aligned.m64n256k16" in compiled.ptx
    assert "cp.async.bulk.tensor.2d.shared::cluster.global" in compiled.ptx
    # each copy is read once, 16 bytes at a time, and written to every peer
    stores = len(re.findall(r"st\.global\.v4\.b32", compiled.ptx))
    assert stores == 8 * (gpus - 1)
    # the reads by TMA come after the arrival of what they read
    assert "fence.proxy.async.global" in compiled.ptx or gpus == 1
    assert "ld.global.sys.acquire" in compiled.ptx or gpus == 1
