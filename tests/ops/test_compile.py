"""all_gather_matmul as machine code, with no GPU: tensor cores, TMA, wide copies, nothing spilled."""

import re
from functools import cache

import pytest
import torch
import triton
import triton.language as tl
from compiling import NAMES, REGISTERS, SHARED_MEMORY, built, constants_of, source_with
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import mkernel as mk
from mkernel.ops.all_gather_matmul import all_gather_matmul_kernel
from mkernel.runtime.operands import DTYPES, matmul_precision
from mkernel.runtime.planning import TileDefaults, default_tiles, least_shared_memory

# What a rank of such a group runs.
ONE_RANK = dict(SIZE=1, GPUS=1, SENDERS=0, INTRAS=0)
FOUR_RANKS = dict(SIZE=4, GPUS=4, SENDERS=0, INTRAS=3)
TWO_NODES = dict(SIZE=4, GPUS=2, SENDERS=1, INTRAS=2)
STAGED = dict(FOUR_RANKS, SENDERS=1, STAGED=True, FLAT=False)
GATHERED = dict(FOUR_RANKS, GATHERED_OUT=True)


def source_of(dtype: torch.dtype, tiles, described: bool, **chosen) -> ASTSource:
    """The kernel with the types and constants that a launch would give it: large sizes, aligned tensors."""
    kernel = all_gather_matmul_kernel
    constants = dict(
        DTYPE=DTYPES[dtype], STAGED=False, DIRECT=False, FLAT=True, GATHERED_OUT=False, PACED=False,
        A_DESCRIPTOR=described, B_DESCRIPTOR=described, B_TRANSPOSED=described, C_DESCRIPTOR=described,
        PRECISION=matmul_precision(dtype), TILE_M=tiles.tile_m, TILE_N=tiles.tile_n, TILE_K=tiles.tile_k,
        GROUP=tiles.group_m, COPY_ROWS=4, COPY_COLUMNS=tiles.copy_bytes // dtype.itemsize,
    ) | chosen  # fmt: skip
    assert set(constants) == set(constants_of(kernel))

    pointer = "*" + NAMES[dtype]

    def operand(*block: int) -> str:
        return f"tensordesc<{NAMES[dtype]}{list(block)}>" if described else pointer

    types = {name: "i32" for name in kernel.arg_names if name not in constants}
    types |= dict(
        context="*i64", a=pointer, a_offset="i64", data_start="i64", half="i64", gathered_out=pointer,
        own=operand(1, tiles.tile_m, tiles.tile_k), gathered=operand(1, tiles.tile_m, tiles.tile_k),
        b=operand(*((tiles.tile_n, tiles.tile_k) if constants["B_TRANSPOSED"] else (tiles.tile_k, tiles.tile_n))),
        c=operand(1, tiles.tile_m, tiles.tile_n),
    )  # fmt: skip
    assert set(types) | set(constants) == set(kernel.arg_names)

    # Triton makes constants of arguments that are None or 1, and knows which are divisible by 16
    constants |= dict(c_column_stride=1)
    if not constants["STAGED"]:
        constants |= dict(a_column_stride=1)
    if constants["STAGED"] and described:
        constants |= dict(own=None)
    if not constants["GATHERED_OUT"]:
        constants |= dict(gathered_out=None)
    whole = {"a_segment", "chunks", "join_round", "nanoseconds_per_mib", "a_column_stride"}
    aligned = [
        name for name, kind in types.items()
        if name not in constants and name not in whole and not kind.startswith("tensordesc")
    ]  # fmt: skip
    return source_with(kernel, types, constants, aligned)


@pytest.fixture(scope="session")
def build(tmp_path_factory):
    """build(dtype, constants, ...) -> Compiled; each is compiled once."""

    @cache
    def kept(dtype, capability, described, n, chosen):
        tiles = default_tiles(torch.device("cuda"), dtype, n, described)
        source = source_of(dtype, tiles, described, **dict(chosen))
        folder = tmp_path_factory.mktemp("compiled")
        return built(source, folder, capability, num_warps=tiles.warps, num_stages=tiles.stages)

    def build(dtype, chosen, *, capability=90, described=True, n=8192, **more):
        return kept(dtype, capability, described, n, tuple(sorted((chosen | more).items())))

    return build


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("described", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=NAMES.get)
def test_shared_memory_that_is_known_before(tmp_path, dtype, described, stages):
    """What a plan refuses to take, a kernel takes at least: nothing that would run is refused."""
    tiles = TileDefaults(64, 32, 32, group_m=8, stages=stages, warps=4, copy_bytes=4096)
    source = source_of(dtype, tiles, described, **ONE_RANK)
    compiled = built(source, tmp_path, 90, num_warps=tiles.warps, num_stages=stages)
    known = least_shared_memory(stages, (tiles.tile_m, tiles.tile_n), described) * tiles.tile_k * dtype.itemsize
    assert known <= compiled.shared <= 3 * known + 4096


GROUPS = {
    "one rank": ONE_RANK,
    "four ranks": FOUR_RANKS,
    "two nodes": TWO_NODES,
    "two nodes, rows in the heap": dict(TWO_NODES, DIRECT=True),
    "staged": STAGED,
    "gathered output": GATHERED,
    "everything at once": dict(TWO_NODES, STAGED=True, FLAT=False, GATHERED_OUT=True, PACED=True),
    "b not transposed": dict(FOUR_RANKS, B_TRANSPOSED=False),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=NAMES.get)
@pytest.mark.parametrize("group", GROUPS)
def test_hopper(build, group, dtype):
    """The default tile: tensor cores fed by TMA, everything in registers."""
    compiled = build(dtype, GROUPS[group])
    assert ".target sm_90a" in compiled.ptx
    assert "wgmma.mma_async" in compiled.ptx
    assert re.search(r"cp\.async\.bulk\.tensor\.\dd\.shared::(cluster|cta)\.global", compiled.ptx), "no TMA load"
    assert re.search(r"cp\.async\.bulk\.tensor\.\dd\.global\.shared::cta", compiled.ptx), "no TMA store"
    assert not compiled.spills, compiled.usage
    assert compiled.shared <= SHARED_MEMORY
    assert compiled.usage["REG"] * 8 * 32 <= REGISTERS


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=NAMES.get)
@pytest.mark.parametrize("group", [name for name, chosen in GROUPS.items() if chosen["INTRAS"]])
def test_copies_move_16_bytes_at_a_time(build, group, dtype):
    ptx = build(dtype, GROUPS[group]).ptx
    pieces = 65536 // (8 * 32 * 16)  # that one thread has in flight, and writes to every peer
    assert ptx.count("st.global.v4") >= pieces * (GROUPS[group]["GPUS"] - 1)
    for narrow in ("st.global.b8", "st.global.b16", "st.global.v2.b16", "st.global.v4.b16"):
        assert narrow not in ptx, narrow


def test_contiguous_rows_are_read_16_bytes_at_a_time(build):
    ptx = build(torch.bfloat16, FOUR_RANKS).ptx
    assert ptx.count("ld.global.v4") >= 16
    assert "ld.global.b16" not in ptx


def test_a_rank_alone_has_nothing_to_wait_for(build):
    ptx = build(torch.bfloat16, ONE_RANK).ptx
    assert "%globaltimer" not in ptx
    assert ".sys." not in ptx


def test_pacing_costs_nothing_when_there_is_none(build):
    plain, paced = (build(torch.bfloat16, FOUR_RANKS, PACED=paced).ptx for paced in (False, True))
    assert paced.count("%globaltimer") > plain.count("%globaltimer")


@pytest.mark.parametrize("capability", [80, 90])
def test_signals_are_released_behind_a_barrier_and_acquired_at_system_scope(build, capability):
    ptx = build(torch.bfloat16, FOUR_RANKS, capability=capability, described=capability >= 90).ptx
    lines = [line for line in ptx.splitlines() if re.search(r"st\.global|bar\.sync|release", line)]
    releases = [place for place, line in enumerate(lines) if "global.sys.release" in line]
    # wait records are scalars, which the thread that releases them has stored itself
    of_records = re.compile(r"@(%p\d+) st\.global\.b64")
    own = [place for place in releases if (found := of_records.search(lines[place - 1])) and found[1] in lines[place]]
    releases = [place for place in releases if place not in own]
    assert len(releases) >= 2, "of data and of entries"
    for place in releases:
        assert "st.global" not in lines[place - 1], "a store with no barrier behind it"
    assert sum("bar.sync" in lines[place - 1] for place in releases) > len(releases) / 2
    assert re.search(r"(ld|atom)\.global\.sys\.acquire", ptx), "no acquire"


@pytest.mark.parametrize(("group", "fenced"), [("one rank", False), ("four ranks", True), ("staged", True)])
def test_reads_by_tma_are_fenced_where_rows_arrive(build, group, fenced):
    assert ("fence.proxy.async.global" in build(torch.bfloat16, GROUPS[group]).ptx) == fenced


@pytest.mark.parametrize("group", ["one rank", "four ranks", "two nodes"])
def test_hopper_through_pointers(build, group):
    """Where nothing can be described: a smaller tile, and still no spills."""
    compiled = build(torch.bfloat16, GROUPS[group], described=False)
    assert "wgmma.mma_async" in compiled.ptx
    assert "cp.async.bulk.tensor" not in compiled.ptx
    assert not compiled.spills, compiled.usage


def test_few_columns_take_a_narrow_tile(build):
    compiled = build(torch.bfloat16, FOUR_RANKS, n=128)
    assert "wgmma.mma_async" in compiled.ptx
    assert not compiled.spills, compiled.usage


@pytest.mark.parametrize("group", ["one rank", "four ranks"])
def test_fp32(build, group):
    """Multiplied as fp32: no tensor cores, small tiles."""
    compiled = build(torch.float32, GROUPS[group])
    assert "wgmma" not in compiled.ptx
    assert "fma.rn.f32" in compiled.ptx
    assert "cp.async.bulk.tensor" in compiled.ptx
    assert not compiled.spills, compiled.usage


def test_fp32_as_tf32(build):
    compiled = build(torch.float32, FOUR_RANKS, PRECISION="tf32")
    assert re.search(r"wgmma\.mma_async.*tf32", compiled.ptx)
    assert not compiled.spills, compiled.usage


@pytest.mark.parametrize("group", ["one rank", "four ranks", "two nodes", "gathered output"])
def test_ampere(build, group):
    """No TMA there: everything through pointers, and tensor cores of the older kind."""
    compiled = build(torch.bfloat16, GROUPS[group], capability=80, described=False)
    assert ".target sm_80" in compiled.ptx
    assert "mma.sync" in compiled.ptx
    assert "cp.async" in compiled.ptx
    assert "bulk" not in compiled.ptx
    assert "fence.proxy" not in compiled.ptx
    # some scalars are spilled around the loop; more would be a piece of the tile
    assert compiled.usage["STACK"] <= 256, compiled.usage


@pytest.mark.parametrize("group", ["one rank", "four ranks", "two nodes"])
def test_blackwell(build, group):
    compiled = build(torch.bfloat16, GROUPS[group], capability=100)
    assert ".target sm_100" in compiled.ptx
    assert "tcgen05.mma" in compiled.ptx
    assert "cp.async.bulk.tensor" in compiled.ptx
    assert not compiled.spills, compiled.usage


def test_waiting_only_reads(build):
    """The host writes some of the words that kernels wait for: nothing may write them back."""
    ptx = build(torch.bfloat16, TWO_NODES).ptx
    assert "ld.global.sys.acquire.b64" in ptx
    assert set(re.findall(r"atom\.global\.sys\.\w+\.(\w+)", ptx)) == {"exch"}


def test_free_slots_are_told_by_a_release_and_learnt_by_an_acquire(build):
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
