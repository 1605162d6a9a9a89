"""The kernels of ring_attention compile for GPUs that are not there, with the arguments of real launches."""

from __future__ import annotations

import re
from functools import cache

import pytest
import torch
from support.attention_reference import Case
from support.compiled_launches import paced_links
from triton.backends.nvidia.driver import make_launcher

import mkernel as mk
from mkernel import compiling
from mkernel.compiling import REGISTERS, SHARED_MEMORY, compile_launch, pretending
from mkernel.ops.attention import prepare, schedule
from mkernel.ops.attention.launch import WARP_POLL_WIDTH
from mkernel.ops.attention.sequences import Pattern, Scoring

LENGTH = 512


def launched(
    cluster=(1, 1),
    config=None,
    capability=90,
    lse=False,
    paced=False,
    heads=8,
    transposed=False,
    length=LENGTH,
    softcap=0.0,
    **case,
):
    """(launch, plan) of a call on a cluster of such GPUs."""
    shape = Case(
        length, heads=heads, kv_heads=case.pop("kv_heads", heads), **{"dtype": torch.bfloat16, "dim": 128, **case}
    )

    def prepared(group):
        tensors = [torch.empty(1, n, length, shape.dim, dtype=shape.dtype) for n in (heads, shape.kv_heads)]
        query, key = tensors
        if transposed:
            key = torch.empty(1, shape.kv_heads, shape.dim, length, dtype=shape.dtype).transpose(2, 3)
        out_lse = torch.empty(1, heads, length) if lse else None
        launch = prepare(
            group, query, key, key, torch.empty_like(query), out_lse,
            Pattern(shape.causal, shape.layout, shape.documents), Scoring(softcap=softcap), config,
        )  # fmt: skip
        ((plan,),) = (plans.values() for plans in group._plans.values())
        return launch, plan

    return compiling.launched(prepared, cluster, capability, links=paced_links(paced), ctas=33)


@cache
def built(capability=90, **call):
    """(compiled kernel, plan)"""
    launch, plan = launched(capability=capability, **call)
    return compile_launch(launch, capability), plan


TRITON = mk.Config(warps=8)  # a configuration that the Gluon kernel does not have
CALLS = {
    "one rank": dict(),
    "four ranks, causal, zigzag": dict(cluster=(1, 4), causal=True, layout="zigzag", lse=True),
    "everything at once": dict(
        cluster=(2, 2), causal=True, layout="zigzag", documents=(0, 100, 4 * LENGTH), lse=True, paced=True, kv_heads=2
    ),
}


THOROUGH = pytest.mark.thorough


@pytest.mark.parametrize(
    "call", ["one rank", *(pytest.param(name, marks=THOROUGH) for name in CALLS if name != "one rank")]
)
def test_gluon(call):
    """Tensor cores fed by TMA, and products that overlap as they were written."""
    compiled, plan = built(**CALLS[call])
    assert plan.kernel == "gluon"
    assert ".target sm_90a" in compiled.ptx
    assert "wgmma.mma_async" in compiled.ptx
    assert re.search(r"cp\.async\.bulk\.tensor\.4d\.shared::(cluster|cta)\.global", compiled.ptx), "no TMA load"
    assert re.search(r"cp\.async\.bulk\.tensor\.4d\.global\.shared::cta", compiled.ptx), "no TMA store"
    assert not compiled.warnings, "the assembler serialises products, or ignores the split of registers"
    assert compiled.shared <= SHARED_MEMORY
    assert compiled.registers * 12 * 32 <= REGISTERS
    # with several ranks some numbers are spilled where a tile begins; the loops are free of it
    assert compiled.spilled <= (0 if plan.sequences.size == 1 else 64 if plan.slots == 3 else 512)


def test_gluon_does_not_wait_for_its_result_to_be_stored():
    """It waits for the result of the tile before, where it needs its place, and for the last one."""
    ptx = built()[0].ptx
    places = [found.start() for found in re.finditer(r"cp\.async\.bulk\.wait_group", ptx)]
    stores = [found.start() for found in re.finditer(r"cp\.async\.bulk\.tensor\.4d\.global\.shared::cta", ptx)]
    assert len(places) == 4, "one for each store, one at the end, in each warpgroup"
    assert places[0] < stores[0]


@THOROUGH
def test_gluon_begins_a_tile_while_one_ends():
    """With one rank: there is room for the queries of two tiles, and products with queries and keys, eight instructions
    each, are begun in one more place of each warpgroup: where a tile ends. With several ranks there is neither."""
    one, several = built()[0], built(cluster=(1, 4))[0]
    queries = 2 * 128 * 128
    assert one.shared >= queries + several.shared - 1024
    products = [len(re.findall(r"wgmma\.mma_async", compiled.ptx)) for compiled in (one, several)]
    assert products[0] - products[1] == 2 * 8


@pytest.mark.parametrize(("layout", "length"), [("contiguous", LENGTH), ("zigzag", 4096)])
@THOROUGH
def test_gluon_looks_once_at_what_a_tile_needs(layout, length):
    """Every thread of the loading warp acquires some signals; then a barrier, since one of them starts the loads, and
    the fence for loads that go another way. The loops that load have their addresses in registers of the warp: they
    would not, if the compiler did not know that all threads agree on what they saw."""
    compiled, plan = built(cluster=(1, 4), causal=True, layout=layout, length=length)
    assert plan.chunks == length // 512, "one chunk is a constant to the compiler"
    load = "cp.async.bulk.tensor"
    before, after = compiled.ptx.split("vote.sync.all.pred")
    assert before[before.rindex(load) :].count("atom.global.sys.acquire.add.u64") >= WARP_POLL_WIDTH // 32
    assert re.search(r"bar\.warp\.sync\s+-1;.*fence\.proxy\.async\.global", after[: after.index(load)], re.DOTALL)
    loading = [loop for loop in compiled.loops() if any("UTMALDG" in what for what in loop) and len(loop) < 400]
    assert compiled.spilled <= 128
    assert len(loading) >= 5, "own keys in three places, those of others in two"
    for loop in loading:
        assert not any(re.search(r"\b(LDL|STL)\b", what) for what in loop), "numbers are kept in memory"
        assert sum("R2UR" in what for what in loop) < 10


@pytest.mark.parametrize(("cluster", "length"), [((1, 1), LENGTH), ((1, 4), 4096)])
@THOROUGH
def test_gluon_syncs_the_grid_where_keys_are_many(monkeypatch, cluster, length):
    """The loading warp of a CTA waits for the others. It is another binary, so that all ranks must have it or none: one
    whose schedule has no grid syncs, too. Packed documents have none: tiles read different keys."""
    case = dict(cluster=cluster, causal=True, layout="zigzag", length=length)
    plain, plan = built(**case)
    assert not plan.syncs_grid
    monkeypatch.setattr(schedule, "SYNC_BYTES", 0)
    launch, plan = launched(**case)
    compiled = compile_launch(launch)
    assert plan.syncs_grid
    assert ("CTAs wait for each other" in str(plan)) == bool((plan.schedule >= schedule.SYNC_MARK).any())
    assert not launched(documents=(0, 100, cluster[0] * cluster[1] * length), **case)[1].syncs_grid
    counts = [len(re.findall(r"atom\.global\.gpu\.relaxed\.max\.s64", one.ptx)) for one in (plain, compiled)]
    assert counts[1] == counts[0] + 1
    assert not compiled.warnings
    assert compiled.spilled <= plain.spilled + 64


@pytest.mark.parametrize("cluster", [(1, 4), (2, 2)])
@THOROUGH
def test_gluon_sets_no_cta_aside_for_pushing(cluster):
    """All CTAs push but those that send to other nodes, and all that push compute from the start."""
    _, plan = launched(cluster=cluster, causal=True, layout="zigzag", heads=32)
    settings = plan.config
    assert plan.rounds > plan.window, "CTAs that are set aside would join with the last rounds only"
    assert settings.send_ctas == (cluster[0] > 1)
    assert settings.send_ctas + settings.intra_ctas == settings.ctas == 33
    starts = plan.schedule[: settings.ctas].tolist()
    rounds = [int(plan.schedule[start]) // (LENGTH // 128) for start in starts]
    assert max(rounds[settings.send_ctas :]) < plan.rounds - plan.window


@THOROUGH
def test_gluon_with_few_that_push():
    config = mk.Config(ctas=4, intra_ctas=4)
    assert launched(cluster=(1, 2), config=config)[1].config.intra_ctas == 4
    with pytest.raises(mk.ArgumentError, match=r"config\.ctas is 4, but must be at least 5"):
        launched(cluster=(1, 2), config=mk.Config(ctas=4, intra_ctas=5))


@pytest.mark.parametrize("dim", [256])
@THOROUGH
def test_gluon_head_dimensions(dim):
    compiled, plan = built(cluster=(1, 2), dim=dim, causal=True)
    assert plan.kernel == "gluon"
    assert compiled.shared <= SHARED_MEMORY
    assert compiled.spilled <= 512
    assert not compiled.warnings


@THOROUGH
def test_gluon_fp16():
    compiled, plan = built(dtype=torch.float16)
    assert plan.kernel == "gluon"
    assert "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16" in compiled.ptx
    assert compiled.spilled == 0


@pytest.mark.parametrize("call", CALLS)
@THOROUGH
def test_triton(call):
    compiled, plan = built(config=TRITON, **CALLS[call])
    assert plan.kernel == "triton"
    assert "wgmma.mma_async" in compiled.ptx
    assert re.search(r"cp\.async\.bulk\.tensor\.4d\.shared::(cluster|cta)\.global", compiled.ptx), "no TMA load"
    assert compiled.spilled == 0
    assert compiled.shared <= SHARED_MEMORY
    assert compiled.registers * 8 * 32 <= REGISTERS


@pytest.mark.parametrize("dim", [256])
@THOROUGH
def test_triton_head_dimensions(dim):
    compiled, _ = built(cluster=(1, 2), config=TRITON, dim=dim)
    assert compiled.spilled == 0
    assert compiled.shared <= SHARED_MEMORY


@THOROUGH
def test_softcap_takes_the_triton_kernel():
    compiled, plan = built(cluster=(1, 4), softcap=30.0, causal=True)
    assert plan.kernel == "triton"
    assert "softcap" in str(plan)
    assert "wgmma.mma_async" in compiled.ptx
    assert compiled.spilled <= 64


@THOROUGH
def test_triton_in_parts():
    compiled, plan = built(cluster=(1, 4), config=mk.Config(steps=2), heads=1, causal=True)
    assert plan.parts > 1
    assert plan.kernel == "triton"
    assert compiled.spilled == 0


@THOROUGH
def test_tensors_that_tma_can_not_read():
    compiled, plan = built(cluster=(1, 2), transposed=True)
    assert plan.kernel == "triton"
    assert "cp.async.bulk.tensor" not in compiled.ptx
    assert compiled.spilled <= 64


@pytest.mark.parametrize("dim", [64, 128])
@THOROUGH
def test_fp32(dim):
    """Multiplied as fp32, without tensor cores; from 128 on not everything stays in registers."""
    compiled, plan = built(cluster=(1, 2), dtype=torch.float32, dim=dim)
    assert plan.kernel == "triton"
    assert "wgmma" not in compiled.ptx
    assert "fma.rn.f32" in compiled.ptx
    assert dim > 64 or compiled.spilled == 0


@THOROUGH
def test_ampere():
    compiled, plan = built(cluster=(1, 2), capability=80, causal=True)
    assert plan.kernel == "triton"
    assert "mma.sync" in compiled.ptx
    assert "bulk" not in compiled.ptx
    assert "fence.proxy" not in compiled.ptx
    assert compiled.spilled <= 512


@THOROUGH
def test_blackwell():
    compiled, plan = built(cluster=(1, 2), capability=100)
    assert plan.kernel == "triton"
    assert "tcgen05.mma" in compiled.ptx
    assert compiled.spilled <= 512


@THOROUGH
def test_a_rank_alone_has_nothing_to_wait_for():
    for config in (None, TRITON):
        ptx = built(config=config)[0].ptx
        assert "%globaltimer" not in ptx
        assert ".sys." not in ptx


@pytest.mark.parametrize("config", [None, TRITON], ids=["gluon", "triton"])
@THOROUGH
def test_a_launcher_can_be_made(config):
    """Triton compiles tensor descriptors inside of structures, but its launcher passes only those that are parameters
    by themselves. On a GPU the first launch fails."""
    launch, plan = launched(cluster=(1, 2), config=config)
    assert plan.uses_tma
    with pretending(90):
        launch.kernel.device_caches.clear()
        compiled = launch.kernel.warmup(**launch.arguments, **launch.options, grid=(launch.grid,))
        launch.kernel.device_caches.clear()
    assert make_launcher(compiled.src.constants, compiled.src.signature, compiled.metadata.tensordesc_meta)


@pytest.mark.parametrize("config", [None, TRITON], ids=["gluon", "triton"])
@THOROUGH
def test_what_arrives_is_acquired_and_fenced(config):
    ptx = built(config=config, **CALLS["four ranks, causal, zigzag"])[0].ptx
    assert re.search(r"(ld|atom)\.global\.sys\.acquire|atom\.global\.acquire\.sys", ptx), "no acquire"
    assert "fence.proxy.async.global" in ptx
    assert re.search(r"global\.sys\.release|global\.release\.sys", ptx), "no release"


@pytest.mark.parametrize("config", [None, TRITON], ids=["gluon", "triton"])
@THOROUGH
def test_copies_move_16_bytes_at_a_time(config):
    ptx = built(config=config, **CALLS["four ranks, causal, zigzag"])[0].ptx
    assert ptx.count("st.global.v4") >= (3 * 8 if config else 2 * 2)  # Gluon: 1 KB at a time, in a loop over the peers
    for narrow in ("st.global.b8", "st.global.b16", "st.global.v2.b16"):
        assert narrow not in ptx, narrow
