"""all_gather_matmul_weight_grad as machine code, with no GPU: tensor cores, TMA, pipelined loops, nothing spilled."""

import re
from functools import cache

import pytest
import torch
from support.compiled_launches import weight_grads

import mkernel as mk
from mkernel.compiling import REGISTERS, SHARED_MEMORY, compile_launch

PORTABLE = dict(stages=3)  # the default; given, it keeps calls from the kernel for Hopper
PASSES = mk.Config(passes=3, **PORTABLE)
GROUPS = {
    "one rank": dict(cluster=(1, 1), config=mk.Config(**PORTABLE)),
    "four ranks": dict(cluster=(1, 4), config=PASSES),
    "one pass": dict(cluster=(1, 4), config=mk.Config(passes=1, **PORTABLE)),
    "row-major": dict(cluster=(1, 4), config=PASSES, column_major=False),
    "two nodes": dict(cluster=(2, 2), config=PASSES),
    "two nodes, rows in the heap": dict(cluster=(2, 2), config=PASSES, heap=True),
    "everything at once": dict(cluster=(2, 2), config=PASSES, strided=True, paced=True),
}
OFTEN = ("four ranks",)
often = [pytest.param(name, marks=() if name in OFTEN else pytest.mark.thorough) for name in GROUPS]


@cache
def _kept(capability, call):
    return compile_launch(weight_grads(capability=capability, **dict(call)), capability)


def build(dtype, call, *, capability=90, **more):
    """What a call compiles to; each is compiled once."""
    return _kept(capability, tuple(sorted((call | more | dict(dtype=dtype)).items())))


@pytest.mark.parametrize("group", often)
def test_hopper(group):
    """The default tile: tensor cores fed by TMA, both loops pipelined, everything in registers."""
    compiled = build(torch.bfloat16, GROUPS[group])
    assert ".target sm_90a" in compiled.ptx
    loops = 1 if group in ("one rank", "everything at once") else 2  # over own rows, and over those that arrive
    assert compiled.ptx.count("wgmma.wait_group.sync.aligned 1;") == loops
    assert "ldmatrix" not in compiled.ptx, "an operand goes through registers to be transposed"
    assert re.search(r"cp\.async\.bulk\.tensor\.4d\.shared::(cluster|cta)\.global", compiled.ptx), "no TMA load"
    assert re.search(r"cp\.async\.bulk\.tensor\.\dd\.global\.shared::cta", compiled.ptx), "no TMA store"
    assert compiled.spilled <= (64 if group == "everything at once" else 0)
    assert compiled.shared <= SHARED_MEMORY
    assert compiled.registers * 8 * 32 <= REGISTERS


@pytest.mark.parametrize(
    ("dtype", "gpus", "column_major"),
    [
        (torch.bfloat16, 4, True),
        pytest.param(torch.float16, 3, False, marks=pytest.mark.thorough),
        pytest.param(torch.bfloat16, 1, True, marks=pytest.mark.thorough),
    ],
)
def test_the_kernel_for_hopper(dtype, gpus, column_major):
    """Both operands are transposed by the tensor cores, and nothing is spilled inside of a loop over steps. Barriers of
    as many passes as there may be fit into shared memory."""
    config = mk.Config(passes=64 if gpus == 3 else 3, held_tiles=2) if gpus > 1 else None
    launch = weight_grads((1, gpus), m=4096, k=8192, dtype=dtype, config=config, column_major=column_major)
    assert launch.kernel.fn.__name__ == "weight_grad_hopper_kernel"
    compiled = compile_launch(launch)
    assert "wgmma.mma_async.sync.aligned.m64n256k16" in compiled.ptx
    assert re.search(r"cp\.async\.bulk\.tensor\.2d\.shared::(cluster|cta)\.global", compiled.ptx), "no TMA load"
    assert not compiled.warnings
    assert compiled.spilled <= 64  # what the roles get from the beginning of the kernel
    loops = [loop for loop in compiled.loops() if any("HGMMA" in each for each in loop)]
    assert loops
    assert not any("STL" in each or "LDL" in each for each in min(loops, key=len))
    assert compiled.shared <= SHARED_MEMORY


@pytest.mark.parametrize("group", often)
def test_partials_move_16_bytes_at_a_time(group):
    """In the layout of the accumulator: not through shared memory, and not by single elements."""
    compiled = build(torch.bfloat16, GROUPS[group])
    in_passes = group not in ("one rank", "one pass")
    pieces = 128 * 256 * 4 // (8 * 32 * 16)  # of a thread
    if in_passes:
        assert compiled.ptx.count("st.global.v4") >= pieces
        assert compiled.ptx.count("ld.global.v4") >= pieces
        assert "prefetch.global.L2" in compiled.ptx
    assert "st.global.b32 [" not in re.sub(r"@%p\d+ st\.global\.b32 \[", "", compiled.ptx)


@pytest.mark.thorough
def test_a_rank_alone_has_nothing_to_wait_for():
    ptx = build(torch.bfloat16, GROUPS["one rank"]).ptx
    assert "%globaltimer" not in ptx
    assert ".sys." not in ptx


@pytest.mark.thorough
def test_reads_by_tma_are_fenced_where_rows_arrive():
    assert "fence.proxy.async.global" in build(torch.bfloat16, GROUPS["four ranks"]).ptx
    assert "fence.proxy.async.global" not in build(torch.bfloat16, GROUPS["one rank"]).ptx


@pytest.mark.thorough
def test_only_polls_of_own_memory_are_atomic_additions():
    """The host writes some of the words that kernels wait for: nothing may write them back. Arrival signals are in the
    memory of the GPU, where additions of zero lose nothing; they are polled at two places of the kernel."""
    ptx = build(torch.bfloat16, GROUPS["two nodes"]).ptx
    assert "ld.global.sys.acquire.b64" in ptx
    assert set(re.findall(r"atom\.global\.sys\.\w+\.(\w+)", ptx)) == {"exch", "add"}
    assert len(re.findall(r"atom\.global\.sys\.acquire\.add", ptx)) == 2


@pytest.mark.thorough
def test_hopper_through_pointers():
    """Where TMA cannot read dy or write out: a smaller tile, and still no spills."""
    compiled = build(torch.bfloat16, GROUPS["two nodes"], described=False)
    assert "wgmma.mma_async" in compiled.ptx
    assert not compiled.spilled


@pytest.mark.thorough
def test_fp32():
    """Multiplied as fp32: no tensor cores, small tiles."""
    compiled = build(torch.float32, GROUPS["four ranks"])
    assert "wgmma" not in compiled.ptx
    assert "fma.rn.f32" in compiled.ptx
    assert "cp.async.bulk.tensor" in compiled.ptx
    assert compiled.spilled <= 128  # scalars around the loops


@pytest.mark.thorough
def test_fp32_as_tf32():
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        launch = weight_grads(**GROUPS["four ranks"], dtype=torch.float32)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
    compiled = compile_launch(launch)
    assert re.search(r"wgmma\.mma_async.*tf32", compiled.ptx)
    assert compiled.spilled <= 128


@pytest.mark.thorough
def test_ampere():
    """No TMA there: everything through pointers, and tensor cores of the older kind."""
    compiled = build(torch.bfloat16, GROUPS["two nodes"], capability=80)
    assert ".target sm_80" in compiled.ptx
    assert "mma.sync" in compiled.ptx
    assert "cp.async" in compiled.ptx
    assert "bulk" not in compiled.ptx
    assert "fence.proxy" not in compiled.ptx
    # some scalars are spilled around the loop; more would be a piece of the tile
    assert compiled.spilled <= 256


@pytest.mark.thorough
def test_blackwell():
    compiled = build(torch.bfloat16, GROUPS["four ranks"], capability=100)
    assert ".target sm_100" in compiled.ptx
    assert "tcgen05.mma" in compiled.ptx
    assert "cp.async.bulk.tensor" in compiled.ptx
    assert compiled.spilled <= 256
