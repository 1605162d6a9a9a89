"""The Gluon kernel of ring_attention_backward: right on simulated clusters of Hopper GPUs, and as machine code."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

import pytest
import torch
from support.attention_gradients import NAMES, call, inputs
from support.attention_reference import Case
from support.operator_calls import assert_same, cluster_name, run
from support.workloads import workload_of

import mkernel as mk
from mkernel import compiling, operators
from mkernel.compiling import REGISTERS, SHARED_MEMORY, compile_launch
from mkernel.tuning.spaces import families_of

THOROUGH = pytest.mark.thorough
OP, BF16 = "ring_attention_backward", torch.bfloat16
HOPPER = dict(capability=(9, 0), ctas=4)


def kernel_of(group, case, tensors=None, config=None):
    """The kernel that a call takes."""
    query, key, value = tensors or [case.part(name, group.rank) for name in NAMES]
    out = torch.empty(*query.shape[:3], value.shape[3], dtype=query.dtype)
    lse = torch.empty(query.shape[:3])
    return mk.explain(OP, out, query, key, value, out, lse, config=config, **case.arguments()).kernel


def runs_gluon(group, case, turn=0, **arguments):
    assert kernel_of(group, case) == "gluon"
    return call(group, case, turn, **arguments)


# -- right


@pytest.mark.parametrize(
    "cluster", [(1, 1), (1, 2), (1, 4), (2, 1), pytest.param((2, 2), marks=THOROUGH)], ids=cluster_name
)
def test_causal(cluster):
    """Several tiles of dq, the last of them half empty; blocks of keys of which the second half does not exist; grouped
    heads; and where there are several ranks, rows that see some of the keys."""
    case = Case(130, heads=2, kv_heads=1, dim=64, dtype=BF16, causal=True, layout="zigzag")
    run(lambda group: runs_gluon(group, case), cluster=cluster, seed=cluster[1], **HOPPER)


CASES = {
    "nothing masked": Case(192, heads=1, kv_heads=1, dim=64, dtype=BF16),
    "128 columns": Case(129, heads=2, kv_heads=2, dim=128, dtype=BF16, causal=True),
    "96 columns": Case(100, dim=96, dtype=torch.float16, causal=True),
    "a window": Case(150, dim=64, dtype=BF16, causal=True, layout="zigzag", window=(70, 0)),
    "a window on both sides": Case(150, dim=64, dtype=BF16, window=(30, 20)),
    "a window to later keys": Case(150, dim=64, dtype=BF16, window=(0, 150)),  # rank 1 sees nothing of rank 0
    "documents": Case(160, dim=64, dtype=BF16, causal=True, layout="zigzag", documents=(0, 20, 150, 151, 320)),
    "pieces of different sizes": Case(151, heads=2, dim=64, dtype=BF16, causal=True, layout="zigzag"),
    "unequal lengths": Case(0, dim=64, dtype=BF16, causal=True, seq_lens=(190, 77)),
    "one without positions": Case(0, dim=64, dtype=BF16, causal=True, seq_lens=(0, 70)),
    "a cache": Case(200, queries=70, dim=64, dtype=BF16, causal=True),
    "fewer keys": Case(70, queries=200, dim=64, dtype=BF16, causal=True),
    "two positions": Case(2, dim=64, dtype=BF16, causal=True),
}


@THOROUGH
@pytest.mark.parametrize("name", CASES)
def test_cases(name):
    run(lambda group: runs_gluon(group, CASES[name]), cluster=(1, 2), seed=len(name), **HOPPER)


@THOROUGH
@pytest.mark.parametrize("options", [dict(ctas=1), dict(late={1: 3000}), dict(slow={0: 0.02}, ctas=3)], ids=str)
def test_slots_are_used_again(options):
    """More heads than the buffers hold: signals of keys, of partials and of slots that are free, several calls."""
    case = Case(70, heads=4, kv_heads=4, dim=64, dtype=BF16, causal=True)
    config = mk.Config(steps=1)

    def work(group):
        for turn in range(2):
            runs_gluon(group, case, turn, config=config)
        query = case.part("query", group.rank)
        return mk.explain(OP, *[query] * 5, torch.empty(query.shape[:3]), config=config).credits

    assert all(run(work, cluster=(1, 3), seed=3, **(HOPPER | options)))


@THOROUGH
@pytest.mark.parametrize("cluster", [(1, 2), (2, 1)], ids=cluster_name)
def test_ranks_may_run_different_kernels(cluster):
    """Rank 1 has rows that TMA cannot read. Slots and partials have the same layout for both kernels."""
    case = Case(130, heads=2, kv_heads=2, dim=64, dtype=BF16, causal=True, layout="zigzag")

    def work(group):
        tensors = [case.part(name, group.rank) for name in NAMES]
        if group.rank == 1:
            tensors = [torch.nn.functional.pad(tensor, (0, 1))[..., :-1] for tensor in tensors]
        call(group, case, tensors=tensors)
        return kernel_of(group, case, tensors)

    assert run(work, cluster=cluster, seed=5, **(HOPPER | dict(ctas=9))) == ["gluon", "triton"]


@THOROUGH
def test_all_schedules_give_the_same_bits():
    case = Case(130, heads=2, kv_heads=2, dim=64, dtype=BF16, causal=True, layout="zigzag")
    results = [
        run(lambda group: runs_gluon(group, case), cluster=(1, 2), seed=seed, **(HOPPER | option))
        for seed, option in enumerate([{}, {"slow": {1: 0.02}}, {"ctas": 7}])
    ]
    for others in results[1:]:
        for found, first in zip(others, results[0]):
            for gradient, expected in zip(found, first):
                assert_same(gradient, expected)


@pytest.mark.parametrize("cluster", [(1, 2), (2, 1)], ids=cluster_name)
def test_a_peer_that_does_not_come_is_named(cluster):
    """And what could not be computed without it is NaN."""
    case = Case(40, dim=64, dtype=BF16)

    def work(group):
        given, _ = inputs(group, case)
        with group.world.stream(group.world_rank, "side"):
            mk.ring_attention_backward(*given)
        group.synchronize()
        if group.rank == 1:
            return
        with group.world.stream(group.world_rank, "side"):
            found = mk.ring_attention_backward(*given)
        with pytest.raises(mk.CommTimeout) as caught:
            group.synchronize()
        record = caught.value.record
        assert (record.op, record.peer) == (OP, 1)
        assert record.seen < record.expected
        assert all(gradient.isnan().all() for gradient in found)

    run(work, cluster=cluster, timeout=1e-4, **HOPPER)


# -- which kernel


def test_the_plan_says_why_it_takes_a_kernel():
    case = Case(64, dim=64, dtype=BF16)

    def work(group):
        query = case.part("query", 0)
        return str(mk.explain(OP, *[query] * 5, torch.empty(query.shape[:3])))

    assert "Gluon: a Hopper GPU" in run(work, **HOPPER)[0]
    assert "Triton: the Gluon kernel runs on Hopper GPUs only" in run(work)[0]


@pytest.mark.parametrize(
    ("case", "why"),
    [
        (Case(64, dim=64), "fp32"),
        (Case(64, dim=256, dtype=BF16), "at most 128 columns"),
        (Case(64, dim=64, value_dim=128, dtype=BF16), "head dimension of queries"),
        (Case(64, dim=64, dtype=BF16, softcap=3.0), "softcap"),
        (Case(1, dim=64, dtype=BF16), "more than one key"),
    ],
    ids=["fp32", "256 columns", "other values", "softcap", "one position"],
)
def test_what_it_does_not_support(case, why):
    def work(group):
        query, value = case.part("query", 0), case.part("value", 0)
        out = torch.empty(*query.shape[:3], value.shape[3], dtype=case.dtype)
        return str(mk.explain(OP, out, query, query, value, out, torch.empty(query.shape[:3]), **case.arguments()))

    (reason,) = re.findall(r"- Triton: (.*)", run(work, cluster=(1, 2), **HOPPER)[0])
    assert why in reason


def test_a_configuration_of_tiles_selects_the_other_kernel():
    case = Case(64, dim=64, dtype=BF16)
    config = mk.Config(stages=2)
    assert run(lambda group: kernel_of(group, case, config=config), cluster=(1, 1), **HOPPER) == ["triton"]


def test_what_is_searched_for_it():
    """Fields that it has lead to it, all others to the other kernel."""

    def search(group):
        call = workload_of(OP).make(group, (1, 4, 1024, 64), BF16)
        families = families_of(operators.find(OP), group, call.tried.explain(mk.Config()))
        return [
            {call.tried.explain(replace(family.start, **{name: values[0]})).kernel
             for name, values in family.axes.items() if values}
            for family in families
        ]  # fmt: skip

    assert compiling.launched(search, (1, 4), ctas=33) == [{"gluon"}, {"triton"}]


# -- as machine code


@cache
def compiled(cluster=(1, 1), shape=(1, 8, 2048, 128), dtype=BF16, **options):
    def prepare(group):
        return workload_of(OP).make(group, shape, dtype, **options).tried.prepare(None)

    return compile_launch(compiling.launched(prepare, cluster, ctas=33))


FOUR_RANKS = dict(cluster=(1, 4), zigzag=True)  # as test_versions.py
CALLS = {  # bytes spilled: most of them where tasks begin and end, and in reductions
    "one rank": (dict(), 256),
    "64 columns": (dict(shape=(1, 8, 2048, 64), causal=False), 0),
    "four ranks": (FOUR_RANKS, 768),
    "two nodes, fp16": (dict(cluster=(2, 2), dtype=torch.float16, zigzag=True, kv_heads=2), 1024),
}


@THOROUGH
@pytest.mark.parametrize("name", CALLS)
def test_it_compiles(name):
    """Products are not serialised. The loops without a mask select nothing, and keep everything in registers; with 128
    columns, where sums take 128 of them, all but a few numbers."""
    options, spilled = CALLS[name]
    made = compiled(**options)
    assert ".target sm_90a" in made.ptx
    assert not made.warnings, "the assembler serialises products, or ignores the split of registers"
    assert made.shared <= SHARED_MEMORY
    assert made.registers * 12 * 32 <= REGISTERS
    assert made.spilled <= spilled
    columns = options.get("shape", (0, 0, 0, 128))[3]
    # instructions: two products over the columns of a head, and one or two over the 64 rows of a step
    products = {2 * columns // 16 + 4 * count: count for count in (1, 2)}
    found = dict.fromkeys(products, 0)
    for loop in (loop for loop in made.loops() if len(loop) < 420):  # others are around them
        count = sum("HGMMA" in what for what in loop)
        if count in products and not any("FSEL" in what for what in loop):
            found[count] += 1
            assert sum("MUFU.EX2" in what for what in loop) == 32
            assert sum("WARPGROUP.DEPBAR" in what for what in loop) == 3
            assert sum(bool(re.search(r"\b(LDL|STL)\b", what)) for what in loop) <= (6 if columns == 128 else 0)
    assert set(found.values()) == {2}, "a loop for each warpgroup: of dq, and of dk and dv"


@THOROUGH
def test_loads_need_few_registers():
    """The loops that load have nothing in memory, although the loading warp has 40 registers."""
    loading = [loop for loop in compiled(**FOUR_RANKS).loops() if len(loop) < 100]
    loading = [loop for loop in loading if sum("UTMALDG" in what for what in loop) >= 4]
    assert len(loading) >= 4, "own keys, those of others, and queries"
    for loop in loading:
        assert not any(re.search(r"\bSTL\b", what) for what in loop)
