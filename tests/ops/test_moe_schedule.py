"""The order of blocks of rows: every block once, those of a class by expert, classes in the order of their arrival."""

import itertools
import math

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import example, given, settings
from hypothesis import strategies as st
from lang.harness import launch, simulate, workspace_of

from mkernel.lang.context import Comm, Ranks, current_epoch
from mkernel.lang.signals import finish
from mkernel.ops.moe.routing import BLOCKS, ENTRY, SUMMARY, Tables
from mkernel.ops.moe.schedule import FEW_BINS, MOST_BINS, schedule_blocks
from mkernel.runtime.operands import constants

TILE_M = 4
GROUP = 4


@triton.jit
def order(context, ranks, tables, experts, TILE_M: tl.constexpr, GROUP: tl.constexpr, NODE_LAST: tl.constexpr):
    schedule_blocks(
        Comm(context, current_epoch(context), ranks.WORLD_SIZE, ranks.RANKS_PER_NODE),
        tables, experts, TILE_M, GROUP, NODE_LAST,
    )  # fmt: skip
    finish(context, current_epoch(context), ranks.WORLD_SIZE)


def ordered(group, counts, node_last):
    """What the kernel makes of counts[expert][source]: (expert, first row, rows, number, first place and blocks of its
    group) of each block, in order."""
    flat = [count for sources in counts for count in sources]
    heights = [math.ceil(sum(sources) / TILE_M) for sources in counts]
    summary = torch.zeros(SUMMARY.value, dtype=torch.int32)
    summary[BLOCKS.value] = sum(heights)
    schedule = torch.full((sum(heights), ENTRY.value), -1, dtype=torch.int32)
    tables = dict(
        counts=torch.tensor(flat, dtype=torch.int32),
        bases=torch.tensor([0, *itertools.accumulate(flat)], dtype=torch.int32),
        first_blocks=torch.tensor([0, *itertools.accumulate(heights)], dtype=torch.int32),
        summary=summary, unsorted=torch.empty_like(schedule), schedule=schedule,
    )  # fmt: skip
    launch(
        group, workspace_of(group), order, ranks=Ranks(*constants(group.size, group.gpus_per_node)),
        tables=Tables(*(tables.get(name) for name in Tables._fields)),
        experts=len(counts), TILE_M=TILE_M, GROUP=GROUP, NODE_LAST=node_last,
    )  # fmt: skip
    return [tuple(entry) for entry in schedule.tolist()]


def expected(counts, rank, gpus, node_last):
    """The same, by the rules as ops/moe/schedule.py states them."""
    node = rank // gpus
    blocks, begin = [], 0
    for expert, sources in enumerate(counts):
        owners = [source for source, count in enumerate(sources) for _ in range(count)]
        for first in range(0, len(owners), TILE_M):
            rows = owners[first : first + TILE_M]
            arrived = {s: (min(first + TILE_M, sum(sources[: s + 1])) - sum(sources[:s])) / sources[s] for s in rows}
            share = max((arrived[s] for s in rows if s // gpus != node), default=0)
            blocks.append((expert, begin + first, len(rows), len(blocks), set(rows), share))
        begin += len(owners)
    bins = min(max(len(blocks) // ((8 if node_last else 4) * len(counts)), 1), MOST_BINS.value)

    def key(block):
        sources, share = block[4], block[5]
        own, near = sources == {rank}, all(source // gpus == node for source in sources)
        piece = max(math.ceil(share * bins - 1e-9), 1)
        other_half = 2 * block[0] >= len(counts)
        first = own and 4 * block[0] < len(counts)
        if node_last:
            return (0,) if first else (3 if other_half else 1,) if near else (2, piece)
        if bins >= FEW_BINS.value:
            return (0 if own else 1,) if near else (2, piece)
        if first:
            return (0,)
        if near:
            return (1 + other_half,)
        return (4,) if share > 0.5 else (2 if other_half else 3,)

    blocks.sort(key=key)
    found = []
    for _, run in itertools.groupby(blocks, key=lambda block: (block[0], key(block))):
        of_run, first = list(run), len(found)
        groups = max((len(of_run) + GROUP // 2) // GROUP, 1)
        height = math.ceil(len(of_run) / groups)
        for i, block in enumerate(of_run):
            begins = i // height * height
            found.append((*block[:4], first + begins, min(height, len(of_run) - begins)))
    return found


@st.composite
def routings(draw):
    nodes, gpus = draw(st.sampled_from([(1, 1), (1, 3), (2, 2), (3, 1)]))
    experts = draw(st.integers(1, 4))
    most = draw(st.sampled_from([3, 12, 60]))
    return nodes, gpus, [[draw(st.integers(0, most)) for _ in range(nodes * gpus)] for _ in range(experts)]


@pytest.mark.parametrize("node_last", [False, True])
@settings(max_examples=30, deadline=None)
@given(routing=routings())
@example(routing=(2, 2, [[0, 0, 0, 0]]))
@example(routing=(2, 2, [[30, 31, 33, 34]]))  # blocks with the last rows of a source and the first of the next
@example(routing=(2, 2, [[64, 64, 64, 64], [0, 0, 0, 200], [130, 0, 1, 3]]))  # many bins
@example(routing=(1, 1, [[1100], [4]]))  # more blocks than are sorted at once
def test_blocks_are_in_order(routing, node_last):
    nodes, gpus, counts = routing
    found = simulate(lambda group: ordered(group, counts, node_last), nodes=nodes, gpus=gpus)
    for rank, schedule in enumerate(found):
        assert schedule == expected(counts, rank, gpus, node_last), f"rank {rank}"
