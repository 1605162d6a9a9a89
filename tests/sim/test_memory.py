"""Memory: kernels touch only what they were given, and read only what was written. Messages say who, where, how far."""

import re

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

import mkernel as mk
from mkernel.lang.context import SEGMENT, current_epoch, rank_of, segment_of
from mkernel.lang.hints import used_below
from mkernel.lang.requests import Transfer, post
from mkernel.lang.roles import COMPUTE, SEND
from mkernel.lang.signals import ARRIVED, finish, notify, wait
from mkernel.runtime.group import Uses
from mkernel.runtime.operands import descriptor
from mkernel.runtime.world import Array, Launch

from .harness import OP, launch, simulate

HERE = rf"\n  rank 0, CTA 0 of {OP}:\n    sim/test_memory.py:\d+ in touch"
HOWS = ["load", "store", "add", "poll", "exchange", "compare"]
WHAT = {"load": "a load", "store": "a store"}


def with_room(count, dtype=torch.int64):
    """Zeros in the middle of other memory of this test, so that nothing breaks if a check is missing."""
    size = dtype.itemsize
    whole = torch.from_numpy(np.zeros((count + 64) * size, dtype=np.uint8))
    return torch.from_numpy(whole.numpy()[32 * size : (32 + count) * size]).view(dtype)


def run(kernel, grid=1, inputs=(), results=(), races=True, **arguments):
    def on_rank(group):
        group.launch(
            Launch(op=OP, group=group, kernel=kernel, grid=grid, arguments=arguments, inputs=inputs, results=results)
        )

    simulate(on_rank, races=races)


def refused(message, *args, **arguments):
    with pytest.raises(mk.SimulatorError, match=message):
        run(*args, **arguments)


@triton.jit
def touch(x, place, HOW: tl.constexpr):
    if HOW == "load":
        tl.load(x + place)
    elif HOW == "store":
        tl.store(x + place, 1)
    elif HOW == "add":
        tl.atomic_add(x + place, 1)
    elif HOW == "poll":
        tl.atomic_add(x + place, 0)
    elif HOW == "exchange":
        tl.atomic_xchg(x + place, 1)
    else:
        tl.atomic_cas(x + place, 0, 1)


# -- bounds


@pytest.mark.parametrize("races", [True, False])
@pytest.mark.parametrize(
    ("place", "where"),
    [
        (-1, "8 bytes before the start of x on rank 0, of shape [4] (element -1, counted from its first one)"),
        (4, "0 bytes after the end of x on rank 0, of shape [4] (element 4, counted from its first one)"),
        (9, "40 bytes after the end of x on rank 0, of shape [4] (element 9, counted from its first one)"),
    ],
)
@pytest.mark.parametrize("how", HOWS)
def test_before_and_behind_a_tensor(how, place, where, races):
    what = WHAT.get(how, "an atomic operation")
    message = f"^{what} of 8 bytes is outside of every tensor that the kernel was given: {re.escape(where)}{HERE}"
    refused(message, touch, x=with_room(4), place=place, HOW=how, races=races)
    run(touch, x=with_room(4), place=3, HOW=how, races=races)


@triton.jit
def straddle(x, HOW: tl.constexpr):
    touch((x.to(tl.int64) + 4).to(tl.pointer_type(tl.int64)), 0, HOW)


@pytest.mark.parametrize("how", HOWS)
def test_the_last_byte_counts(how):
    """Eight bytes of which four lie outside."""
    refused(rf"across the edge of x on rank 0, of shape \[1\]{HERE}", straddle, x=with_room(1), HOW=how)


@triton.jit
def touch_block(x, first, HOW: tl.constexpr, COUNT: tl.constexpr, MASKED: tl.constexpr):
    i = first + tl.arange(0, COUNT)
    mask = i < MASKED
    if HOW == "load":
        tl.load(x + i, mask=mask)
    elif HOW == "store":
        tl.store(x + i, i, mask=mask)
    else:
        tl.atomic_add(x + i, 1, mask=mask)


@pytest.mark.parametrize("how", ["load", "store", "add"])
def test_every_element_of_a_block_counts_unless_it_is_masked(how):
    block = dict(HOW=how, COUNT=8)
    refused(
        r"0 bytes after the end of x on rank 0, of shape \[4\]",
        touch_block,
        x=with_room(4),
        first=0,
        MASKED=8,
        **block,
    )
    refused("8 bytes before the start of x", touch_block, x=with_room(9), first=-1, MASKED=8, **block)
    run(touch_block, x=with_room(4), first=0, MASKED=4, **block)
    run(touch_block, x=with_room(4), first=100, MASKED=4, **block)  # nothing at all


@pytest.mark.parametrize("how", HOWS)
def test_between_the_elements_of_a_tensor(how):
    """Every second number; another tensor is nearer to the gap than the ends of this one."""
    x = with_room(64)[::2]
    refused(rf"between the elements of x on rank 0, of shape \[32\], after \[10\]{HERE}", touch, x=x, place=21, HOW=how)
    run(touch, x=x, place=20, HOW=how)


@pytest.mark.parametrize("how", ["load", "store", "add"])
def test_an_element_that_is_wider_than_those_of_the_tensor(how):
    """Four bytes, a gap of four; eight at once are too many."""

    @triton.jit
    def wide(x, HOW: tl.constexpr):
        touch(x.to(tl.pointer_type(tl.int64)), 0, HOW)

    refused(
        r"between the elements of x on rank 0, of shape \[4\], after \[0\]",
        wide,
        x=with_room(8, torch.int32)[::2],
        HOW=how,
    )
    run(wide, x=with_room(8, torch.int32), HOW=how)


def test_between_two_tensors():
    """The nearer one is named."""
    whole = with_room(16)
    pair = dict(x=whole[:4], y=whole[12:])

    @triton.jit
    def beside(x, y, place):
        touch(x, place, "load")

    # they are parts of one allocation
    refused(r"8 bytes after the end of x on rank 0, of shape \[4\]", beside, place=5, **pair)
    refused(r"16 bytes before the start of y on rank 0, of shape \[4\]", beside, place=10, **pair)
    run(beside, place=13, **pair)


def test_columns_of_a_matrix_are_named_as_such():
    """In whatever order its dimensions lie in memory."""

    @triton.jit
    def store_at(x, place):
        tl.store(x + place, 1)

    for x, place, name in (
        (with_room(32).view(4, 8), 13, r"x\[1, 5\]"),
        (with_room(32).view(4, 8).t(), 13, r"x\[5, 1\]"),
        (with_room(32).view(2, 4, 4).permute(1, 2, 0), 27, r"x\[2, 3, 1\]"),
    ):
        refused(f"a store to an input of the kernel: {name} on rank 0", store_at, inputs=("x",), x=x, place=place)


@triton.jit
def touch_workspace(context, place, HOW: tl.constexpr):
    touch(segment_of(context, rank_of(context), tl.int64), place, HOW)


@pytest.mark.parametrize("how", HOWS)
def test_behind_the_signals_of_a_workspace(how):
    """Of 3 words; the halves begin behind them, at the next multiple of what they are aligned to."""

    def on_rank(group, place, how):
        workspace = group.workspace(OP, 3, 64)
        assert workspace.data_start > 3 * 8
        launch(group, touch_workspace, context=workspace.context, place=place, HOW=how)

    simulate(lambda group: on_rank(group, 2, how))
    name = f"the signals of {OP} on rank 0, of 24 bytes"
    with pytest.raises(mk.SimulatorError, match=f"0 bytes after the end of {name}.*{HERE}"):
        simulate(lambda group: on_rank(group, 3, how))
    with pytest.raises(mk.SimulatorError, match=f"8 bytes before the start of {name}"):
        simulate(lambda group: on_rank(group, -1, how))


def test_across_the_two_halves():
    """An element has to lie in one of them."""

    @triton.jit
    def store_byte(context, offset, WIDE: tl.constexpr):
        address = segment_of(context, rank_of(context), tl.int8) + offset
        if WIDE:
            tl.store(address.to(tl.pointer_type(tl.int32)), 1)
        else:
            tl.store(address, 1)

    def on_rank(group, before, wide):
        workspace = group.workspace(OP, 3, 64)
        middle = workspace.data_start + workspace.half_bytes
        launch(group, store_byte, context=workspace.context, offset=middle - before, WIDE=wide)

    for before, wide in ((4, True), (0, True), (1, False)):
        simulate(lambda group, before=before, wide=wide: on_rank(group, before, wide))
    with pytest.raises(mk.SimulatorError, match=f"across the edge of half 0 of the workspace of {OP} on rank 0"):
        simulate(lambda group: on_rank(group, 2, True))
    with pytest.raises(mk.SimulatorError, match=f"0 bytes after the end of half 1 of the workspace of {OP} on rank 0"):
        simulate(lambda group: on_rank(group, -group.workspace(OP, 3, 64).half_bytes, False))


def test_a_tensor_is_lent_for_one_launch_only():
    x = with_room(4)

    @triton.jit
    def by_address(address):
        tl.load(address.to(tl.pointer_type(tl.int64)))

    def on_rank(group):
        launch(group, touch, x=x, place=0, HOW="load")
        launch(group, by_address, address=x.data_ptr())

    with pytest.raises(mk.SimulatorError, match="outside of every tensor"):
        simulate(on_rank)


@triton.jit
def read_often(x, out, times):
    total = tl.load(x)
    for _ in range(times):
        tl.atomic_add(out + 1, 1)
        total += tl.load(x)
    tl.store(out, total)


def test_ranks_may_share_a_tensor():
    """One that is done early must not take it away from one that still reads it."""
    x = torch.ones(1, dtype=torch.int64)

    def on_rank(group):
        out = torch.zeros(2, dtype=torch.int64)
        group.barrier()
        launch(group, read_often, x=x, out=out, times=20 + 60 * group.rank)
        return int(out[0])

    for seed in range(4):
        assert simulate(on_rank, gpus=2, seed=seed) == [21, 81]


# -- inputs and results


@pytest.mark.parametrize("how", ["store", "add", "exchange", "compare"])
@pytest.mark.parametrize("symmetric", [False, True])
def test_an_input_is_not_stored_to(how, symmetric):
    def on_rank(group, inputs):
        x = group.empty(4, dtype=torch.int64) if symmetric else with_room(4)
        arguments = dict(x=x, place=2, HOW=how)
        group.launch(Launch(op=OP, group=group, kernel=touch, grid=1, arguments=arguments, inputs=inputs))

    simulate(lambda group: on_rank(group, ()))
    message = rf"to an input of the kernel: x\[2\] on rank 0, which the launch only reads \(`Launch.inputs`\){HERE}"
    with pytest.raises(mk.SimulatorError, match=message):
        simulate(lambda group: on_rank(group, ("x",)))


@pytest.mark.parametrize("how", ["load", "poll"])
def test_an_input_may_be_looked_at(how):
    run(touch, inputs=("x",), x=with_room(4), place=2, HOW=how)


@triton.jit
def write_some(y, count, HOW: tl.constexpr):
    for i in range(count):
        if HOW == "store":
            tl.store(y + i, 1)
        else:
            tl.atomic_xchg(y + i, 1)


@pytest.mark.parametrize("how", ["store", "exchange"])
def test_every_element_of_a_result_must_be_written(how):
    run(write_some, results=("y",), y=with_room(4), count=4, HOW=how)
    message = rf"^{OP}: the launch on rank 0 has ended, and nobody has written y\[3\]"
    refused(message, write_some, results=("y",), y=with_room(4), count=3, HOW=how)
    run(write_some, y=with_room(4), count=3, HOW=how)  # it was not said to be a result


def test_a_result_with_gaps():
    @triton.jit
    def write_even(y, count):
        for i in range(count):
            tl.store(y + 2 * i, 1)

    run(write_even, results=("y",), y=with_room(8)[::2], count=4)
    refused(r"nobody has written y\[2\]", write_even, results=("y",), y=with_room(8)[::2], count=2)


# -- what nobody has written


@triton.jit
def read_back(y, out, count, HOW: tl.constexpr):
    for i in range(count):
        if HOW == "store":
            tl.store(y + i, 1)
        else:
            tl.atomic_xchg(y + i, 1)
    tl.store(out, tl.sum(tl.load(y + tl.arange(0, 4))))


@pytest.mark.parametrize("how", ["store", "exchange"])
def test_a_new_output_is_unwritten(how):
    def on_rank(group, count):
        y = group.world.memory.empty(0, (4,), torch.float32).view(torch.int32)
        launch(group, read_back, y=y, out=torch.zeros(1), count=count, HOW=how)

    simulate(lambda group: on_rank(group, 4))
    message = (
        rf"^rank 0, CTA 0 of {OP} loads y\[2\] on rank 0, which nobody has written:\n"
        r"    sim/test_memory.py:\d+ in read_back\n"
        rf"  Whoever writes it must signal that.*; rank 0, CTA 0 of {OP} has waited for nothing\."
    )
    with pytest.raises(mk.SimulatorError, match=message):
        simulate(lambda group: on_rank(group, 2))


def test_a_tensor_of_the_caller_is_written():
    """The caller's code did, or did not; nobody knows."""
    run(read_back, y=torch.empty(4), out=torch.zeros(1), count=0, HOW="store")


@triton.jit
def keep(context, start, out, WRITES: tl.constexpr):
    epoch, data = current_epoch(context), segment_of(context, 0, tl.int64) + start
    if WRITES:
        tl.store(data, 5)
    tl.store(out, tl.load(data))
    finish(context, epoch, 1)


def kept(group, writes, spends):
    workspace = group.workspace(OP, 8, 64)
    for call in writes:
        arguments = dict(
            context=workspace.context,
            start=(workspace.data_start + workspace.half_bytes) // 8,
            out=with_room(1),
            WRITES=call,
        )
        uses = Uses(workspace, [], [(0, 8)]) if spends else None
        # epoch 1 uses the second half, and both epochs look at that
        group.launch(Launch(op=OP, group=group, kernel=keep, grid=1, arguments=arguments, uses=uses))


def test_a_workspace_is_unwritten_at_first():
    with pytest.raises(
        mk.SimulatorError, match=f"loads byte 0 of half 1 of the workspace of {OP} on rank 0, which nobody"
    ):
        simulate(lambda group: kept(group, [False], spends=False))


def test_what_a_launch_had_for_itself_is_spent_when_it_has_ended():
    simulate(lambda group: kept(group, [True, True, True], spends=True))
    simulate(lambda group: kept(group, [True, False], spends=False))
    message = (
        f"loads byte 0 of half 1 of the workspace of {OP} on rank 0, which was written for a launch that has ended"
    )
    with pytest.raises(mk.SimulatorError, match=message):
        simulate(lambda group: kept(group, [True, False], spends=True))


@triton.jit
def send_unwritten(context, start, out, SIZE: tl.constexpr):
    epoch, rank = current_epoch(context), rank_of(context)
    segment, mine = tl.load(context + SEGMENT), segment_of(context, rank, tl.int64)
    if rank == 0:
        tl.store(mine + start, 1)
        post(context, Transfer(1 - rank, segment, start * 8, segment, start * 8, 16), 0, epoch, SEND)
    else:
        wait(context, mine, epoch, COMPUTE, ARRIVED, 0, 0)
        tl.store(out, tl.load(mine + start))
        tl.store(out, tl.load(mine + start + 1))
    finish(context, epoch, SIZE)


def test_what_nobody_has_written_is_as_unwritten_when_it_was_sent():
    def on_rank(group):
        workspace = group.workspace(OP, 8, 64)
        start = workspace.data_start // 8
        launch(group, send_unwritten, context=workspace.context, start=start, out=with_room(1), SIZE=2)

    with pytest.raises(
        mk.SimulatorError, match=f"rank 1, CTA 0 of {OP} loads byte 8 of half 0 .* on rank 1, which nobody"
    ):
        simulate(on_rank, nodes=2)


@triton.jit
def rows(tile, box, out, used, HINT: tl.constexpr):
    for i in range(4):
        if i < used:
            tl.store(box + i * 16 + tl.arange(0, 16), 1.0)
    tl.debug_barrier()
    acquire(0)
    if HINT:
        used_below(tile, used)
    tl.store(out + tl.arange(0, 4), tl.sum(tile.load([0, 0]), 1))


@triton.jit
def acquire(_):
    tl.inline_asm_elementwise(
        "fence.proxy.async.global; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


def test_rows_that_are_not_used_may_be_unwritten():
    """Their values are NaN, so that nobody does use them."""

    def on_rank(group, hint):
        box, out = group.world.memory.empty(0, (4, 16), torch.float32), torch.zeros(4)
        tile = descriptor(box, [4, 16], [16, 1], [4, 16])
        launch(group, rows, tile=tile, box=box, out=out, used=2, HINT=hint)
        return out

    (out,) = simulate(lambda group: on_rank(group, True))
    assert out[:2].tolist() == [16, 16]
    assert out[2:].isnan().all()
    with pytest.raises(mk.SimulatorError, match=r"\[2, 0\] on rank 0, which nobody has written"):
        simulate(lambda group: on_rank(group, False))


# -- epochs


@triton.jit
def forget_to_finish(context, SIZE: tl.constexpr, FORGETS: tl.constexpr):
    epoch = current_epoch(context)
    notify(segment_of(context, 0, tl.int64), epoch)
    if tl.program_id(0) >= FORGETS:
        finish(context, epoch, SIZE)


@pytest.mark.parametrize("forgets", [0, 1, 2])
def test_a_launch_must_finish_its_epoch(forgets):
    def on_rank(group):
        workspace = group.workspace(OP, 8, 64)
        launch(group, forget_to_finish, grid=2, context=workspace.context, SIZE=1, FORGETS=forgets)

    if forgets:
        message = f"^{OP}: the launch on rank 0 has ended, but its epoch has not: every CTA must call finish"
        with pytest.raises(mk.SimulatorError, match=message):
            simulate(on_rank)
    else:
        simulate(on_rank)


# -- requests to the network


@triton.jit
def ask(context, source, target, size, signal, SIZE: tl.constexpr):
    epoch, rank, segment = current_epoch(context), rank_of(context), tl.load(context + SEGMENT)
    if rank == 0:
        post(context, Transfer(1 - rank, segment, source, segment, target, size), signal, epoch, SEND)
    finish(context, epoch, SIZE)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        (dict(source=0, target=0, size=0, signal=0), None),
        (dict(source=-8), "source [-8, 0) is outside of rank 0's segment"),
        (dict(source=1 << 20), "source [1048576, 1048584) is outside of rank 0's segment"),
        (dict(target=1 << 20), "target [1048576, 1048584) is outside of rank 1's segment"),
        (dict(signal=1 << 20), "signal [1048576, 1048584) is outside of rank 1's segment"),
    ],
)
def test_requests_outside_of_a_segment(numbers, message):
    def on_rank(group):
        workspace = group.workspace(OP, 8, 64)
        start = workspace.data_start
        request = {**dict(source=start, target=start, size=8, signal=0), **numbers}
        launch(group, ask, context=workspace.context, **request, SIZE=2)
        group.quiet()
        group.barrier()

    if message is None:
        simulate(on_rank, nodes=2)
    else:
        posted = rf".*\n  posted by rank 0, CTA 0 of {OP}: .* in post, called from sim/test_memory.py:\d+ in ask"
        with pytest.raises(mk.SimulatorError, match="(?s)a request of rank 0: " + re.escape(message) + posted):
            simulate(on_rank, nodes=2)


# -- addresses that are used again, constants, and what a launch keeps in its workspace


def test_memory_that_was_never_lent_is_not_fresh_when_its_address_is_used_again():
    """A call that is refused has made its result already. What is there next belongs to somebody else."""

    def on_rank(group):
        memory = group.world.scheduler.memory
        tensor = group.world.memory.empty(group.world_rank, (64,), torch.float32)
        start = tensor.untyped_storage().data_ptr()
        assert start in memory._fresh
        del tensor
        return start in memory._fresh

    assert simulate(on_rank) == [False]


@triton.jit
def loop_over_a_constant(x, out):
    while tl.load(x) == 0:
        pass
    tl.store(out, 1)


@pytest.mark.thorough
def test_a_loop_over_what_nobody_changes_is_found():
    with pytest.raises(mk.Deadlock, match="no task can run"):
        run(loop_over_a_constant, inputs=("x",), x=torch.zeros(1), out=torch.zeros(1))


@triton.jit
def send_words(context, source, target, size, signal):
    epoch = current_epoch(context)
    segment = tl.load(context + SEGMENT)
    if rank_of(context) == 0:
        transfer = Transfer(rank_of(context) + 1, segment, source * 8, segment, target * 8, size * 8)
        post(context, transfer, signal * 8, epoch, SEND)
    finish(context, epoch, 2)


@pytest.mark.parametrize(
    ("source", "target", "size", "signal", "wrong"),
    [
        (8, 12, 4, 1, None),
        (7, 12, 4, 1, "the source of a request"),
        (8, 13, 4, 1, "the target of a request"),
        (8, 12, 4, 2, "the signal of a request"),
    ],
)
def test_a_request_stays_in_the_arrays_of_its_launch(source, target, size, signal, wrong):
    def on_rank(group):
        workspace = group.workspace(OP, 8, 1024)
        start = workspace.data_start // 8
        uses = Uses(workspace, [Array("signals", 0, (2,), 8), Array("words", 8 * (start + 8), (8,), 8)])
        workspace.data.zero_()
        arguments = dict(
            context=workspace.context, source=start + source, target=start + target, size=size, signal=signal
        )
        group.launch(Launch(op=OP, group=group, kernel=send_words, grid=1, arguments=arguments, uses=uses))
        group.quiet()
        group.barrier()

    if wrong is None:
        simulate(on_rank, nodes=2)
    else:
        with pytest.raises(mk.SimulatorError, match=rf"{wrong} of \d+ bytes is outside[\s\S]*posted by rank 0, CTA 0"):
            simulate(on_rank, nodes=2)
