"""Operators that sum over ranks as machine code, with no GPU: one pipelined loop, wide stores, nothing spilled."""

import re
from functools import cache

import pytest
import torch
from support.compiled_launches import reduces

import mkernel as mk
from mkernel.compiling import REGISTERS, SHARED_MEMORY, compile_launch
from mkernel.ops.reduce.all_reduce import plan

TRITON = mk.Config(warps=8)  # not the kernel that is for Hopper only
SCATTER = dict(op="reduce_scatter", cluster=(1, 4), config=TRITON)
REDUCE = dict(op="all_reduce", cluster=(1, 4), config=TRITON)
SLICED = dict(op="all_reduce", cluster=(1, 4), m=256, n=8192)
MULTICAST = dict(REDUCE, multicast=True)
KERNELS = {
    "matmul_reduce_scatter_kernel": SCATTER,
    "two_level_kernel": REDUCE,
    "sliced_kernel": SLICED,
    "multicast_kernel": MULTICAST,
}
IN_SWITCH = dict(fixed_order=False)
MORE = dict(bias=True, residual=True)
GROUPS = {
    "one rank": dict(cluster=(1, 1)),
    "four ranks": {},
    "two nodes": dict(cluster=(2, 2)),
    "bias and residual": MORE,
    "paced": dict(paced=True),
    "two nodes, bias and residual": dict(MORE, cluster=(2, 2)),
    "two nodes, paced": dict(cluster=(2, 2), paced=True),
    "b not transposed": dict(transposed=False),
    "in switch": IN_SWITCH,
    "in switch, bias and residual": dict(MORE, **IN_SWITCH),
}


@cache
def _kept(capability, call):
    return compile_launch(reduces(capability=capability, **dict(call)), capability)


def build(call, *, capability=90, **more):
    """What a call compiles to; each is compiled once."""
    return _kept(capability, tuple(sorted((call | more).items(), key=lambda item: item[0])))


def tile(tile_m, tile_n):
    return mk.Config(tile_m=tile_m, tile_n=tile_n)


@pytest.mark.parametrize("name", KERNELS)
def test_which_kernel_is_meant(name):
    assert reduces(**KERNELS[name]).kernel.fn.__name__ == name


FOR_SCATTER = ["one rank", "four ranks", "two nodes, bias and residual", "two nodes, paced", "b not transposed"]
FOR_ALL_REDUCE = ["one rank", "four ranks", "two nodes, bias and residual"]
FOR_MULTICAST = ["bias and residual", "in switch, bias and residual"]


@pytest.mark.parametrize(
    ("kernel", "group"),
    [
        *(("matmul_reduce_scatter_kernel", group) for group in FOR_SCATTER),
        *(("two_level_kernel", group) for group in FOR_ALL_REDUCE),
        *(("multicast_kernel", group) for group in FOR_MULTICAST),
    ],
)
@pytest.mark.thorough
def test_hopper(group, kernel):
    """The default tile: tensor cores fed by TMA, one step ahead, everything in registers."""
    made = build(KERNELS[kernel], **GROUPS[group])
    assert ".target sm_90a" in made.ptx
    assert re.search(r"cp\.async\.bulk\.tensor\.\dd\.shared::(cluster|cta)\.global", made.ptx), "no TMA load"
    assert made.ptx.count("wgmma.mma_async") == 4, "the multiplication is there once: 4 instructions of depth 16"
    assert "wgmma.wait_group.sync.aligned 1;" in made.ptx, "the loop is not pipelined"
    assert not made.warnings, "the multiplication waits for itself"
    assert made.spilled <= 8  # two scalars, when there is everything at once
    assert made.shared <= SHARED_MEMORY
    assert made.registers * 8 * 32 <= REGISTERS


@pytest.mark.parametrize(("call", "stored", "loaded"), [(SCATTER, 1, 1), (REDUCE, 2, 3)])
def test_tiles_go_from_registers_to_memory_and_back(call, stored, loaded):
    """16 bytes at a time, and not through shared memory: partials, and finished tiles (read in two places)."""
    made = build(call)
    pieces = 128 * 256 * 2 // (8 * 32 * 16)
    assert made.ptx.count("st.global.v4.b32") == stored * pieces
    assert made.ptx.count("ld.global.v4.b32") == loaded * pieces
    for narrow in ("st.global.b8", "st.global.b16", "st.global.v2.b16", "st.global.v4.b16"):
        assert narrow not in made.ptx, narrow


@pytest.mark.parametrize(
    ("reduce_dtype", "in_switch"), [(torch.bfloat16, True), (torch.bfloat16, False), (torch.float32, True)]
)
@pytest.mark.thorough
def test_multicast(in_switch, reduce_dtype):
    """The switch gets 16 bytes at a time, straight from registers, and adds every one of them once."""
    made = build(MULTICAST, reduce_dtype=reduce_dtype, fixed_order=not in_switch)
    stored = 128 * 256 * 2 // (8 * 32 * 16)
    partials = 128 * 256 * reduce_dtype.itemsize // (8 * 32 * 16)
    assert made.ptx.count("multimem.st.relaxed.sys.global.v4.f32") == stored
    kind = "acc::f32.v4.bf16x2" if reduce_dtype == torch.bfloat16 else "v4.f32"
    assert made.ptx.count(f"multimem.ld_reduce.relaxed.sys.global.add.{kind}") == (partials if in_switch else 0)
    assert made.instructions("LDGMC") == (partials if in_switch else 0)
    # one before either place where finished tiles are announced, and one before the sum
    assert made.ptx.count("fence.proxy.alias;") == (3 if in_switch else 2)
    assert made.spilled <= 8  # some scalars
    assert made.shared <= SHARED_MEMORY
    assert "multimem" not in build(REDUCE).ptx


@pytest.mark.thorough
def test_multicast_in_fp16():
    made = build(MULTICAST, dtype=torch.float16, **IN_SWITCH)
    assert "multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.f16x2" in made.ptx


CASES = {
    "partials in fp32": dict(reduce_dtype=torch.float32),
    "fp32": dict(dtype=torch.float32),
    "pointers": dict(described=False),
    "64x64": dict(config=tile(64, 64)),
    "128x64": dict(config=tile(128, 64)),
    "128x128": dict(config=tile(128, 128)),
}


# bytes: tensors whose strides are odd have an address for each element, and these kernels store tiles in many places
SPILLED = {("two_level_kernel", "pointers"): 284, ("multicast_kernel", "pointers"): 512}


@pytest.mark.parametrize(
    ("case", "size"),
    [("128x128", (128, 128)), ("pointers", (128, 256)), ("128x64", (128, 64))],
)
@pytest.mark.thorough
def test_the_switch_adds_once(case, size):
    """Triton copies an instruction when it likes to; a second sum might have other bits."""
    launch = reduces(**dict(MULTICAST, **CASES[case]), **IN_SWITCH)
    made = build(MULTICAST, **CASES[case], **IN_SWITCH)
    rows, columns = size
    assert made.instructions("LDGMC") == rows * columns * 2 // (launch.options["num_warps"] * 32 * 16)
    assert made.spilled <= SPILLED.get(("multicast_kernel", case), 16)
    assert made.shared <= SHARED_MEMORY


@pytest.mark.thorough
def test_pacing_costs_nothing_when_there_is_none():
    plain, paced = (build(SCATTER, paced=paced).ptx for paced in (False, True))
    assert paced.count("%globaltimer") > plain.count("%globaltimer")


@pytest.mark.thorough
def test_a_rank_alone_has_nothing_to_wait_for():
    for call in (SCATTER, REDUCE):
        ptx = build(call, cluster=(1, 1)).ptx
        assert "%globaltimer" not in ptx
        assert ".sys." not in ptx


@pytest.mark.parametrize(
    ("kernel", "case"),
    [
        *(("matmul_reduce_scatter_kernel", case) for case in CASES if case != "128x64"),
        *(("two_level_kernel", case) for case in ("partials in fp32", "fp32", "pointers")),
        *(("multicast_kernel", case) for case in ("partials in fp32", "fp32")),
    ],
)
@pytest.mark.thorough
def test_no_spills(case, kernel):
    """The other tiles of the kernels, and multicast through pointers: test_the_switch_adds_once."""
    made = build(KERNELS[kernel], **CASES[case])
    assert made.spilled <= SPILLED.get((kernel, case), 16)  # some scalars
    assert made.shared <= SHARED_MEMORY


@pytest.mark.thorough
def test_fp32_as_tf32():
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        launch = reduces(**SCATTER, dtype=torch.float32)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
    made = compile_launch(launch)
    assert re.search(r"wgmma\.mma_async.*tf32", made.ptx)
    assert made.spilled <= 16


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.thorough
def test_sizes_of_one(kernel, monkeypatch):
    """Triton makes constants of arguments that are 1: a kernel must not take them for tensors."""
    monkeypatch.setattr(plan, "LARGEST_SLICED", 2**24 if kernel == "sliced_kernel" else 0)
    ones = dict(m=4 if kernel.startswith("matmul") else 1, n=1, k=1, residual=True, described=False)
    if kernel == "matmul_reduce_scatter_kernel":
        ones["config"] = tile(64, 64)  # so few rows would take another kernel
    launch = reduces(**dict(KERNELS[kernel], **ones))
    assert launch.kernel.fn.__name__ == kernel
    compile_launch(launch)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("call", "capability"), [(SCATTER, 80), (REDUCE, 100)], ids=["reduce_scatter on 80", "all_reduce on 100"]
)
def test_other_gpus(capability, call):
    made = build(call, capability=capability, config=tile(128, 128))
    assert ("tcgen05.mma" if capability == 100 else "mma.sync") in made.ptx


@pytest.mark.parametrize(
    ("gpus", "size"),
    [
        (4, (128, 256)),
        *(pytest.param(gpus, (128, 128), marks=pytest.mark.thorough) for gpus in (2, 8)),
        pytest.param(8, (64, 128), marks=pytest.mark.thorough),
    ],
)
def test_slices(gpus, size):
    """Partials go straight from the accumulator to the peers, and nothing is spilled."""
    made = build(SLICED, cluster=(1, gpus), config=tile(*size), bias=gpus == 4)
    assert "wgmma.mma_async" in made.ptx
    assert made.spilled <= 16  # some scalars
    assert made.shared <= SHARED_MEMORY
