"""The kernel of all_gather_matmul for Hopper as machine code, with no GPU."""

import re

import pytest
import torch
from support.compiled_launches import gathers

from mkernel.compiling import SHARED_MEMORY, compile_launch


@pytest.mark.parametrize(
    ("dtype", "gpus", "transposed", "paced"),
    [
        (torch.bfloat16, 4, True, False),
        pytest.param(torch.float16, 2, False, True, marks=pytest.mark.thorough),
        pytest.param(torch.bfloat16, 8, False, False, marks=pytest.mark.thorough),
        pytest.param(torch.bfloat16, 1, True, False, marks=pytest.mark.thorough),
    ],
)
def test_tensor_cores_tma_and_no_spills(dtype, gpus, transposed, paced):
    launch = gathers((1, gpus), dtype=dtype, transposed=transposed, paced=paced, m=4096)
    assert launch.kernel.fn.__name__ == "all_gather_matmul_hopper_kernel"
    compiled = compile_launch(launch)
    assert not compiled.spilled
    assert compiled.shared <= SHARED_MEMORY
    assert "wgmma.mma_async.sync.aligned.m64n256k16" in compiled.ptx
    assert "cp.async.bulk.tensor.2d.shared::cluster.global" in compiled.ptx
    # each copy is read once, 16 bytes at a time, and written to every peer
    stores = len(re.findall(r"st\.global\.v4\.b32", compiled.ptx))
    assert stores == 8 * (gpus - 1)
    # the reads by TMA come after the arrival of what they read
    assert "fence.proxy.async.global" in compiled.ptx or gpus == 1
    assert "ld.global.sys.acquire" in compiled.ptx or gpus == 1
