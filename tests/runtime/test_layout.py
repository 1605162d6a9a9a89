"""Where a layout puts words and buffers, for the host, for the kernel and for the simulator."""

import itertools

import pytest
import torch
from support.operator_calls import run

from mkernel.runtime.layout import Layout


def single(window, chunks, rows):
    """A call without double buffering; its arrays have other sizes at every call."""
    memory = Layout("ring_attention", double_buffered=False)
    memory.words("entered", 2)
    memory.counters("done", window)
    memory.signals("freed", 2, window)
    memory.signals("arrived", window, chunks)
    memory.buffer("slots", torch.float32, rows, 64)
    return memory


def words_of(memory, workspace, name):
    """The words of a workspace that an array of a call has, as the simulator bounds them."""
    (array,) = (array for array in memory.uses(workspace).arrays if array.name == name)
    return range(array.start // 8, array.start // 8 + torch.Size(array.shape).numel())


SHAPES = [(1, 1, 1), (8, 1, 40), (2, 30, 7), (3, 5, 100)]


@pytest.mark.parametrize("order", list(itertools.permutations(range(len(SHAPES)), 3)))
def test_no_word_is_a_counter_in_one_call_and_a_signal_in_another(order):
    """Whatever the shapes of two calls are, in whatever order they make the workspace grow. A counter returns to zero;
    a signal that it replaced would be awaited for ever, or found there too early."""

    def work(group):
        layouts = [single(*SHAPES[i]) for i in order]
        for memory in layouts:
            memory.workspace(group)
        (workspace,) = {id(w): w for w in (memory.workspace(group) for memory in layouts)}.values()
        counters = {word for memory in layouts for word in words_of(memory, workspace, "done")}
        signals = {
            word for memory in layouts for name in ("freed", "arrived") for word in words_of(memory, workspace, name)
        }
        entered = {word for memory in layouts for word in words_of(memory, workspace, "entered")}
        assert entered == {0, 1}
        assert not counters & signals
        assert not entered & (counters | signals)
        assert max(counters | signals) < workspace.signal_words

    run(work, cluster=(1, 1))


def test_kernel_and_simulator_are_told_the_same():
    memory = single(3, 5, 100)

    def work(group):
        workspace = memory.workspace(group)
        for name, stride in (("entered", 1), ("done", 1), ("freed", 3), ("arrived", 5)):
            words = memory.words_in(workspace, name)
            assert words.start == words_of(memory, workspace, name).start
            assert words.half.value == 0
            assert words.stride == stride
        uses = memory.uses(workspace, free={"slots": ((10, 20), (50, 100))})
        assert uses.whole
        assert uses.free == [(10 * 256, 20 * 256), (50 * 256, 100 * 256)]
        slots = memory.tensor_in(workspace, "slots", torch.float32)
        buffer = memory.buffer_in(workspace, "slots")
        (array,) = (array for array in uses.arrays if array.name == "slots")
        assert slots.shape == array.shape == (100, 64)
        assert slots.data_ptr() - workspace.segment.memory.data_ptr() == array.start == buffer.start * 4
        assert (buffer.half.value, buffer.row_stride) == (0, 64)
        assert 2 * workspace.half_bytes >= 100 * 256

    run(work, cluster=(1, 1))


def test_double_buffered():
    memory = Layout("all_gather_matmul")
    memory.words("once", 3)
    memory.signals("arrived", 2, 4)
    memory.buffer("rows", torch.bfloat16, 6, 8)

    def work(group):
        workspace = memory.workspace(group)
        words = memory.words_in(workspace, "arrived")
        assert (words.start, words.half, words.stride) == (3, (workspace.signal_words - 3) // 2, 4)
        assert memory.buffer_in(workspace, "rows").half == workspace.half_bytes // 2
        arrays = {array.name: array for array in memory.uses(workspace).arrays}
        assert arrays["arrived"].shape == (2, 2, 4)
        assert arrays["arrived"].strides == (words.half, 4, 1)
        assert {"rows in half 0", "rows in half 1"} <= set(arrays)
        assert not memory.uses(workspace).whole

    run(work, cluster=(1, 1))
    with pytest.raises(AssertionError, match="counters need a layout with double_buffered=False"):
        memory.counters("done", 1)
