"""Memory: as weak as promised, never weaker; and nobody touches what is not theirs."""

import random
from itertools import pairwise

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import example, given, settings
from hypothesis import strategies as st

import mkernel as mk
from mkernel.sim.memory import BUFFERED, DESCRIPTOR, PLAIN, Memory, View

from .harness import launch, run, simulate

SEEDS = range(40)


def numbers_with_room(count: int) -> torch.Tensor:
    """64-bit zeros in the middle of other memory of this test, so that nothing breaks if a check is missing."""
    return torch.from_numpy(np.zeros(count + 32, dtype=np.int64)[16 : 16 + count])


class Bench:
    """Memory of some bytes, and CTAs that look at it."""

    def __init__(self, size: int = 64, seed: int = 0):
        self.bytes = np.zeros(size, dtype=np.uint8)
        self.start = self.bytes.ctypes.data
        self.memory = Memory(random.Random(seed))
        self.memory.allow(self.start, size)

    def addresses(self, places, dtype):
        step = np.dtype(dtype).itemsize
        return np.array([self.start + place * step for place in places], dtype=np.uint64)

    def store(self, view, places, values, dtype=np.int64, mask=None):
        mask = np.ones(len(places), dtype=bool) if mask is None else np.array(mask)
        self.memory.store(view, self.addresses(places, dtype), np.array(values, dtype=dtype), mask)

    def load(self, view, places, dtype=np.int64, path=PLAIN, mask=None):
        mask = np.ones(len(places), dtype=bool) if mask is None else np.array(mask)
        other = np.full((), 9, dtype=dtype)
        dtype = np.dtype(dtype)
        return self.memory.load(view, self.addresses(places, dtype), mask, other, dtype, path).tolist()

    def view(self):
        return View(*[self.memory.writes] * 3)

    def publish(self, view):
        self.memory.barrier(view)
        self.memory.release(view)


# -- stores


def test_a_store_is_seen_by_its_cta_only():
    bench = Bench()
    writer, reader = bench.view(), bench.view()
    bench.store(writer, [0, 1], [5, 6])
    assert bench.load(writer, [0, 1, 2]) == [5, 6, 0]
    assert bench.load(reader, [0, 1, 2]) == [0, 0, 0]
    assert not bench.bytes.any()


def test_barrier_and_release_make_it_seen():
    bench = Bench()
    writer, reader = bench.view(), bench.view()
    bench.store(writer, [0, 1], [5, 6])
    bench.publish(writer)
    bench.memory.acquire(reader)
    assert bench.load(reader, [0, 1]) == [5, 6]


def test_a_release_speaks_only_for_what_is_behind_a_barrier():
    bench = Bench()
    writer, reader = bench.view(), bench.view()
    bench.store(writer, [0], [5])
    bench.memory.release(writer)
    bench.memory.acquire(reader)
    assert bench.load(reader, [0]) == [0], "no barrier"
    bench.memory.barrier(writer)
    bench.store(writer, [1], [6])
    bench.memory.release(writer)
    bench.memory.acquire(reader)
    assert bench.load(reader, [0, 1]) == [5, 0], "the second store came after the barrier"


def test_a_release_speaks_for_stores_through_descriptors_once_they_were_waited_for():
    bench = Bench()
    writer, reader = bench.view(), bench.view()
    bench.memory.store(writer, bench.addresses([0], np.int64), np.array([5]), np.array([True]), DESCRIPTOR)
    bench.publish(writer)
    bench.memory.acquire(reader)
    assert bench.load(reader, [0]) == [0], "on its way"
    bench.memory.complete_descriptor_stores(writer)
    bench.memory.release(writer)
    bench.memory.acquire(reader)
    assert bench.load(reader, [0]) == [0], "no barrier since"
    bench.publish(writer)
    bench.memory.acquire(reader)
    assert bench.load(reader, [0]) == [5]


def test_a_scattered_load_may_touch_several_tensors_and_nothing_between():
    bench = Bench(size=64)
    other = np.zeros(8, dtype=np.int64)
    bench.memory.allow(other.ctypes.data, 64)
    both = np.array([bench.start, other.ctypes.data + 8], dtype=np.uint64)
    zero = np.zeros((), dtype=np.int64)
    assert bench.memory.load(bench.view(), both, np.ones(2, bool), zero, np.dtype(np.int64)).tolist() == [0, 0]
    both[1] += 4096
    with pytest.raises(mk.SimulatorError, match="a load of"):
        bench.memory.load(bench.view(), both, np.ones(2, bool), zero, np.dtype(np.int64))


def test_a_barrier_alone_does_nothing():
    bench = Bench()
    writer = bench.view()
    bench.store(writer, [0], [5])
    bench.memory.barrier(writer)
    assert not bench.bytes.any()


def test_a_release_is_the_cta_s_own():
    bench = Bench()
    writer, other = bench.view(), bench.view()
    bench.store(writer, [0], [5])
    bench.memory.barrier(writer)
    bench.publish(other)
    assert not bench.bytes.any()


def test_the_end_of_a_launch_lets_everything_through():
    bench = Bench()
    writer = bench.view()
    for place in range(5):
        bench.store(writer, [place], [place + 1])
    bench.memory.drain(writer)
    assert bench.bytes.view(np.int64)[:6].tolist() == [1, 2, 3, 4, 5, 0]


def test_old_stores_leave_a_full_buffer():
    bench = Bench(8 * 2 * BUFFERED)
    writer = bench.view()
    for place in range(BUFFERED + 3):
        bench.store(writer, [place], [1])
    assert bench.bytes.view(np.int64).tolist()[:4] == [1, 1, 1, 0]


def test_masked_stores_and_loads():
    bench = Bench()
    writer = bench.view()
    bench.store(writer, [0, 1, 2], [5, 6, 7], mask=[True, False, True])
    assert bench.load(writer, [0, 1, 2], mask=[True, True, False]) == [5, 0, 9]
    bench.store(writer, [0, 1], [1, 1], mask=[False, False])
    bench.memory.drain(writer)
    assert bench.bytes.view(np.int64)[:3].tolist() == [5, 0, 7]


@pytest.mark.parametrize("seed", range(12))
def test_leaks_come_in_pieces_and_lose_nothing(seed):
    bench = Bench(seed=seed)
    writer = bench.view()
    bench.store(writer, range(8), range(1, 9))
    seen = []
    while bench.memory.leak(writer):
        seen.append(tuple(bench.bytes.view(np.int64).tolist()))
        assert bench.load(writer, range(8)) == list(range(1, 9)), "the CTA itself sees all of it"
    assert seen[-1] == tuple(range(1, 9))
    assert all(new in (old, place + 1) for a, b in pairwise(seen) for place, (old, new) in enumerate(zip(a, b)))


def test_some_leak_is_partial():
    def partial(seed):
        bench = Bench(seed=seed)
        writer = bench.view()
        bench.store(writer, range(8), range(1, 9))
        bench.memory.leak(writer)
        return 0 < np.count_nonzero(bench.bytes.view(np.int64)) < 8

    assert any(partial(seed) for seed in SEEDS)


def test_stores_to_different_places_may_overtake():
    def second_first(seed):
        bench = Bench(seed=seed)
        writer = bench.view()
        bench.store(writer, [0], [1])
        bench.store(writer, [1], [1])
        bench.memory.leak(writer)
        return bench.bytes.view(np.int64)[:2].tolist() == [0, 1]

    found = {second_first(seed) for seed in SEEDS}
    assert found == {True, False}


@pytest.mark.parametrize("seed", range(12))
def test_stores_to_one_place_keep_their_order(seed):
    bench = Bench(seed=seed)
    writer = bench.view()
    for value in range(1, 7):
        bench.store(writer, [0, value], [value, value])
    values = [0]
    while bench.memory.leak(writer):
        values.append(int(bench.bytes.view(np.int64)[0]))
    assert values == sorted(values)
    assert values[-1] == 6


def test_an_atomic_pushes_out_earlier_stores_in_their_order():
    """Three stores that overlap like the links of a chain; the atomic is on the last one's end."""
    bench = Bench()
    writer = bench.view()
    bench.store(writer, [0], [1])
    bench.store(writer, [0, 1], [2, 2])
    bench.store(writer, [1, 2], [3, 3])
    bench.memory.commit_stores_to(writer, bench.start + 16, 8)
    bench.memory.drain(writer)
    assert bench.bytes.view(np.int64)[:3].tolist() == [2, 3, 3]


SIZES = st.sampled_from([np.uint8, np.int16, np.int32, np.int64])
STEPS = st.one_of(
    st.tuples(st.just("store"), SIZES, st.integers(0, 3), st.integers(1, 4), st.integers(1, 120)),
    st.tuples(st.just("load"), SIZES, st.integers(0, 3), st.integers(1, 4)),
    st.tuples(st.just("leak")),
    st.tuples(st.just("barrier")),
    st.tuples(st.just("release")),
    st.tuples(st.just("atomic"), st.integers(0, 3)),
)


@settings(max_examples=250, deadline=None)
@given(steps=st.lists(STEPS, max_size=14), seed=st.integers(0, 5))
@example(
    steps=[("store", np.int64, 0, 1, 1), ("store", np.int64, 0, 2, 2), ("store", np.int64, 1, 2, 3), ("atomic", 2)],
    seed=0,
)
def test_a_cta_alone_sees_memory_in_its_own_order(steps, seed):
    """Whatever sizes it stores in and whatever has left its buffer, against plain memory."""
    bench = Bench(64, seed)
    view = bench.view()
    model = np.zeros(64, dtype=np.uint8)
    for name, *numbers in steps:
        if name in ("store", "load"):
            dtype, first, count = numbers[:3]
            places = range(first, first + count)
            plain = model.view(dtype)[first : first + count]
            if name == "store":
                values = np.arange(numbers[3], numbers[3] + count).astype(dtype)
                plain[:] = values
                bench.store(view, places, values, dtype)
            else:
                assert bench.load(view, places, dtype) == plain.tolist()
        elif name == "atomic":
            bench.memory.commit_stores_to(view, bench.start + 8 * numbers[0], 8)
            assert bench.bytes.view(np.int64)[numbers[0]] == model.view(np.int64)[numbers[0]]
        else:
            getattr(bench.memory, name)(view)
    assert bench.load(view, range(64), np.uint8) == model.tolist()
    bench.memory.drain(view)
    assert bench.bytes.tolist() == model.tolist()


# -- loads


def test_a_load_may_be_old_until_the_cta_acquires():
    def look(seed, acquire):
        bench = Bench(seed=seed)
        writer, reader = bench.view(), bench.view()
        bench.store(writer, [0], [5])
        bench.publish(writer)
        if acquire:
            bench.memory.acquire(reader)
        return bench.load(reader, [0])[0]

    assert {look(seed, acquire=False) for seed in SEEDS} == {0, 5}
    assert {look(seed, acquire=True) for seed in SEEDS} == {5}


def test_a_load_is_never_older_than_the_last_acquire():
    found = set()
    for seed in SEEDS:
        bench = Bench(seed=seed)
        writer, reader = bench.view(), bench.view()
        for value in range(1, 7):
            bench.store(writer, [0], [value])
            bench.publish(writer)
            if value == 3:
                bench.memory.acquire(reader)
        found.add(bench.load(reader, [0])[0])
    assert found <= {3, 4, 5, 6}
    assert len(found) > 1


def test_a_load_may_mix_old_and_new():
    def look(seed):
        bench = Bench(seed=seed)
        writer, reader = bench.view(), bench.view()
        for place in range(4):
            bench.store(writer, [place], [1])
            bench.publish(writer)
        return tuple(bench.load(reader, range(4)))

    assert len({look(seed) for seed in SEEDS}) > 4


def test_a_cta_sees_its_own_store_or_something_newer():
    """Also when its store has reached memory, on top of another CTA's that it never acquired."""

    def look(seed):
        bench = Bench(seed=seed)
        other, mine = bench.view(), bench.view()
        bench.store(other, [0], [1])
        bench.publish(other)
        bench.store(mine, [0], [2])
        bench.publish(mine)
        return bench.load(mine, [0])[0]

    assert {look(seed) for seed in SEEDS} == {2}


@pytest.mark.parametrize("size", [np.uint8, np.int16, np.int32])
def test_old_values_are_told_in_every_element_size(size):
    found = set()
    for seed in SEEDS:
        bench = Bench(seed=seed)
        writer, reader = bench.view(), bench.view()
        bench.store(writer, [0], [0x0102030405060708])
        bench.publish(writer)
        found.add(tuple(bench.load(reader, [0, 1], size)))
    assert found == {(0, 0), tuple(np.array([0x0102030405060708]).view(size)[:2].tolist())}


def test_descriptors_need_a_fence_as_well():
    def look(seed, order):
        bench = Bench(seed=seed)
        writer, reader = bench.view(), bench.view()
        bench.store(writer, [0], [5])
        bench.publish(writer)
        for step in order:
            getattr(bench.memory, step)(reader)
        return bench.load(reader, [0], path=DESCRIPTOR)[0]

    def seen(*order):
        return {look(seed, order) for seed in SEEDS}

    assert seen("acquire", "acquire_for_descriptors") == {5}
    assert seen("acquire") == {0, 5}
    assert seen("acquire_for_descriptors") == {0, 5}, "there was nothing acquired that the fence could order"
    assert seen("acquire_for_descriptors", "acquire") == {0, 5}


# -- multicast


class Members:
    """Two members, which are the halves of one memory, and their common address."""

    ADDRESS = 1 << 56

    def __init__(self, seed=0):
        self.bench = Bench(size=64, seed=seed)
        self.memory = self.bench.memory
        self.memory.allow_multicast(self.ADDRESS, 32, [self.bench.start, self.bench.start + 32])

    def store(self, view, value):
        self.memory.store_everywhere(view, np.array([self.ADDRESS]), np.array([value], dtype=np.int64))

    def load(self, view):
        return sorted(part.item() for part in self.memory.load_from_all(view, np.array([self.ADDRESS]), np.dtype("i8")))


def test_a_multicast_store_is_one_to_each_member():
    members = Members()
    writer = members.bench.view()
    members.store(writer, 5)
    members.memory.fence_aliases(writer)
    members.bench.publish(writer)
    assert members.bench.bytes.view(np.int64).tolist() == [5, 0, 0, 0, 5, 0, 0, 0]


def test_a_multicast_store_needs_a_fence_and_then_a_barrier():
    members = Members()
    bench, writer = members.bench, members.bench.view()
    members.store(writer, 5)
    bench.publish(writer)
    assert not bench.bytes.any(), "no fence"
    members.memory.complete_descriptor_stores(writer)
    bench.publish(writer)
    assert not bench.bytes.any(), "not that fence"
    members.memory.fence_aliases(writer)
    members.memory.release(writer)
    assert not bench.bytes.any(), "no barrier since"
    bench.publish(writer)
    assert bench.bytes.any()


def test_a_multicast_load_needs_a_fence_as_well():
    def look(seed, order):
        members = Members(seed)
        writer, reader = members.bench.view(), members.bench.view()
        members.bench.store(writer, [0, 4], [5, 6])
        members.bench.publish(writer)
        for step in order:
            getattr(members.memory, step)(reader)
        return tuple(members.load(reader))

    def seen(*order):
        return {look(seed, order) for seed in SEEDS}

    assert seen("acquire", "fence_aliases") == {(5, 6)}
    assert len(seen("acquire")) > 1
    assert len(seen("fence_aliases")) > 1, "there was nothing acquired that the fence could order"
    assert len(seen("fence_aliases", "acquire")) > 1


def test_a_multicast_load_does_not_see_what_its_cta_has_not_released():
    members = Members()
    cta = members.bench.view()
    members.bench.store(cta, [0, 4], [5, 6])
    members.memory.fence_aliases(cta)
    assert members.load(cta) == [0, 0]
    members.bench.publish(cta)
    members.memory.acquire(cta)
    members.memory.fence_aliases(cta)
    assert members.load(cta) == [5, 6]


# -- bounds


def test_only_allowed_memory_can_be_touched():
    bench = Bench(64)
    view = bench.view()
    for place in (-1, 8, 1000):
        with pytest.raises(mk.SimulatorError, match="a load"):
            bench.load(view, [0, place])
        with pytest.raises(mk.SimulatorError, match="a store"):
            bench.store(view, [0, place], [1, 1])
    with pytest.raises(mk.SimulatorError):
        bench.memory.check(bench.start + 60, bench.start + 68, "a thing")
    assert bench.load(view, [7, 1000], mask=[True, False]) == [0, 9]
    bench.store(view, [7, 1000], [1, 1], mask=[True, False])


def test_memory_that_was_taken_back_can_not_be_touched():
    bench = Bench(64)
    bench.memory.forbid(bench.start)
    with pytest.raises(mk.SimulatorError):
        bench.load(bench.view(), [0])


def test_allowed_memory_may_lie_in_other_allowed_memory():
    bench = Bench(64)
    bench.memory.allow(bench.start + 16, 8)
    assert bench.load(bench.view(), [3, 7]) == [0, 0]
    bench.memory.forbid(bench.start + 16)
    assert bench.load(bench.view(), [2, 7]) == [0, 0]


@triton.jit
def touch(x, place, HOW: tl.constexpr):
    if HOW == "load":
        tl.load(x + place)
    elif HOW == "store":
        tl.store(x + place, 1)
    elif HOW == "add":
        tl.atomic_add(x + place, 1)
    elif HOW == "look":
        tl.atomic_add(x + place, 0)
    elif HOW == "exchange":
        tl.atomic_xchg(x + place, 1)
    else:
        tl.atomic_cas(x + place, 0, 1)


@pytest.mark.parametrize("how", ["load", "store", "add", "look", "exchange", "compare"])
@pytest.mark.parametrize("place", [-1, 4, 9])
def test_a_kernel_can_not_leave_its_tensors(how, place):
    x = numbers_with_room(4)
    with pytest.raises(mk.SimulatorError, match="outside of every tensor"):
        run(touch, x=x, place=place, HOW=how)
    run(touch, x=x, place=3, HOW=how)


@triton.jit
def straddle(x, HOW: tl.constexpr):
    last = (x.to(tl.int64) + 4).to(tl.pointer_type(tl.int64))
    if HOW == "load":
        tl.load(last)
    elif HOW == "store":
        tl.store(last, 1)
    else:
        tl.atomic_add(last, 1)


@pytest.mark.parametrize("how", ["load", "store", "atomic"])
def test_the_last_byte_counts(how):
    """Eight bytes of which four lie outside."""
    with pytest.raises(mk.SimulatorError):
        run(straddle, x=numbers_with_room(1), HOW=how)


@triton.jit
def add_block(x):
    tl.atomic_add(x + tl.arange(0, 8), 1)


def test_every_element_of_a_block_of_atomics_counts():
    with pytest.raises(mk.SimulatorError):
        run(add_block, x=numbers_with_room(4))
    x = torch.zeros(8, dtype=torch.int64)
    run(add_block, x=x)
    assert (x == 1).all()


def test_a_tensor_is_lent_for_one_launch_only():
    x = torch.zeros(4, dtype=torch.int64)

    @triton.jit
    def by_address(address):
        tl.load(address.to(tl.pointer_type(tl.int64)))

    def rank(group):
        launch(group, touch, x=x, place=0, HOW="load")
        launch(group, by_address, address=x.data_ptr())

    with pytest.raises(mk.SimulatorError):
        simulate(rank)


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

    def rank(group):
        out = torch.zeros(2, dtype=torch.int64)
        group.barrier()
        launch(group, read_often, x=x, out=out, times=20 + 60 * group.rank)
        return int(out[0])

    for seed in range(8):
        assert simulate(rank, gpus=2, seed=seed) == [21, 81]


# -- what kernels see of all this


@triton.jit
def message(box, flag, out, BARRIER: tl.constexpr, RELEASE: tl.constexpr, ACQUIRE: tl.constexpr):
    """CTA 0 writes eight numbers and raises the flag, CTA 1 waits for the flag and reads them."""
    place = tl.arange(0, 8)
    if tl.program_id(0) == 0:
        tl.store(box + place, place + 1)
        if BARRIER:
            tl.debug_barrier()
        if RELEASE:
            tl.atomic_xchg(flag, 1, sem="release")
        else:
            tl.atomic_xchg(flag, 1, sem="relaxed")
    else:
        while tl.atomic_add(flag, 0, sem="relaxed") == 0:
            pass
        if ACQUIRE:
            tl.atomic_add(flag, 0, sem="acquire")
        tl.store(out + place, tl.load(box + place))


def messages(barrier, release, acquire):
    found = set()
    for seed in range(20):
        box, flag, out = (torch.zeros(8, dtype=torch.int64) for _ in range(3))
        run(message, grid=2, seed=seed, box=box, flag=flag, out=out, BARRIER=barrier, RELEASE=release, ACQUIRE=acquire)
        assert box.tolist() == list(range(1, 9)), "lost"
        found.add(tuple(out.tolist()))
    return found


def test_the_rule_of_data_first_then_signal():
    right = {tuple(range(1, 9))}
    assert messages(True, True, True) == right
    assert messages(False, True, True) != right, "a missing barrier must show"
    assert messages(True, False, True) != right, "a missing release must show"
    assert messages(True, True, False) != right, "a missing acquire must show"


@triton.jit
def message_by_descriptor(box, tile, flag, out, FENCE: tl.constexpr):
    place = tl.arange(0, 16)
    if tl.program_id(0) == 0:
        tl.store(box + place, place + 1)
        tl.debug_barrier()
        tl.atomic_xchg(flag, 1, sem="release")
    else:
        while tl.atomic_add(flag, 0, sem="acquire") == 0:
            pass
        if FENCE:
            tl.inline_asm_elementwise(
                "fence.proxy.async.global; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
            )
        tl.store(out + place, tile.load([0, 0]).reshape(16))


@pytest.mark.parametrize("fence", [True, False])
def test_the_rule_of_the_fence(fence):
    from mkernel.runtime.operands import descriptor

    found = set()
    for seed in range(20):
        box, flag, out = torch.zeros(16), torch.zeros(1, dtype=torch.int64), torch.zeros(16)
        tile = descriptor(box, [1, 16], [16, 1], [1, 16])
        run(message_by_descriptor, grid=2, seed=seed, box=box, tile=tile, flag=flag, out=out, FENCE=fence)
        found.add(tuple(out.tolist()))
    right = {tuple(float(i) for i in range(1, 17))}
    assert found == right if fence else found > right
