"""The context table, the epoch, and the clock."""

import pytest
import torch
import triton
import triton.language as tl

from mkernel.lang import context as words
from mkernel.lang.context import current_epoch, rank_of, segment_of
from mkernel.lang.device import clock, now
from mkernel.lang.signals import finish

from .harness import launch, simulate, workspace_of


@triton.jit
def count_epochs(context, out):
    """Every CTA writes down the epoch it saw."""
    epoch = current_epoch(context)
    tl.store(out + tl.program_id(0), epoch)
    finish(context, epoch, 2)


def epochs_of(workspace, ctas):
    """The last epoch that each CTA has completed."""
    return workspace.state[words.EPOCH.value :][:ctas].tolist()


@pytest.mark.parametrize("resident", [None, 1, 2])
@pytest.mark.parametrize("grid", [1, 5])
def test_a_launch_completes_one_epoch(resident, grid):
    def rank(group):
        workspace = workspace_of(group)
        for epoch in range(1, 5):
            out = torch.zeros(grid, dtype=torch.int64)
            launch(group, workspace, count_epochs, grid=grid, out=out)
            assert out.tolist() == [epoch] * grid
            assert epochs_of(workspace, grid) == [epoch] * grid

    for seed in range(3):
        simulate(rank, resident=resident, seed=seed)


def test_launches_of_different_sizes():
    """A launch counts for CTAs that it does not have."""

    def rank(group):
        workspace = workspace_of(group)
        for epoch, grid in enumerate([3, 1, 4, 2, 4], 1):
            out = torch.zeros(grid, dtype=torch.int64)
            launch(group, workspace, count_epochs, grid=grid, out=out)
            assert out.tolist() == [epoch] * grid
            assert epochs_of(workspace, 4) == [epoch] * 4

    for seed in range(3):
        simulate(rank, seed=seed, ctas=4)


def test_epochs_go_beyond_32_bits():
    def rank(group):
        workspace = workspace_of(group)
        workspace.state[words.EPOCH.value :] = 1 << 40
        out = torch.zeros(2, dtype=torch.int64)
        launch(group, workspace, count_epochs, grid=2, out=out)
        return out.tolist(), int(workspace.state[words.EPOCH.value])

    assert simulate(rank)[0] == ([(1 << 40) + 1] * 2, (1 << 40) + 1)


@triton.jit
def look_around(context, out):
    size = tl.load(context + words.SIZE_WORD).to(tl.int32)
    tl.store(out, rank_of(context))
    for peer in range(size):
        tl.store(out + 1 + peer, segment_of(context, peer, tl.int64).to(tl.int64))
        tl.store(out + 1 + size + peer, tl.load(context + words.TABLE + size + peer))


@pytest.mark.parametrize(("nodes", "gpus"), [(1, 3), (2, 2), (3, 1)])
def test_a_kernel_sees_its_rank_and_the_segments_of_its_node(nodes, gpus):
    size = nodes * gpus

    def rank(group):
        workspace = workspace_of(group)
        out = torch.zeros(1 + 2 * size, dtype=torch.int64)
        launch(group, workspace, look_around, out=out)
        return out.tolist(), workspace.segment.memory.data_ptr(), group._control.memory.data_ptr()

    found = simulate(rank, nodes=nodes, gpus=gpus)
    for number, (out, _, _) in enumerate(found):
        assert out[0] == number
        for peer, (_, segment, control) in enumerate(found):
            same = peer // gpus == number // gpus
            assert out[1 + peer] == (segment if same else 0)
            assert out[1 + size + peer] == (control if same else 0)


def test_the_table_holds_what_the_group_knows():
    def rank(group):
        table = workspace_of(group).context.tolist()
        ring, posting = (words.data_ptr() if words is not None else 0 for words in (group._ring, group._posting))
        return table, group._records.data_ptr(), ring, posting

    for nodes in (1, 2):
        for number, (table, recorded, ring, posting) in enumerate(simulate(rank, nodes=nodes, gpus=1, timeout=2.5)):
            assert table[words.RANK.value] == number
            assert table[words.SIZE_WORD.value] == nodes
            assert table[words.TIMEOUT.value] == 2_500_000_000
            assert table[words.RECORDS.value] == recorded
            assert table[words.RING.value] == ring
            assert table[words.POSTING.value] == posting
            assert (ring == 0) == (posting == 0) == (nodes == 1)
            assert len(table) == words.TABLE.value + 2 * nodes


@triton.jit
def read_clocks(context, out):
    before = clock()
    first = now(context)
    second = now(context)
    after = clock()
    tl.store(out, before)
    tl.store(out + 1, first)
    tl.store(out + 2, second)
    tl.store(out + 3, after)


def test_clocks_agree_and_never_go_back():
    def rank(group):
        workspace = workspace_of(group)
        found = []
        for _ in range(3):
            out = torch.zeros(4, dtype=torch.int64)
            start = group.world.scheduler.clock
            launch(group, workspace, read_clocks, out=out)
            found.append([start, *out.tolist(), group.world.scheduler.clock])
            group.world.scheduler.clock += 10**12
        return found

    for times in simulate(rank)[0]:
        assert times == sorted(times)


@triton.jit
def wait_on_the_clock(context, nanoseconds, out):
    start = clock()
    time = clock()
    while time - start < nanoseconds:
        time = clock()
    tl.store(out, time - start)


def test_a_kernel_can_wait_for_the_clock():
    def rank(group):
        out = torch.zeros(1, dtype=torch.int64)
        launch(group, workspace_of(group), wait_on_the_clock, nanoseconds=5_000_000, out=out)
        return int(out)

    assert 5_000_000 <= simulate(rank)[0] < 50_000_000


def test_the_clock_of_a_workspace_is_not_behind_the_timer():
    """A time that another CTA has seen is never undone: now() gives the newest that anybody saw."""

    def rank(group):
        workspace = workspace_of(group)
        ahead = group.world.scheduler.clock + 10**15
        workspace.state[words.CLOCK.value] = ahead
        out = torch.zeros(4, dtype=torch.int64)
        launch(group, workspace, read_clocks, out=out)
        return out.tolist(), ahead

    (_, first, second, _), ahead = simulate(rank)[0]
    assert first == second == ahead
