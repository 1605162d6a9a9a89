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
from mkernel.compiling import REGISTERS, SHARED_MEMORY, compile_launch
from mkernel.ops.attention import prepare, schedule
from mkernel.ops.attention.launch import WARP_POLL_WIDTH
from mkernel.ops.attention.lengths import Lengths
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
        query = torch.empty(1, heads, shape.rows_of(group.rank), shape.dim, dtype=shape.dtype)
        key = torch.empty(1, shape.kv_heads, shape.keys_of(group.rank), shape.dim, dtype=shape.dtype)
        value = key if shape.value_dim is None else key.new_empty(*key.shape[:3], shape.value_dim)
        out = query.new_empty(*query.shape[:3], value.shape[3])
        if transposed:
            key = value = torch.empty(1, shape.kv_heads, shape.dim, length, dtype=shape.dtype).transpose(2, 3)
        out_lse = torch.empty(query.shape[:3]) if lse else None
        lengths = None if shape.seq_lens is None else Lengths(shape.seq_lens, shape.seq_lens)
        launch = prepare(
            group, query, key, value, out, out_lse,
            Pattern(shape.causal, shape.layout, shape.documents, lengths=lengths), Scoring(softcap=softcap), config,
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
    each, are begun in one more place of each warpgroup: where a tile ends. With several ranks there is neither. Only
    they have a loop for blocks with a mask, with two products."""
    one, several = built()[0], built(cluster=(1, 4))[0]
    queries = 2 * 128 * 128
    assert one.shared >= queries + several.shared - 1024
    products = [len(re.findall(r"wgmma\.mma_async", compiled.ptx)) for compiled in (one, several)]
    assert products[0] - products[1] == 2 * (8 - 2 * 8)


def _long_loops(compiled):
    """The machine code of the loops with both products and exponentials, without outer loops."""
    return [loop for loop in compiled.loops() if sum("MUFU.EX2" in what for what in loop) == 66 and len(loop) < 600]


@pytest.mark.parametrize("causal", [False, pytest.param(True, marks=THOROUGH)])
def test_gluon_overlaps_products_and_exponentials(causal):
    """One rank: the long loop waits for the product with the values after all exponentials, selects nothing, and is the
    only one with products. The warpgroups pass the turn on to each other, with barriers that nothing else uses."""
    compiled, _ = built(causal=causal)
    loops = _long_loops(compiled)
    assert len(loops) == 2
    for loop in loops:
        (scores,) = (i for i, what in enumerate(loop) if "DEPBAR.LE gsb0, 0x1" in what)
        (values,) = (i for i, what in enumerate(loop) if "DEPBAR.LE gsb0, 0x0" in what)
        exponentials = [i for i, what in enumerate(loop) if "MUFU.EX2" in what]
        assert scores < exponentials[0]
        assert exponentials[-1] < values
        assert not any(re.search(r"\b(FSEL|LDL|STL|PRMT)\b", what) for what in loop)
    turns = sorted(
        re.findall(r"\bbar(?:rier)?(?:\.cta)?\.(sync|arrive)(?:\.aligned)?\s+(1[45]),\s*(\d+)", compiled.ptx)
    )
    first, second = ("14", "256"), ("15", "256")
    assert turns == [("arrive", *first)] * 2 + [("arrive", *second), ("sync", *first), ("sync", *second)]


@THOROUGH
@pytest.mark.parametrize("call", [dict(cluster=(1, 2)), dict(documents=(0, 100, LENGTH)), dict(dim=256, causal=True)])
def test_gluon_takes_turns_with_one_rank_only(call):
    compiled, plan = built(**call)
    assert plan.kernel == "gluon"
    assert not re.search(r"bar\.(sync|arrive)\s+1[45]\b|pmevent", compiled.ptx)


MANY_KEYS = dict(cluster=(1, 4), causal=True, layout="zigzag", length=4096)


@pytest.mark.parametrize(
    ("call", "chunks"), [(CALLS["four ranks, causal, zigzag"], 1), (MANY_KEYS, 8)], ids=["one chunk", "many chunks"]
)
@THOROUGH
def test_gluon_looks_once_at_what_a_tile_needs(call, chunks):
    """Every thread of the loading warp acquires some signals; then a barrier, since one of them starts the loads, and
    the fence for loads that go another way. The loops that load have their addresses in registers of the warp: they
    would not, if the compiler did not know that all threads agree on what they saw."""
    compiled, plan = built(**call)
    assert plan.chunks == chunks, "one chunk is a constant to the compiler"
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


@pytest.mark.parametrize("call", [dict(causal=True), MANY_KEYS], ids=["one rank", "four ranks"])
@THOROUGH
def test_where_keys_are_many_the_grid_syncs(monkeypatch, call):
    """All ranks have the binary that does, or none: one whose schedule has no grid syncs, too. Packed documents have
    none: tiles read different keys."""
    assert not launched(**call)[1].syncs_grid
    monkeypatch.setattr(schedule, "SYNC_BYTES", 0)
    _, plan = launched(**call)
    assert plan.syncs_grid
    assert ("CTAs wait for each other" in str(plan)) == bool((plan.schedule >= schedule.SYNC_MARK).any())
    nodes, gpus = call.get("cluster", (1, 1))
    assert not launched(documents=(0, 100, nodes * gpus * call.get("length", LENGTH)), **call)[1].syncs_grid


@THOROUGH
def test_gluon_syncs_the_grid_where_keys_are_many(monkeypatch):
    """The loading warp of a CTA waits for the others, in another binary."""
    plain, _ = built(**MANY_KEYS)
    monkeypatch.setattr(schedule, "SYNC_BYTES", 0)
    compiled = compile_launch(launched(**MANY_KEYS)[0])
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


@THOROUGH
def test_gluon_in_fp16_with_many_columns():
    compiled, plan = built(cluster=(1, 2), dim=256, causal=True, dtype=torch.float16)
    assert plan.kernel == "gluon"
    assert re.search(r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k16\.f32\.f16", compiled.ptx)
    assert compiled.shared <= SHARED_MEMORY
    assert compiled.spilled <= 512
    assert not compiled.warnings


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


@THOROUGH
def test_triton_with_many_columns():
    compiled, _ = built(cluster=(1, 2), config=TRITON, dim=256)
    assert compiled.spilled == 0
    assert compiled.shared <= SHARED_MEMORY


@THOROUGH
def test_softcap_takes_the_triton_kernel():
    compiled, plan = built(cluster=(1, 4), softcap=30.0, causal=True)
    assert plan.kernel == "triton"
    assert "softcap" in str(plan)
    assert "wgmma.mma_async" in compiled.ptx
    assert compiled.spilled <= 64


@pytest.mark.parametrize(
    ("cluster", "queries", "dim", "value_dim"), [((1, 1), 1, 128, 128), ((1, 2), 1, 128, 128), ((1, 2), 512, 192, 128)]
)
@THOROUGH
def test_queries_and_values_of_other_sizes(cluster, queries, dim, value_dim):
    """Tensor cores for few rows as well."""
    compiled, plan = built(cluster=cluster, queries=queries, dim=dim, value_dim=value_dim, length=4096)
    assert plan.kernel == "triton"
    assert (plan.config.team_ctas > 1) == (queries == 1)
    assert ("mma.sync" if queries == 1 else "wgmma.mma_async") in compiled.ptx
    assert compiled.spilled <= (0 if queries == 1 else 64)
    assert compiled.shared <= SHARED_MEMORY


@pytest.mark.parametrize(("layout", "lengths"), [("contiguous", (700, 512, 1, 33)), ("zigzag", (703, 703, 702, 702))])
@THOROUGH
def test_unequal_lengths(layout, lengths):
    compiled, plan = built(cluster=(1, 4), causal=True, layout=layout, seq_lens=lengths)
    assert plan.kernel == "triton"
    assert "the same number of positions on every rank" in str(plan)
    assert "wgmma.mma_async" in compiled.ptx
    assert compiled.spilled == 0
    assert compiled.shared <= SHARED_MEMORY


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


@THOROUGH
def test_fp32():
    """Multiplied as fp32, without tensor cores; from 128 columns on not everything stays in registers."""
    compiled, plan = built(cluster=(1, 2), dtype=torch.float32, dim=64)
    assert plan.kernel == "triton"
    assert "wgmma" not in compiled.ptx
    assert "fma.rn.f32" in compiled.ptx
    assert compiled.spilled == 0


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
    made, plan = built(config=config, **CALLS["four ranks, causal, zigzag"])
    compiled = made.kernel
    assert plan.uses_tma
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
