"""The GEMM kernels for Hopper as machine code, with no GPU."""

import re

import pytest
import torch
from support.compiled_launches import gathers, reduces

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


@pytest.mark.parametrize("transposed", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_gathered_rows_are_stored_by_tma(transposed):
    """From shared memory, so that no row is read once more."""
    plain, kept = (
        compile_launch(gathers((1, 4), transposed=transposed, m=4096, gathered=gathered)) for gathered in (False, True)
    )
    assert "_hopper_" in kept.kernel.name
    assert kept.spilled <= plain.spilled
    assert kept.shared <= SHARED_MEMORY
    store, load = "cp.async.bulk.tensor.2d.global.shared::cta", "ld.global.v4"
    assert kept.ptx.count(store) == plain.ptx.count(store) + 1
    assert kept.ptx.count(load) == plain.ptx.count(load)


@pytest.mark.parametrize(
    ("op", "dtype", "gpus", "transposed", "paced"),
    [
        ("all_reduce", torch.bfloat16, 4, True, False),
        ("reduce_scatter", torch.bfloat16, 4, True, False),
        pytest.param("all_reduce", torch.float16, 3, False, True, marks=pytest.mark.thorough),
        pytest.param("reduce_scatter", torch.float16, 2, False, True, marks=pytest.mark.thorough),
    ],
)
def test_partials_go_straight_between_registers_and_slots(op, dtype, gpus, transposed, paced):
    """Stored from the accumulator 16 bytes at a time; loaded by TMA, and from shared memory 16 bytes at a time."""
    launch = reduces(op=op, cluster=(1, gpus), dtype=dtype, transposed=transposed, paced=paced)
    assert launch.kernel.fn.__name__ == f"matmul_{op}_hopper_kernel"
    compiled = compile_launch(launch)
    # scalars: of the load warp if b is not transposed, and of the gather warp
    assert compiled.spilled <= (64 if op == "all_reduce" else 0 if transposed else 24)
    assert compiled.shared <= SHARED_MEMORY
    assert "wgmma.mma_async.sync.aligned.m64n256k16" in compiled.ptx
    pieces = 2 * (64 * 256 * 2 // (128 * 16))  # of both warpgroups, for each thread
    finished = op == "all_reduce"
    # a partial, and a finished tile; and 4 pieces of two runs that the gather warp copies
    assert len(re.findall(r"st\.global\.v4\.b32", compiled.ptx)) == pieces * (1 + finished) + 8 * finished
    assert len(re.findall(r"ld\.global\.v4\.b32", compiled.ptx)) == 8 * finished
    assert len(re.findall(r"ld\.shared\.v4\.b32", compiled.ptx)) == pieces
    assert "fence.proxy.async.global" in compiled.ptx
