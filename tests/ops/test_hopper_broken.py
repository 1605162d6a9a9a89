"""The kernels for Hopper with one rule of synchronization broken at a time: each must be found in the first schedule
that is tried, in which the kernel as it is passes."""

from __future__ import annotations

import functools

import pytest
import torch
from support import attention_reference, operator_calls, reduce_reference
from support.broken_variants import NO_BARRIER, NO_FENCE_FOR_DESCRIPTORS, ONE_HALF, RELAXED_NOTIFY, RELAXED_WAIT
from support.edited_functions import edited
from support.operator_calls import run

import mkernel as mk
from mkernel.lang import hopper as gemm
from mkernel.ops.all_gather_matmul import hopper as gather
from mkernel.ops.attention import hopper as attention
from mkernel.ops.attention import hopper_load, transfer
from mkernel.ops.attention import protocol as attention_protocol
from mkernel.ops.reduce import hopper as sums
from mkernel.ops.reduce import protocol as sums_protocol
from mkernel.ops.reduce.all_reduce import hopper as all_reduce
from mkernel.ops.reduce.reduce_scatter import hopper as reduce_scatter

GATHER, SCATTER, REDUCE, ATTENTION = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "ring_attention"
FENCE = r"acquire_for_descriptors\(\) after the wait"


def work(group, op, calls, ctas, case):
    config = mk.Config(ctas=ctas, steps=case.get("steps"))
    for turn in range(calls):
        if op == GATHER:
            operator_calls.call(group, operator_calls.Case(128, 264, 136, torch.bfloat16), turn, config=config)
        elif op == ATTENTION:
            given = {"length": 260, "dtype": torch.bfloat16} | {key: case[key] for key in case if key != "steps"}
            attention_reference.call(group, attention_reference.Case(**given), turn, config=config)
        else:
            shape = reduce_reference.Sum(128 * group.size, 768, 136, torch.bfloat16)
            reduce_reference.call(group, op, shape, turn, config=config)


def simulated(op, replace=None, *, ranks=2, calls=1, ctas=1, slow=1.0, **case):
    """slow: the speed of the last rank."""
    run(work, op, calls, ctas, case, cluster=(1, ranks), seed=3, timeout=1e-4, ctas=ctas, capability=(9, 0),
        slow={ranks - 1: slow}, replace=replace or {})  # fmt: skip


@functools.cache
def passes_unbroken(op, given):
    simulated(op, **dict(given))


def change(function, old, new="pass"):
    return {function: edited(function, (old, new))}


def both(change_one):
    """A change of what matmul_reduce_scatter and matmul_all_reduce have each for themselves."""
    return change_one(reduce_scatter, "pushed") | change_one(all_reduce, "position")


# What is replaced, and what the error says; what else the calls need.
MULTIPLY = {
    "a stage is read before it is loaded": (
        change(gemm.multiply_rows, "mbarrier.wait(stages.filled.index(stage), (step // STAGES) & 1)"),
        "_multiply of .* nobody has written|the load is complete when mbarrier .* which _multiply of .* must wait for",
    ),
    "a stage is freed one step early": (
        change(
            gemm.multiply_rows,
            "total = warpgroup_mma_wait(1, deps=[total])",
            "total = warpgroup_mma_wait(2, deps=[total])",
        ),
        r"_load of .* stores to it:[^*]*_multiply of .* but warpgroup_mma_wait\(\) must come between",
    ),
    "a stage is freed by one warpgroup only": (
        change(gemm.multiply_rows, "if depth > 0:", "if (depth > 0) & (WARPGROUP == 0):"),
        "_load of .* waits for a phase with parity . of mbarrier .* 1 arrivals of the next are missing",
    ),
    "the right half is stored before the left one was read": (
        change(
            gemm.store_rows,
            """
            tma.store_wait(0)
            c_stage.store(gl.convert_layout(right, layout).to(c.dtype))
            """,
            "c_stage.store(gl.convert_layout(right, layout).to(c.dtype))",
        ),
        r"in store_rows.*\n[^*]*tma.store_wait\(\) must come between the two",
    ),
    "no fence between a store to shared memory and TMA": (
        change(
            gemm.store_rows,
            """
            fence_async_shared()
            async_store(c, [row + WARPGROUP * ROWS, column], c_stage)
            """,
            "async_store(c, [row + WARPGROUP * ROWS, column], c_stage)",
        ),
        r"in store_rows.*\n[^*]*fence_async_shared\(\) must come between the two",
    ),
}

GATHERS = {
    "a stage is filled again before it is free": (
        change(gather._load, "mbarrier.wait(stages.freed.index(stage), (step // STAGES + 1) & 1)"),
        "race on .* in shared memory[^*]*_load of .* stores to it",
    ),
    "rows are loaded without hearing that they have arrived": (
        change(gather._load, "mbarrier.wait(arrivals.ready.index(remote % 2), (remote // 2) & 1)"),
        "_load of .* loads ",
    ),
    "arrivals are not waited for": (
        change(gather._wait_arrivals, "wait_chunk(comm, call.gather, source, chunk, COMPUTE)"),
        "_load of .* loads ",
    ),
    "the wait warp does not wait for the load warp": (
        change(gather._wait_arrivals, "mbarrier.wait(arrivals.taken.index(remote % 2), (remote // 2 + 1) & 1)"),
        "_load of .* has waited for its phase|_load of .* waits for a phase",
        dict(ranks=3),
    ),
    "no fence between an arrival and TMA": (NO_FENCE_FOR_DESCRIPTORS, f"_load of .*{FENCE}"),
    "a chunk is announced before it is stored": (
        change(
            gather.push,
            "row = chunk * gather.chunk_rows",
            """
            row = chunk * gather.chunk_rows
            for i in range(1, comm.WORLD_SIZE):
                notify_chunk(comm, gather, (rank + i) % comm.WORLD_SIZE, rank, chunk)
            """,
        ),
        "push of .* stores to it|push of .* stored to it|nobody has written",
    ),
    "no barrier before an announcement": (NO_BARRIER, "push of rank .*but a barrier must come between"),
    "an announcement does not release": (RELAXED_NOTIFY, "not by a release"),
    "a wait does not acquire": (RELAXED_WAIT, "push of .* stored to it before, and nothing orders the two"),
    "both epochs use one half": (ONE_HALF, "race on rows in half 0", dict(calls=3)),
    "the last store is not waited for": (
        change(
            gather._multiply,
            """
                trace(comm.context, TILES, TILE, source, index, since)
        tma.store_wait(0)
            """,
            "    trace(comm.context, TILES, TILE, source, index, since)",
        ),
        "the CTA has ended[^*]* in store_rows",
    ),
}

SUMS = {
    "partials are loaded without hearing that they have arrived": (
        change(sums.load_partials, "mbarrier.wait(arrivals.ready.index(summed % 2), (summed // 2) & 1)"),
        "_load of .* loads |_wait_ahead of .* has waited for its phase",
    ),
    "partials are not waited for": (
        change(
            sums_protocol.wait_partials,
            """
            if not wait_again(comm.context, signal, comm.epoch, COMPUTE, PARTIAL, peer_behind(comm, 1 + i), tile):
                missing = float("nan")
            """,
        ),
        "_load of .* loads ",
    ),
    "no fence between an arrival and TMA": (NO_FENCE_FOR_DESCRIPTORS, f"_load of .*{FENCE}"),
    "a stage with partials is filled before it is free": (
        change(sums.load_partials, "mbarrier.wait(stages.freed.index(stage), (step // STAGES + 1) & 1)"),
        "race on ",
    ),
    "partials are read before they are loaded": (
        change(sums._staged_rows, "mbarrier.wait(stages.filled.index(stage), (step // STAGES) & 1)"),
        "_multiply of .* must wait for first|nobody has written|in _staged_rows",
    ),
    "a stage with partials is freed before it is read": (
        {
            sums._staged_rows: edited(
                sums._staged_rows,
                ("mbarrier.arrive(stages.freed.index(stage), count=1)", "pass"),
                (
                    "mbarrier.wait(stages.filled.index(stage), (step // STAGES) & 1)",
                    """
                    mbarrier.wait(stages.filled.index(stage), (step // STAGES) & 1)
                    mbarrier.arrive(stages.freed.index(stage), count=1)
                    """,
                ),
            )
        },
        "race on .* in shared memory|waits for a phase",
    ),
    "a signal does not wait for the stores": (
        both(
            lambda kernel, turn: change(
                kernel._signal, f"mbarrier.wait(pushes.stored.index({turn} % 2), ({turn} // 2) & 1)"
            )
        ),
        "race on |nobody has written|_multiply of .* waits for a phase",
    ),
    "pushes do not wait for signals": (
        both(
            lambda kernel, turn: change(
                kernel._multiply, f"mbarrier.wait(pushes.signalled.index({turn} % 2), ({turn} // 2 + 1) & 1)"
            )
        ),
        "_signal of .* has waited for its phase|_signal of .* waits for a phase",
    ),
    "a signal does not release": (RELAXED_NOTIFY, "race on |not by a release"),
    "a wait does not acquire": (RELAXED_WAIT, "race on "),
}

# In matmul_all_reduce, a rank pushes the tiles of a block after it has added up those of the block before. So the wait
# warp depends on the load warp anyway.
SCATTERS = {
    "the wait warp does not wait for the load warp": (
        change(sums.prefetch_arrived, "mbarrier.wait(arrivals.taken.index(summed % 2), (summed // 2 + 1) & 1)"),
        "_load of .* has waited for its phase|_load of .* waits for a phase",
    ),
}

ATTENTIONS = {
    "keys are read before they are loaded": (
        change(attention._start_scores, "mbarrier.wait(stages.full.index(step % STAGES), (step // STAGES) & 1)"),
        "_attend of .* must wait for first|nobody has written",
    ),
    "values are read before they are loaded": (
        change(attention._attend_block, "mbarrier.wait(shared.v.full.index(before), ((step - 1) // STAGES) & 1)"),
        "_attend of .* must wait for first|nobody has written",
    ),
    "queries are read before they are loaded": (
        change(attention._start_tile, "mbarrier.wait(shared.q.full.index(stage), phase)"),
        "_attend of .* must wait for first|nobody has written",
    ),
    "the stage of values is freed before they were read": (
        change(
            attention._attend_block,
            """
            accumulator, _ = warpgroup_mma_wait(0, deps=[product, attended.weights])
            mbarrier.arrive(shared.v.empty.index(before), count=1)
            """,
            """
            mbarrier.arrive(shared.v.empty.index(before), count=1)
            accumulator, _ = warpgroup_mma_wait(0, deps=[product, attended.weights])
            """,
        ),
        r"load of .* stores to it:[^*]*_attend of [^*]*warpgroup_mma_wait\(\) must come between",
    ),
    "queries are replaced before they were read": (
        change(hopper_load._load_queries, "mbarrier.wait(shared.q.empty.index(stage), phase ^ 1)"),
        "race on .* in shared memory, allocation 0",
    ),
    "keys and values are replaced before they were read": (
        change(hopper_load._load_rows, "mbarrier.wait(stages.empty.index(stage), ((loaded // STAGES) & 1) ^ 1)"),
        "race on .* in shared memory",
    ),
    "no fence between an arrival and TMA": (NO_FENCE_FOR_DESCRIPTORS, f"load of .*{FENCE}"),
    "chunks are not waited for": (
        change(hopper_load._load_slots, "wait_panel(comm, call.rounds, round_index, source, chunk, chunk + 1)"),
        "load of .* loads ",
        dict(slow=1e-4),
    ),
    "the result is overwritten while TMA reads it": (
        change(
            attention._store_tile,
            """
            tma.store_wait(0)
            tl.debug_barrier()
            """,
        ),
        r"in _store_tile[^*]*tma.store_wait\(\) must come between the two",
    ),
    "no fence between the result and TMA": (
        change(attention._store_tile, "fence_async_shared()"),
        r"in _store_tile[^*]*fence_async_shared\(\) must come between the two",
    ),
    "a turn is not passed": (
        change(
            attention._attend_block_in_turn,
            "step = _pass_turn(step, GROUP)",
        ),
        "_attend of .* waits for phase .* of named barrier 1[45]",
        dict(ranks=1, causal=True),
    ),
    "chunks are announced before they are stored": (
        {
            transfer.intra: edited(
                transfer.intra,
                ("notify_chunk(comm, call.rounds, chunk, peer)", "pass"),
                (
                    "since = trace_time(comm.context)\nif source == rank:",
                    """
                    since = trace_time(comm.context)
                    for i in range(1, comm.RANKS_PER_NODE):
                        notify_chunk(comm, call.rounds, chunk, base + (rank + i) % comm.RANKS_PER_NODE)
                    if source == rank:
                    """,
                ),
            )
        },
        "push of .* stores to it|push of .* stored to it|nobody has written",
    ),
    "no barrier before an announcement": (NO_BARRIER, "but a barrier must come between"),
    "an announcement does not release": (RELAXED_NOTIFY, "not by a release"),
    "a wait does not acquire": (RELAXED_WAIT, "race on ", dict(slow=1e-4)),
    "slots are overwritten before they are free": (
        change(
            transfer.intra,
            "wait_writable(comm, call.rounds, round_index, base + (rank + i) % comm.RANKS_PER_NODE, INTRA)",
        ),
        "race on |launch that has ended",
        dict(ranks=3, length=100, heads=4, kv_heads=4, steps=1),
    ),
    "slots are freed before the last tile is done": (
        change(
            attention_protocol.finish_task,
            "if is_last_task(comm, rounds, done):",
            "if not is_last_task(comm, rounds, done):",
        ),
        "race on ",
        dict(ranks=3, length=200, heads=4, kv_heads=4, steps=1, ctas=2),
    ),
}

CALLS = [
    (GATHER, MULTIPLY | GATHERS),
    (SCATTER, MULTIPLY | SUMS | SCATTERS),
    (REDUCE, MULTIPLY | SUMS),
    (ATTENTION, ATTENTIONS),
]


def is_repeated(op, name):
    """Is the same function broken in the kernel of another operator, too?"""
    return (op != GATHER and name in MULTIPLY) or (op == REDUCE and name in SUMS)


@pytest.mark.parametrize(
    ("op", "broken"),
    [
        pytest.param(op, each, id=f"{op}-{name}", marks=[pytest.mark.thorough] if is_repeated(op, name) else [])
        for op, variants in CALLS
        for name, each in variants.items()
    ],
)
def test_broken(op, broken):
    replace, match, given = (*broken, {})[:3]
    other = reduce_scatter if op == REDUCE else all_reduce
    replace = {old: new for old, new in replace.items() if old.fn.__module__ != other.__name__}
    passes_unbroken(op, tuple(given.items()))
    with pytest.raises(mk.SimulatorError, match=match):
        simulated(op, replace, **given)
