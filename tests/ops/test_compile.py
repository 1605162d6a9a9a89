"""all_gather_matmul as machine code, with no GPU: tensor cores, TMA, wide copies, nothing spilled."""

import re
from functools import cache

import pytest
import torch
import triton
import triton.language as tl
from support.compiled_launches import NAMES, gathers
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import mkernel as mk
from mkernel.compiling import REGISTERS, SHARED_MEMORY, compile_launch
from mkernel.runtime.planning import least_shared_memory

# What the ranks of such groups run, without the kernel that is for Hopper only.
TRITON = mk.Config(warps=8)
ONE_RANK = dict(cluster=(1, 1), config=TRITON)
FOUR_RANKS = dict(cluster=(1, 4), config=TRITON)
TWO_NODES = dict(cluster=(2, 2))
STAGED = dict(FOUR_RANKS, strided=True)


@cache
def _kept(capability, call):
    return compile_launch(gathers(capability=capability, **dict(call)), capability)


def build(dtype, call, *, capability=90, **more):
    """What a call compiles to; each is compiled once."""
    return _kept(capability, tuple(sorted((call | more | dict(dtype=dtype)).items())))


@pytest.mark.thorough
@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize(
    ("dtype", "described"), [(torch.bfloat16, True), (torch.bfloat16, False), (torch.float32, True)], ids=NAMES.get
)
def test_shared_memory_that_is_known_before(dtype, described, stages):
    """What a plan refuses to take, a kernel takes at least: nothing that would run is refused."""
    config = mk.Config(tile_m=64, tile_n=32, tile_k=32, stages=stages, warps=4, copy_bytes=4096)
    compiled = build(dtype, dict(ONE_RANK, config=config, described=described))
    known = least_shared_memory(stages, (64, 32), described) * 32 * dtype.itemsize
    assert known <= compiled.shared <= 3 * known + 4096


GROUPS = {
    "one rank": ONE_RANK,
    "four ranks": FOUR_RANKS,
    "two nodes": TWO_NODES,
    "two nodes, rows in the heap": dict(TWO_NODES, heap=True),
    "staged": STAGED,
    "gathered output": dict(FOUR_RANKS, gathered=True),
    "everything at once": dict(TWO_NODES, strided=True, gathered=True, paced=True),
    "b not transposed": dict(FOUR_RANKS, transposed=False),
}


OFTEN = ("four ranks", "two nodes")
often = [pytest.param(name, marks=() if name in OFTEN else pytest.mark.thorough) for name in GROUPS]


@pytest.mark.thorough
def test_hopper_in_fp16():
    check_hopper("four ranks", torch.float16)


@pytest.mark.parametrize("group", often)
def test_hopper(group):
    check_hopper(group, torch.bfloat16)


def check_hopper(group, dtype):
    """The default tile: tensor cores fed by TMA, everything in registers."""
    compiled = build(dtype, GROUPS[group])
    assert ".target sm_90a" in compiled.ptx
    assert "wgmma.mma_async" in compiled.ptx
    assert re.search(r"cp\.async\.bulk\.tensor\.\dd\.shared::(cluster|cta)\.global", compiled.ptx), "no TMA load"
    assert re.search(r"cp\.async\.bulk\.tensor\.\dd\.global\.shared::cta", compiled.ptx), "no TMA store"
    assert not compiled.spilled
    assert compiled.shared <= SHARED_MEMORY
    assert compiled.registers * 8 * 32 <= REGISTERS


@pytest.mark.parametrize("group", [name for name in often if GROUPS[name.values[0]]["cluster"][1] > 1])
def test_copies_move_16_bytes_at_a_time(group):
    ptx = build(torch.bfloat16, GROUPS[group]).ptx
    pieces = 65536 // (8 * 32 * 16)  # that one thread has in flight, and writes to every peer
    assert ptx.count("st.global.v4") >= pieces * (GROUPS[group]["cluster"][1] - 1)
    for narrow in ("st.global.b8", "st.global.b16", "st.global.v2.b16", "st.global.v4.b16"):
        assert narrow not in ptx, narrow


def test_contiguous_rows_are_read_16_bytes_at_a_time():
    ptx = build(torch.bfloat16, FOUR_RANKS).ptx
    assert ptx.count("ld.global.v4") >= 16
    assert "ld.global.b16" not in ptx


@pytest.mark.thorough
def test_a_rank_alone_has_nothing_to_wait_for():
    ptx = build(torch.bfloat16, ONE_RANK).ptx
    assert "%globaltimer" not in ptx
    assert ".sys." not in ptx


@pytest.mark.thorough
def test_pacing_costs_nothing_when_there_is_none():
    plain, paced = (build(torch.bfloat16, FOUR_RANKS, paced=paced).ptx for paced in (False, True))
    assert paced.count("%globaltimer") > plain.count("%globaltimer")


@pytest.mark.parametrize("capability", [pytest.param(80, marks=pytest.mark.thorough), 90])
def test_signals_are_released_behind_a_barrier_and_acquired_at_system_scope(capability):
    ptx = build(torch.bfloat16, FOUR_RANKS, capability=capability).ptx
    lines = [line for line in ptx.splitlines() if re.search(r"st\.global|bar\.sync|release", line)]
    releases = [place for place, line in enumerate(lines) if "global.sys.release" in line]
    # Wait records are scalars, which the thread that releases them has stored itself. The word for the host is next.
    of_records = re.compile(r"@(%p\d+) st\.global\.b64")
    first = [place for place in releases if (found := of_records.search(lines[place - 1])) and found[1] in lines[place]]
    assert first, "no records"
    assert all(place + 1 in releases for place in first), "nothing tells the host"
    own = {*first, *(place + 1 for place in first)}
    releases = [place for place in releases if place not in own]
    assert len(releases) >= 2, "of data and of entries"
    for place in releases:
        assert "st.global" not in lines[place - 1], "a store with no barrier behind it"
    assert sum("bar.sync" in lines[place - 1] for place in releases) > len(releases) / 2
    assert re.search(r"(ld|atom)\.global\.sys\.acquire", ptx), "no acquire"


@pytest.mark.parametrize(
    ("group", "fenced"), [("four ranks", True), pytest.param("one rank", False, marks=pytest.mark.thorough)]
)
def test_reads_by_tma_are_fenced_where_rows_arrive(group, fenced):
    assert ("fence.proxy.async.global" in build(torch.bfloat16, GROUPS[group]).ptx) == fenced


@pytest.mark.parametrize("group", ["four ranks", "two nodes"])
@pytest.mark.thorough
def test_hopper_through_pointers(group):
    """Where nothing can be described: a smaller tile, and still no spills."""
    compiled = build(torch.bfloat16, GROUPS[group], described=False)
    assert "wgmma.mma_async" in compiled.ptx
    assert not compiled.spilled


@pytest.mark.thorough
def test_few_columns_take_a_narrow_tile():
    compiled = build(torch.bfloat16, FOUR_RANKS, n=128)
    assert "wgmma.mma_async" in compiled.ptx
    assert not compiled.spilled


@pytest.mark.thorough
def test_fp32():
    """Multiplied as fp32: no tensor cores, small tiles."""
    compiled = build(torch.float32, FOUR_RANKS)
    assert "wgmma" not in compiled.ptx
    assert "fma.rn.f32" in compiled.ptx
    assert "cp.async.bulk.tensor" in compiled.ptx
    assert not compiled.spilled


@pytest.mark.thorough
def test_fp32_as_tf32():
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        launch = gathers(**FOUR_RANKS, dtype=torch.float32)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
    compiled = compile_launch(launch)
    assert re.search(r"wgmma\.mma_async.*tf32", compiled.ptx)
    assert not compiled.spilled


@pytest.mark.parametrize("group", ["four ranks", "two nodes"])
@pytest.mark.thorough
def test_ampere(group):
    """No TMA there: everything through pointers, and tensor cores of the older kind."""
    compiled = build(torch.bfloat16, GROUPS[group], capability=80)
    assert ".target sm_80" in compiled.ptx
    assert "mma.sync" in compiled.ptx
    assert "cp.async" in compiled.ptx
    assert "bulk" not in compiled.ptx
    assert "fence.proxy" not in compiled.ptx
    # some scalars are spilled around the loop; more would be a piece of the tile
    assert compiled.spilled <= 256


@pytest.mark.thorough
def test_blackwell():
    compiled = build(torch.bfloat16, FOUR_RANKS, capability=100)
    assert ".target sm_100" in compiled.ptx
    assert "tcgen05.mma" in compiled.ptx
    assert "cp.async.bulk.tensor" in compiled.ptx
    assert not compiled.spilled


def test_waiting_only_reads():
    """The host writes some of the words that kernels wait for: nothing may write them back."""
    ptx = build(torch.bfloat16, TWO_NODES).ptx
    assert "ld.global.sys.acquire.b64" in ptx
    assert set(re.findall(r"atom\.global\.sys\.\w+\.(\w+)", ptx)) == {"exch"}


def test_free_slots_are_told_by_a_release_and_learnt_by_an_acquire():
    """A producer that learns from another one, not from the proxy, that a slot is free must not write it before. The
    simulator never stores early, so nothing there would notice."""
    ptx = build(torch.bfloat16, TWO_NODES).ptx
    assert re.search(r"atom\.global\.gpu\.release\.max", ptx)
    assert re.search(r"(ld|atom)\.global\.gpu\.acquire[\w.]*64", ptx)


@triton.jit
def _double(x, out, N: tl.constexpr):
    place = tl.arange(0, N)
    tl.store(out + place, 2 * tl.load(x + place))


@pytest.mark.parametrize("size", [64, 128])
def test_a_simulation_does_not_spoil_the_compiler(size):
    mk.spawn(lambda group: mk.all_gather_matmul(torch.ones(4, 16), torch.ones(16, 4)), device="cpu")
    source = ASTSource(_double, signature=dict(x="*fp32", out="*fp32", N="constexpr"), constexprs={(2,): size})
    assert "st.global" in triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
