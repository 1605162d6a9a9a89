"""The kernels for Hopper in the simulator: right, within the bounds of the portable kernels, in every schedule."""

from __future__ import annotations

import pytest
import torch
from support import attention_reference, operator_calls, reduce_reference
from support.operator_calls import assert_close, assert_same, cluster_name, run
from support.reduce_reference import Sum

import mkernel as mk
from mkernel.runtime import hopper

GATHER, SCATTER, REDUCE = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"
MATRICES = [GATHER, SCATTER, REDUCE]
HOPPER = {GATHER: "Hopper kernel", SCATTER: "the kernel for Hopper", REDUCE: "the kernel for Hopper"}
CONFIG = mk.Config(ctas=3)


def simulated(work, cluster=(1, 2), seed=0, ctas=3, **options):
    return run(work, cluster=cluster, seed=seed, ctas=ctas, capability=(9, 0), **options)


def case_of(op, size, dtype=torch.bfloat16):
    """The smallest calls for which all CTAs have work."""
    if op == GATHER:
        return operator_calls.Case(128, 264, 136, dtype)
    return Sum(128 * max(size, 2) if op == SCATTER else 256, 512, 136, dtype)


def multiply(group, op, turn=0, dtype=torch.bfloat16, transposed=False, kernel=True, config=CONFIG, **more):
    """A call on this rank, whose result is checked. kernel: must the kernel for Hopper take it? None: either may."""
    case = case_of(op, group.size, dtype)
    gathers = op == GATHER
    a = case.rows(group.rank, turn) if gathers else case.a(group.rank, turn)
    b = case.weights(group.rank, turn) if gathers else case.b(group.rank, turn)
    if transposed:
        b = b.t().contiguous().t()
    if kernel is not None:
        residual = {name: value for name, value in more.items() if value is not True}
        taken = HOPPER[op] in str(mk.explain(op, a, b, group=group, config=config, **residual))
        assert taken == kernel
    if gathers:
        return operator_calls.call(group, case, turn, a=a, b=b, config=config, **more)
    return reduce_reference.call(group, op, case, turn, a=a, b=b, config=config, **more)


def assert_all_same(results):
    """Results of calls, turn by turn, on every rank."""
    for mine in zip(*results):
        for theirs in mine[1:]:
            for one, other in zip(mine[0], theirs):
                assert_same(one, other)


# -- matrices


@pytest.mark.parametrize("op", MATRICES)
def test_one_rank(op):
    # matmul_all_reduce has nothing to add then: it takes the portable kernel
    simulated(lambda group: [multiply(group, op, turn, kernel=op != REDUCE) for turn in range(2)], (1, 1))


@pytest.mark.parametrize("transposed", [False, pytest.param(True, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("op", MATRICES)
def test_calls_in_a_row(op, transposed):
    """Both halves of the workspace, in two schedules, with the same bits."""

    def work(group):
        return [multiply(group, op, turn, transposed=transposed) for turn in range(3)]

    first = simulated(work)
    assert_all_same([first, simulated(work, seed=7)])
    if op == REDUCE:
        assert_all_same([[turns] for turns in first])


@pytest.mark.thorough
@pytest.mark.parametrize("cluster", [(1, 3), (1, 4)], ids=cluster_name)
@pytest.mark.parametrize("op", MATRICES)
def test_more_ranks(op, cluster):
    simulated(lambda group: multiply(group, op), cluster, cluster[1])


@pytest.mark.parametrize("op", MATRICES)
def test_half_precision(op):
    simulated(lambda group: multiply(group, op, dtype=torch.float16))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("op", MATRICES)
def test_schedules(op, seed):
    simulated(lambda group: [multiply(group, op, turn) for turn in range(2)], seed=seed)


@pytest.mark.thorough
@pytest.mark.parametrize("ctas", [1, 2, 5])
@pytest.mark.parametrize("op", MATRICES)
def test_numbers_of_ctas(op, ctas):
    config = mk.Config(ctas=ctas)
    # sums choose narrower tiles if there are not enough for all CTAs
    kernel = op == GATHER or ctas < 5

    def work(group):
        return [multiply(group, op, kernel=kernel, config=config)]

    results = [simulated(work, ctas=ctas)]
    if kernel and op != REDUCE:  # where the number of CTAs determines which rank adds which tiles
        results.append(simulated(lambda group: [multiply(group, op)]))
    assert_all_same(results)


@pytest.mark.thorough
@pytest.mark.parametrize("options", [{"slow": {1: 1e-3}}, {"late": {0: 3000}}, {"resident": 3}])
@pytest.mark.parametrize("op", MATRICES)
def test_stragglers(op, options):
    simulated(lambda group: [multiply(group, op, turn) for turn in range(2)], **options)


@pytest.mark.thorough
@pytest.mark.parametrize("op", MATRICES)
def test_the_same_bits_as_the_portable_kernel(op, monkeypatch):
    """Also if only some ranks run it."""
    suits = hopper.suits
    results = []
    # the ranks of all_gather_matmul must agree on the chunks, so all of them take the same kernel
    for portable in ((), (0, 1), *([(1,)] if op != GATHER else [])):

        def choose(group, *args, portable=portable, **more):
            return group.rank not in portable and suits(group, *args, **more)

        def work(group, portable=portable):
            return [multiply(group, op, turn, kernel=group.rank not in portable) for turn in range(2)]

        with monkeypatch.context() as patch:
            patch.setattr(hopper, "suits", choose)
            results.append(simulated(work))
    assert_all_same(results)


@pytest.mark.thorough
@pytest.mark.parametrize("more", [{"bias": True}, {"residual": True}, {"reduce_dtype": torch.float32}])
@pytest.mark.parametrize("op", [SCATTER, REDUCE])
def test_calls_that_the_portable_kernel_takes(op, more):
    simulated(lambda group: multiply(group, op, kernel=None if "reduce_dtype" not in more else False, **more))


# -- attention


def attend(group, case, turn=0, kernel=True, config=CONFIG):
    """A call on this rank, whose result is checked."""
    tensors = [case.part(name, group.rank, turn) for name in ("query", "key", "value")]
    plan = str(mk.explain("ring_attention", *tensors, group=group, config=config, **case.arguments()))
    assert ("gluon kernel" in plan) == kernel
    return attention_reference.call(group, case, turn, tensors=tensors, config=config)


def attention(length=150, **more):
    return attention_reference.Case(length, **({"dtype": torch.bfloat16} | more))


MASKS = [(False, "contiguous"), (True, "contiguous"), (True, "zigzag")]


@pytest.mark.parametrize(("causal", "layout"), MASKS)
@pytest.mark.parametrize("cluster", [(1, 1), (1, 2), (1, 4), (2, 2)], ids=cluster_name)
def test_attention(cluster, causal, layout):
    case = attention(heads=2, kv_heads=1, causal=causal, layout=layout)
    seeds = (0, 5) if cluster == (1, 2) else (1,)
    results = [simulated(lambda group: attend(group, case), cluster, seed) for seed in seeds]
    assert_all_same([[[result] for result, _ in ranks] for ranks in results])


@pytest.mark.thorough
@pytest.mark.parametrize("cluster", [(1, 1), (1, 2)], ids=cluster_name)
@pytest.mark.parametrize("dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_attention_head_dimensions(cluster, dtype, dim):
    simulated(lambda group: attend(group, attention(140, dim=dim, dtype=dtype, causal=True)), cluster)


CASES = {
    "calls": dict(length=200),
    "heads": dict(heads=4, kv_heads=2, batch=2, causal=True),
    "one position": dict(length=1),
    "a whole tile": dict(length=128, causal=True),
    "scale": dict(scale=0.7),
    "documents": dict(documents=(0, 20, 133, 190, 300), causal=True, layout="zigzag"),
    "documents without causality": dict(documents=(0, 150, 150, 151, 300)),
    "window": dict(window=(60, 0), causal=True),
    "window on both sides": dict(window=(100, 30)),
    "narrow window": dict(length=300, window=(10, 5)),
}


@pytest.mark.parametrize("cluster", [(1, 1), (1, 2)], ids=cluster_name)
@pytest.mark.parametrize("name", CASES)
def test_attention_cases(name, cluster):
    given = dict(CASES[name])
    if "documents" in given and cluster == (1, 1):
        given["documents"] = (0, 20, 133, 150)
    turns = 3 if name == "calls" else 1
    simulated(lambda group: [attend(group, attention(**given), turn) for turn in range(turns)], cluster)


@pytest.mark.parametrize("seed", range(5))
def test_attention_schedules(seed):
    case = attention(heads=2, causal=True, layout="zigzag")
    simulated(lambda group: [attend(group, case, turn) for turn in range(2)], seed=seed)


@pytest.mark.thorough
@pytest.mark.parametrize("ctas", [1, 2, 5])
def test_attention_numbers_of_ctas(ctas):
    case = attention(300, heads=2, causal=True)
    simulated(lambda group: attend(group, case, config=mk.Config(ctas=ctas)), ctas=ctas)


@pytest.mark.thorough
@pytest.mark.parametrize("options", [{"slow": {1: 1e-3}}, {"late": {0: 3000}}, {"resident": 3}])
def test_attention_stragglers(options):
    case = attention(heads=2, causal=True)
    simulated(lambda group: [attend(group, case, turn) for turn in range(2)], **options)


@pytest.mark.parametrize("cluster", [(1, 3), (3, 1)], ids=cluster_name)
def test_attention_with_a_small_buffer(cluster):
    """Which is reused by later rounds of the same call."""
    case = attention(100, heads=4, kv_heads=4, causal=True, layout="zigzag")
    config = mk.Config(ctas=2, steps=cluster[0] // 2 + 1)  # with several nodes, there are slots for all ranks

    def work(group):
        tensors = [case.part(name, group.rank) for name in ("query", "key", "value")]
        assert "2 of 4 rounds" in str(mk.explain("ring_attention", *tensors, config=config))
        return [attend(group, case, turn, config=config) for turn in range(2)]

    simulated(work, cluster)


# -- ranks that do not come


@pytest.mark.parametrize("op", [*MATRICES, "ring_attention"])
def test_a_rank_that_does_not_come(op):
    """The error names it, and what depends on it is NaN."""

    def work(group):
        for turn in range(2):
            if op == "ring_attention":
                attend(group, attention(), turn)
            else:
                multiply(group, op, turn)
        if group.rank == 1:
            return
        with pytest.raises(mk.CommTimeout, match="rank 1") as caught:
            lonely(group, op)
        record = caught.value.record
        assert (record.op, record.rank, record.peer, record.timed_out) == (op, 0, 1, True)

    simulated(work)


def lonely(group, op):
    """A call on rank 0 only. Its result, as far as it depends on rank 1, is NaN."""
    if op == "ring_attention":
        case = attention()
        tensors = [case.part(name, group.rank) for name in ("query", "key", "value")]
        out = torch.zeros_like(tensors[0])
        depends = out
    else:
        case = case_of(op, group.size)
        gathers = op == GATHER
        tensors = [case.rows(0), case.weights(0)] if gathers else [case.a(0), case.b(0)]
        rows = {GATHER: 256, SCATTER: tensors[0].shape[0] // 2, REDUCE: tensors[0].shape[0]}[op]
        out = torch.zeros(rows, tensors[1].shape[1], dtype=torch.bfloat16)
        depends = out[128:] if gathers else out
    try:
        getattr(mk, op)(*tensors, out=out, config=CONFIG, group=group)
        group.synchronize()
    finally:
        assert bool(depends.isnan().all())
        if op == GATHER:
            assert_close(out[:128], tensors[0].double() @ tensors[1].double(), tensors[0].shape[1])
