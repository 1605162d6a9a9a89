"""Races: each rule of synchronisation, kept and broken. What is kept passes in every schedule; what is broken is an
error in every schedule, not only in those that show a wrong value."""

import pytest
import torch
import triton
import triton.language as tl

import mkernel as mk
from mkernel.lang.context import SEGMENT, current_epoch, rank_of, segment_of
from mkernel.lang.device import acquire_for_descriptors, complete_descriptor_stores
from mkernel.lang.hints import waited_for
from mkernel.lang.partials import load_partial, store_partial
from mkernel.lang.requests import Transfer, post, wait_sent
from mkernel.lang.roles import COMPUTE, INTRA, SEND
from mkernel.lang.signals import ARRIVED, ENTERED, finish, notify, notify_each, wait, wait_all, wait_peers
from mkernel.ops.reduce.all_reduce.multimem import everywhere, fence_aliases, load_sum, store_everywhere
from mkernel.runtime.operands import descriptor
from mkernel.runtime.world import Launch

from .harness import OP, launch, simulate

SCHEDULES = [{"seed": seed} for seed in range(10)]
SCHEDULES += [{"schedule": name} for name in ("in-order", "reversed", "alternating")]


def passes(on_rank, **cluster):
    for schedule in SCHEDULES:
        simulate(on_rank, **cluster, **schedule)


def races(on_rank, error=mk.RaceError, match=None, **cluster):
    """In every schedule. Returns the messages."""
    messages = []
    for schedule in SCHEDULES:
        with pytest.raises(error, match=match) as caught:
            simulate(on_rank, **cluster, **schedule)
        messages.append(str(caught.value))
    return messages


def kept_or_broken(on_rank, missing, **cluster):
    """on_rank(group, missing) with nothing missing, and with something."""
    if missing:
        races(lambda group: on_rank(group, missing), **cluster)
    else:
        passes(lambda group: on_rank(group, ""), **cluster)


def words(count=1):
    return torch.zeros(count, dtype=torch.int64)


# -- CTAs of a rank


@triton.jit
def touch(box, out, HOW: tl.constexpr):
    place = tl.arange(0, 8)
    if HOW == "store":
        tl.store(box + place, place + tl.program_id(0))
    else:
        tl.store(out + place + 8 * tl.program_id(0), tl.load(box + place))


@triton.jit
def message(box, flag, out, FIRST: tl.constexpr, SECOND: tl.constexpr, MISSING: tl.constexpr):
    if tl.program_id(0) == 0:
        touch(box, out, FIRST)
        if MISSING != "barrier":
            tl.debug_barrier()
        tl.atomic_xchg(flag, 1, sem="relaxed" if MISSING == "release" else "release")
        if MISSING == "order":
            touch(box, out, FIRST)
    else:
        if MISSING != "wait":
            while tl.atomic_add(flag, 0, sem="relaxed" if MISSING == "acquire" else "acquire") == 0:
                pass
        touch(box, out, SECOND)


@pytest.mark.parametrize("missing", ["", "barrier", "release", "acquire", "wait", "order"])
@pytest.mark.parametrize(("first", "second"), [("store", "load"), ("store", "store"), ("load", "store")])
def test_two_ctas(first, second, missing):
    def on_rank(group, missing):
        launch(
            group,
            message,
            grid=2,
            box=words(8),
            flag=words(),
            out=words(16),
            FIRST=first,
            SECOND=second,
            MISSING=missing,
        )

    kept_or_broken(on_rank, missing)


def test_loads_do_not_race():
    def on_rank(group):
        launch(
            group,
            message,
            grid=2,
            box=words(8),
            flag=words(),
            out=words(16),
            FIRST="load",
            SECOND="load",
            MISSING="wait",
        )

    passes(on_rank)


@triton.jit
def chain(box, flags, out, FIRST: tl.constexpr, SECOND: tl.constexpr):
    """CTA 0 tells CTA 1, which touches nothing but tells CTA 2."""
    cta = tl.program_id(0)
    if cta == 0:
        tl.store(box, 7)
        tl.debug_barrier()
        tl.atomic_xchg(flags, 1, sem="release")
    elif cta == 1:
        while tl.atomic_add(flags, 0, sem=FIRST) == 0:
            pass
        tl.atomic_xchg(flags + 1, 1, sem=SECOND)
    else:
        while tl.atomic_add(flags + 1, 0, sem="acquire") == 0:
            pass
        tl.store(out, tl.load(box))


@pytest.mark.parametrize("missing", ["", "acquire", "release"])
def test_order_is_transitive(missing):
    def on_rank(group, missing):
        sems = {
            name.upper(): "relaxed" if missing == sem else sem
            for name, sem in (("first", "acquire"), ("second", "release"))
        }
        launch(group, chain, grid=3, box=words(), flags=words(2), out=words(), **sems)

    kept_or_broken(on_rank, missing)


@triton.jit
def last_one_adds(parts, counter, out, SEM: tl.constexpr, RESET: tl.constexpr):
    cta, ctas = tl.program_id(0), tl.num_programs(0)
    tl.store(parts + cta, cta + 1)
    tl.debug_barrier()
    if tl.atomic_add(counter, 1, sem=SEM) == ctas - 1:
        tl.store(out, tl.sum(tl.load(parts + tl.arange(0, 4))))
        if RESET:
            tl.store(counter, 0)


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("sem", ["acq_rel", "acquire", "release", "relaxed"])
def test_the_last_one_to_arrive(sem, reset):
    def on_rank(group):
        counter, out = words(), words()
        for _ in range(2 if reset else 1):
            launch(group, last_one_adds, grid=4, parts=words(4), counter=counter, out=out, SEM=sem, RESET=reset)
            assert out.item() == 10

    if sem == "acq_rel":
        passes(on_rank)
    else:
        races(on_rank)


@triton.jit
def plain_flag(box, flag, out):
    if tl.program_id(0) == 0:
        tl.store(box, 7)
        tl.store(flag, 1)
    else:
        while tl.load(flag) == 0:
            pass
        tl.store(out, tl.load(box))


def test_a_flag_that_is_stored_and_polled_plainly():
    races(lambda group: launch(group, plain_flag, grid=2, box=words(), flag=words(), out=words()))


@triton.jit
def two_accesses(x, out, FIRST: tl.constexpr, SECOND: tl.constexpr):
    if tl.program_id(0) == 0:
        access(x, out, FIRST)
    else:
        access(x, out, SECOND)


@triton.jit
def access(x, out, HOW: tl.constexpr):
    if HOW == "load":
        tl.store(out + tl.program_id(0), tl.load(x))
    elif HOW == "store":
        tl.store(x, 1)
    elif HOW == "volatile":
        tl.store(out + tl.program_id(0), tl.load(x, volatile=True))
    elif HOW == "poll":
        tl.atomic_add(x, 0, sem="relaxed")
    else:
        tl.atomic_add(x, 1, sem="relaxed")


ACCESSES = ["load", "store", "volatile", "poll", "add"]
CONFLICTS = {
    frozenset(pair)
    for pair in [
        ("store", "load"),
        ("store",),
        ("store", "volatile"),
        ("store", "poll"),
        ("store", "add"),
        ("add", "load"),
    ]
}


@pytest.mark.parametrize("second", ACCESSES)
@pytest.mark.parametrize("first", ACCESSES)
def test_atomics_against_plain_accesses(first, second):
    """Two accesses conflict if one of them stores, unless both are atomic."""

    def on_rank(group):
        launch(group, two_accesses, grid=2, x=words(), out=words(2), FIRST=first, SECOND=second)

    if frozenset((first, second)) in CONFLICTS:
        races(on_rank)
    else:
        passes(on_rank)


# -- which bytes


@triton.jit
def two_blocks(x, a, b, ONE: tl.constexpr, OTHER: tl.constexpr):
    """CTA 0 stores elements of one type, CTA 1 of another: (first byte, bytes from one to the next, how many)."""
    if tl.program_id(0) == 0:
        store_block(x, a, ONE)
    else:
        store_block(x, b, OTHER)


@triton.jit
def store_block(x, block, DTYPE: tl.constexpr):
    i = tl.arange(0, 8)
    address = x.to(tl.int64) + block[0] + i * block[1]
    tl.store(address.to(tl.pointer_type(DTYPE)), tl.zeros((8,), DTYPE), mask=i < block[2])


I8, I16, I32, I64, BF16 = tl.int8, tl.int16, tl.int32, tl.int64, tl.bfloat16


@pytest.mark.parametrize(
    ("one", "a", "other", "b", "meet"),
    [
        (I64, (0, 8, 4), I64, (32, 8, 4), False),  # neighbours
        (I64, (0, 8, 5), I64, (32, 8, 4), True),
        (I64, (0, 16, 4), I64, (8, 16, 4), False),  # interleaved
        (I64, (0, 16, 4), I64, (8, 24, 3), True),
        (I64, (0, 8, 1), I8, (7, 1, 1), True),  # other sizes
        (I64, (0, 8, 1), I8, (8, 1, 1), False),
        (I8, (7, 1, 1), I64, (0, 8, 1), True),
        (I8, (3, 2, 8), I8, (4, 2, 8), False),  # odd addresses
        (I8, (3, 2, 8), I8, (4, 1, 2), True),
        (BF16, (2, 4, 8), I32, (0, 4, 2), True),
        (BF16, (2, 4, 8), I16, (0, 4, 8), False),
        (BF16, (8, 2, 4), I32, (0, 4, 2), False),
        (I32, (4, 8, 4), I64, (0, 8, 1), True),
        (I32, (4, 8, 4), I32, (0, 8, 4), False),
    ],
)
def test_blocks_race_where_they_meet(one, a, other, b, meet):
    def on_rank(group):
        launch(group, two_blocks, grid=2, x=words(16), a=a, b=b, ONE=one, OTHER=other)

    (races if meet else passes)(on_rank)


@triton.jit
def many_loads(x, out, victim, COUNT: tl.constexpr):
    if tl.program_id(0) == 0:
        total = tl.load(x)
        for i in range(COUNT):
            total += tl.load(x + i % 8)
        tl.store(out, total)
    else:
        tl.store((x.to(tl.int64) + victim).to(tl.pointer_type(tl.int8)), 1)


@pytest.mark.parametrize(("victim", "meet"), [(9, True), (63, True), (64, False)])
def test_many_loads_and_then_a_store_of_one_byte(victim, meet):
    (races if meet else passes)(
        lambda group: launch(group, many_loads, grid=2, x=words(16), out=words(), victim=victim, COUNT=600)
    )


@triton.jit
def atomic_between(x, out, PLACE: tl.constexpr):
    if tl.program_id(0) == 0:
        tl.store(out + tl.arange(0, 4), tl.load(x + 2 * tl.arange(0, 4)))
    else:
        tl.atomic_add(x + PLACE, 1, sem="relaxed")


@pytest.mark.parametrize("place", [3, 4])
def test_an_atomic_between_the_elements_of_a_load(place):
    (passes if place % 2 else races)(
        lambda group: launch(group, atomic_between, grid=2, x=words(8), out=words(4), PLACE=place)
    )


@triton.jit
def half_a_word(x, out):
    if tl.program_id(0) == 0:
        tl.store(out, tl.load((x.to(tl.int64) + 4).to(tl.pointer_type(tl.int32))))
    else:
        tl.atomic_add(x, 1, sem="relaxed")


def test_an_atomic_and_a_load_of_its_upper_half():
    races(lambda group: launch(group, half_a_word, grid=2, x=words(), out=words()))


# -- other paths to memory


@triton.jit
def by_descriptor(tile, box, flag, out, STORE: tl.constexpr, MISSING: tl.constexpr):
    place = tl.arange(0, 16)
    if tl.program_id(0) == 0:
        if STORE:
            tile.store([0, 0], (place + 1.0).reshape(1, 16))
            if MISSING == "late barrier":
                tl.debug_barrier()
            if MISSING != "complete":
                complete_descriptor_stores()
        else:
            tl.store(box + place, place + 1.0)
        if MISSING != "late barrier":
            tl.debug_barrier()
        tl.atomic_xchg(flag, 1, sem="release")
    else:
        if MISSING == "early fence":
            acquire_for_descriptors()
        while tl.atomic_add(flag, 0, sem="acquire") == 0:
            pass
        if STORE:
            tl.store(out + place, tl.load(box + place))
        else:
            if MISSING != "fence" and MISSING != "early fence":
                acquire_for_descriptors()
            tl.store(out + place, tile.load([0, 0]).reshape(16))


@pytest.mark.parametrize(
    ("store", "missing"),
    [(True, ""), (True, "complete"), (True, "late barrier"), (False, ""), (False, "fence"), (False, "early fence")],
)
def test_descriptors(store, missing):
    def on_rank(group, missing):
        box, out = torch.zeros(16), torch.zeros(16)
        tile = descriptor(box, [1, 16], [16, 1], [1, 16])
        launch(group, by_descriptor, grid=2, tile=tile, box=box, flag=words(), out=out, STORE=store, MISSING=missing)
        assert out.tolist() == [i + 1.0 for i in range(16)]

    kept_or_broken(on_rank, missing)


def test_a_fence_that_is_missing_is_named():
    def on_rank(group, store, missing):
        box = torch.zeros(16)
        tile = descriptor(box, [1, 16], [16, 1], [1, 16])
        launch(
            group,
            by_descriptor,
            grid=2,
            tile=tile,
            box=box,
            flag=words(),
            out=torch.zeros(16),
            STORE=store,
            MISSING=missing,
        )

    for message in races(lambda group: on_rank(group, False, "fence")):
        assert "through tensor descriptors need acquire_for_descriptors() after the wait" in message
    for message in races(lambda group: on_rank(group, True, "complete")):
        assert "complete_descriptor_stores() and a barrier must come between the access and that" in message


def workspace_of(group):
    return group.workspace(OP, 16, 4096)


def with_context(group, kernel, grid=1, uses=None, **arguments):
    workspace = workspace_of(group)
    arguments = dict(context=workspace.context, **arguments)
    group.launch(Launch(op=OP, group=group, kernel=kernel, grid=grid, arguments=arguments, uses=uses))


@triton.jit
def hand_out(context, start, out, MISSING: tl.constexpr, SIZE: tl.constexpr):
    """Rank 0 stores a tile on all ranks; each of them reads its own."""
    epoch, rank = current_epoch(context), rank_of(context)
    tile = tl.zeros((16, 16), tl.float32) + 3
    if rank == 0:
        store_everywhere(everywhere(context, start, tl.float32), tile, 16, 16)
        if MISSING != "fence":
            fence_aliases()
        for peer in range(SIZE):
            notify(segment_of(context, peer, tl.int64), epoch)
    wait(context, segment_of(context, rank, tl.int64), epoch, COMPUTE, ARRIVED, 0, 0)
    slot = (segment_of(context, rank, tl.int8) + start).to(tl.pointer_type(tl.float32))
    tl.store(out, tl.sum(load_partial(slot, 16, 16)))
    finish(context, epoch, SIZE)


@triton.jit
def add_up(context, start, out, MISSING: tl.constexpr, SIZE: tl.constexpr):
    """Every rank stores a tile at home; rank 0 has the switch add them."""
    epoch, rank = current_epoch(context), rank_of(context)
    slot = (segment_of(context, rank, tl.int8) + start).to(tl.pointer_type(tl.float32))
    tile = tl.zeros((16, 16), tl.float32) + 3
    store_partial(slot, tile, 16, 16)
    notify(segment_of(context, 0, tl.int64) + rank, epoch)
    if rank == 0:
        peers = tl.arange(0, 2)
        if MISSING != "wait":
            wait_peers(
                context, segment_of(context, 0, tl.int64) + peers, peers < SIZE, epoch, COMPUTE, ARRIVED, peers, 0
            )
        everything = load_sum(everywhere(context, start, tl.float32), tile, 16, 16)
        tl.store(out, tl.sum(everything))
    finish(context, epoch, SIZE)


@pytest.mark.parametrize(("kernel", "missing"), [(hand_out, ""), (hand_out, "fence"), (add_up, ""), (add_up, "wait")])
def test_multicast(kernel, missing):
    def on_rank(group, missing):
        out, workspace = torch.zeros(1), workspace_of(group)
        with_context(group, kernel, start=workspace.data_start, out=out, MISSING=missing, SIZE=group.size)
        group.barrier()
        assert (kernel is add_up and group.rank) or out.item() == 256 * (3 if kernel is hand_out else 6)

    if missing == "wait":  # where it comes first, nobody has written it
        races(
            lambda group: on_rank(group, missing),
            mk.SimulatorError,
            "race on|nobody has written",
            gpus=2,
            multicast=True,
        )
    else:
        kept_or_broken(on_rank, missing, gpus=2, multicast=True)


def test_a_multicast_load_needs_its_fence(monkeypatch):
    """`load_sum` has it."""
    import mkernel.ops.reduce.all_reduce.multimem as module

    @triton.jit
    def no_fence():
        return 0

    def on_rank(group):
        workspace = workspace_of(group)
        with_context(group, add_up, start=workspace.data_start, out=torch.zeros(1), MISSING="", SIZE=group.size)

    monkeypatch.setattr(module, "fence_aliases", no_fence)
    for message in races(on_rank, gpus=2, multicast=True):
        assert "fence_aliases()" in message


# -- ranks of a node


@triton.jit
def shift(context, x, out, start, half, SIZE: tl.constexpr, MISSING: tl.constexpr):
    """Every rank gives x to its right neighbour. Words: who has entered, then what has arrived in each half."""
    epoch, rank, place = current_epoch(context), rank_of(context), tl.arange(0, 8)
    left, right = (rank + SIZE - 1) % SIZE, (rank + 1) % SIZE
    parity = (epoch % 2).to(tl.int32)
    if MISSING == "second half":
        parity = parity * 0
    mine, theirs = segment_of(context, rank, tl.int64), segment_of(context, right, tl.int64)
    notify(segment_of(context, left, tl.int64), epoch)
    if MISSING != "entry":
        wait(context, mine, epoch - 1, INTRA, ENTERED, right, 0)
    if MISSING == "order":
        notify(theirs + 1 + parity, epoch)
    tl.store(theirs + start + parity * half + place, tl.load(x + place))
    if MISSING == "barrier":
        tl.atomic_xchg(theirs + 1 + parity, epoch, sem="release", scope="sys")
    elif MISSING == "release":
        tl.debug_barrier()
        tl.atomic_xchg(theirs + 1 + parity, epoch, sem="relaxed", scope="sys")
    elif MISSING != "order":
        notify(theirs + 1 + parity, epoch)
    if MISSING == "epoch":
        wait(context, mine + 1 + parity, epoch - 2, COMPUTE, ARRIVED, left, 0)
    elif MISSING == "acquire":
        while tl.atomic_add(mine + 1 + parity, 0, sem="relaxed", scope="sys") < epoch:
            pass
        waited_for(mine + 1 + parity, True, epoch)
    elif MISSING != "wait":
        wait(context, mine + 1 + parity, epoch, COMPUTE, ARRIVED, left, 0)
    tl.store(out + place, tl.load(mine + start + parity * half + place))
    finish(context, epoch, SIZE)


def shifts(group, missing, calls=5):
    workspace = workspace_of(group)
    for call in range(calls):
        x, out = torch.arange(8) + 100 * group.rank + call, words(8)
        places = dict(start=workspace.data_start // 8, half=workspace.half_bytes // 8)
        with_context(group, shift, x=x, out=out, **places, SIZE=group.size, MISSING=missing)
        assert torch.equal(out, torch.arange(8) + 100 * ((group.rank - 1) % group.size) + call)


@pytest.mark.parametrize("missing", ["", "barrier", "release", "acquire", "entry", "second half"])
def test_ranks_of_a_node(missing):
    kept_or_broken(shifts, missing, gpus=3)


@pytest.mark.parametrize("missing", ["wait", "epoch", "order"])
def test_a_reader_that_may_come_first(missing):
    """Then nobody has written what it loads, which is told instead."""
    races(lambda group: shifts(group, missing), mk.SimulatorError, "race on|nobody has written", gpus=3)


@triton.jit
def early_acquire(context, x, start, out, SEM: tl.constexpr, SIZE: tl.constexpr):
    """Rank 1 acquires the signal before rank 0 is allowed to set it, and then polls it."""
    epoch, rank = current_epoch(context), rank_of(context)
    signal, data = segment_of(context, 0, tl.int64), segment_of(context, 0, tl.int64) + start
    if rank == 0:
        wait(context, signal + 1, epoch, COMPUTE, ENTERED, 1, 0)
        tl.store(data, tl.load(x))
        notify(signal, epoch)
    else:
        tl.atomic_add(signal, 0, sem="acquire", scope="sys")
        notify(signal + 1, epoch)
        while tl.atomic_add(signal, 0, sem=SEM, scope="sys") < epoch:
            pass
        waited_for(signal, True, epoch)
        tl.store(out, tl.load(data))
    finish(context, epoch, SIZE)


@pytest.mark.parametrize("sem", ["acquire", "relaxed"])
def test_an_acquire_before_the_signal_was_set(sem):
    def on_rank(group):
        start = workspace_of(group).data_start // 8
        with_context(group, early_acquire, x=words() + 7, start=start, out=words(), SEM=sem, SIZE=group.size)

    if sem == "acquire":
        passes(on_rank, gpus=2)
    else:
        for message in races(on_rank, gpus=2):
            assert "with an operation that does not acquire" in message


@triton.jit
def wrong_epoch(context, x, start, out, BACK: tl.constexpr, SIZE: tl.constexpr):
    """Rank 0 writes, and says so at the end; both ranks know that the epochs before are complete."""
    epoch, rank = current_epoch(context), rank_of(context)
    signal, data = segment_of(context, 0, tl.int64), segment_of(context, 0, tl.int64) + start
    if rank == 0:
        wait(context, signal + 1, epoch - 1, COMPUTE, ENTERED, 1, 0)
        tl.store(data, tl.load(x))
        notify(signal, epoch)
    else:
        wait(context, signal, epoch - BACK, COMPUTE, ARRIVED, 0, 0)
        tl.store(out, tl.load(data))
        notify(signal + 1, epoch)
    finish(context, epoch, SIZE)


@pytest.mark.parametrize("back", [0, 1])
def test_a_wait_for_the_epoch_before(back):
    """Also where the signal had gone further by chance. Before each launch all ranks meet."""

    def on_rank(group):
        for _ in range(2):
            group.barrier()
            arguments = dict(x=words(), start=workspace_of(group).data_start // 8, out=words())
            with_context(group, wrong_epoch, **arguments, BACK=back, SIZE=group.size)

    if back:
        races(on_rank, mk.SimulatorError, "race on|nobody has written", gpus=2)
    else:
        passes(on_rank, gpus=2)


def test_a_wait_for_the_epoch_before_is_told():
    def on_rank(group):
        arguments = dict(x=words(), start=workspace_of(group).data_start // 8, out=words())
        with_context(group, wrong_epoch, **arguments, BACK=0, SIZE=group.size)
        group.barrier()
        with_context(group, wrong_epoch, **arguments, BACK=1, SIZE=group.size)

    messages = races(on_rank, gpus=2)
    late = [message for message in messages if "rank 1, CTA 0 of all_gather_matmul loads it" in message]
    assert late
    signal = "word 0 of the signals of all_gather_matmul on rank 0"
    told = f"then set {signal} to 2 (sim/test_races.py:"
    for message in late:  # rank 0 may have signalled by then, or not yet
        assert "has only waited until it was 1 (sim/test_races.py:" in message
        assert told in message or f"had set {signal} to 1 (sim/test_races.py:" in message
    assert any(told in message for message in late)


@triton.jit
def all_to_one(context, start, out, SIZE: tl.constexpr, MISSING: tl.constexpr):
    """CTAs of a rank write; CTA 0 waits for all of them."""
    epoch, rank, cta = current_epoch(context), rank_of(context), tl.program_id(0)
    mine, ctas = segment_of(context, rank, tl.int64), tl.arange(0, 4)
    tl.store(out + 8 + cta, cta)
    notify_each(mine + cta + tl.arange(0, 1), epoch, tl.arange(0, 1) == 0)
    if cta == 0:
        if MISSING == "barrier":
            while tl.min(tl.atomic_add(mine + ctas, 0, sem="acquire", scope="gpu")) < epoch:
                pass
            waited_for(mine + ctas, ctas < 4, epoch)
        else:
            wait_all(context, mine + ctas, ctas < 4, epoch, COMPUTE, ARRIVED, rank, 0)
        tl.store(out + ctas, tl.load(out + 8 + ctas))
    finish(context, epoch, SIZE)


@pytest.mark.parametrize("missing", ["", "barrier"])
def test_a_wait_for_many_signals(missing):
    kept_or_broken(
        lambda group, missing: with_context(group, all_to_one, grid=4, start=0, out=words(16), SIZE=1, MISSING=missing),
        missing,
    )


# -- the network


@triton.jit
def send(context, start, half, out, SIZE: tl.constexpr, MISSING: tl.constexpr):
    """Rank 0 sends 64 bytes of its first half to that of rank 1, which reads them."""
    epoch, rank, place = current_epoch(context), rank_of(context), tl.arange(0, 8)
    segment = tl.load(context + SEGMENT)
    mine = segment_of(context, rank, tl.int64)
    if rank == 0:
        tl.store(mine + start + place, place)
        ticket = post(context, Transfer(1 - rank, segment, start * 8, segment, start * 8, 64), 0, epoch, SEND)
        if MISSING == "order":
            post(context, Transfer(1 - rank, segment, start * 8, segment, start * 8, 64), 8, epoch, SEND)
        if MISSING != "sent":
            wait_sent(context, ticket, SEND)
        if MISSING != "order":
            tl.store(mine + start + place, place + 1)
    else:
        if MISSING != "wait":
            wait(context, mine, epoch, COMPUTE, ARRIVED, 0, 0)
        tl.store(out + place, tl.load(mine + start + place))
    finish(context, epoch, SIZE)


@pytest.mark.parametrize("missing", ["", "sent", "wait", "order"])
def test_the_network(missing):
    def on_rank(group, missing):
        workspace = workspace_of(group)
        places = dict(start=workspace.data_start // 8, half=workspace.half_bytes // 8)
        with_context(group, send, **places, out=words(8), SIZE=group.size, MISSING=missing)

    if missing == "wait":
        races(lambda group: on_rank(group, missing), mk.SimulatorError, "race on|nobody has written", nodes=2)
    else:
        kept_or_broken(on_rank, missing, nodes=2)


@triton.jit
def send_many(context, start, out, COUNT: tl.constexpr, SIZE: tl.constexpr):
    """Each CTA of rank 0 sends words of its own, each to a place of its own; more than are in flight at a time."""
    epoch, rank, cta = current_epoch(context), rank_of(context), tl.program_id(0)
    segment = tl.load(context + SEGMENT)
    mine = segment_of(context, rank, tl.int64)
    for i in range(COUNT):
        index = start + cta * COUNT + i
        if rank == 0:
            tl.store(mine + index, index)
            post(
                context,
                Transfer(1 - rank, segment, index * 8, segment, index * 8, 8),
                8 * (cta * COUNT + i),
                epoch,
                SEND,
            )
        else:
            wait(context, mine + cta * COUNT + i, epoch, COMPUTE, ARRIVED, 0, 0)
            tl.store(out + cta * COUNT + i, tl.load(mine + index))
    finish(context, epoch, SIZE)


@pytest.mark.parametrize("schedule", ["newest-first", "oldest-first", "in-order", "random:1"])
def test_many_requests_of_several_ctas(schedule):
    """However long the first one is on its way."""

    def on_rank(group):
        workspace = group.workspace(OP, 128, 4096)
        out = words(96)
        for _ in range(2):
            arguments = dict(
                context=workspace.context, start=workspace.data_start // 8, out=out, COUNT=48, SIZE=group.size
            )
            group.launch(Launch(op=OP, group=group, kernel=send_many, grid=2, arguments=arguments))
            group.barrier()
        if group.rank:
            assert torch.equal(out, workspace.data_start // 8 + torch.arange(96))

    simulate(on_rank, nodes=2, schedule=schedule)


# -- Python code, streams, memory that comes and goes


@triton.jit
def read_from_zero(context, address, x, out, SIZE: tl.constexpr, MISSING: tl.constexpr):
    epoch, signal = current_epoch(context), segment_of(context, 0, tl.int64)
    if rank_of(context) == 1:
        tl.store(out, tl.load(address.to(tl.pointer_type(tl.float32))))
        notify(signal, epoch)
    elif MISSING != "wait":
        wait(context, signal, epoch, COMPUTE, ARRIVED, 1, 0)
    finish(context, epoch, SIZE)


@triton.jit
def fill(x, value):
    tl.store(x + tl.arange(0, 8), value)


@pytest.mark.parametrize("missing", ["", "wait"])
def test_python_code_may_use_a_tensor_when_its_call_has_returned(missing):
    """Rank 1 reads rank 0's tensor, which rank 0 may change as soon as its own call is over."""

    def on_rank(group, missing):
        x = group.empty(8, dtype=torch.float32)
        address = group.exchange("addresses", x.data_ptr())[0]
        with_context(group, read_from_zero, address=address, x=x, out=torch.zeros(1), SIZE=2, MISSING=missing)
        x.fill_(1)
        group.barrier()

    kept_or_broken(on_rank, missing, gpus=2)


@pytest.mark.parametrize("missing", ["", "synchronize"])
def test_streams_of_a_rank(missing):
    def on_rank(group, missing):
        x = group.empty(8, dtype=torch.float32)
        for stream in ("one", "two"):
            with group.world.stream(group.world_rank, stream):
                launch(group, fill, x=x, value=1.0)
            if not missing:
                group.synchronize()
        group.synchronize()

    kept_or_broken(on_rank, missing)


def test_launches_of_a_stream_are_ordered():
    def on_rank(group):
        x = group.empty(8, dtype=torch.float32)
        with group.world.stream(group.world_rank, "side"):
            for value in range(3):
                launch(group, fill, x=x, value=float(value))
        group.synchronize()

    passes(on_rank)


def test_memory_that_is_allocated_again_has_no_history():
    """At the same address, by another rank's kernel, with nothing that orders the two."""

    def on_rank(group):
        seen = set()
        for _ in range(6):
            x = group.empty(1 << 16, dtype=torch.float32)
            seen.add(x.data_ptr())
            with group.world.stream(group.world_rank, len(seen)):
                launch(group, fill, x=x, value=1.0)
            group.synchronize()
            del x
            group.barrier()
        return len(seen)

    passes(on_rank, gpus=2)


def test_a_group_that_gave_up_says_so():
    """The one that waited reads what never came: that is no race."""

    def on_rank(group):
        if group.rank == 0:
            shifts(group, "", calls=1)

    for schedule in SCHEDULES:
        with pytest.raises(mk.CommTimeout):
            simulate(on_rank, gpus=2, timeout=2e-4, **schedule)


def test_races_are_not_looked_for_when_told_so():
    def on_rank(group):
        launch(
            group,
            message,
            grid=2,
            box=words(8),
            flag=words(),
            out=words(16),
            FIRST="store",
            SECOND="load",
            MISSING="wait",
        )

    for seed in range(3):
        simulate(on_rank, seed=seed, races=False)


# -- what is said


def test_a_message_names_both_lines_and_who_ran_them():
    def on_rank(group):
        launch(
            group,
            message,
            grid=2,
            box=words(8),
            flag=words(),
            out=words(16),
            FIRST="store",
            SECOND="load",
            MISSING="release",
        )

    lines = {name: number for number, name in _lines(touch)}
    for message_ in races(on_rank):
        assert message_.startswith("race on box[0] on rank 0\n")
        assert f"sim/test_races.py:{lines['store']} in touch, called from sim/test_races.py:" in message_
        assert f"sim/test_races.py:{lines['load']} in touch, called from sim/test_races.py:" in message_
        assert "rank 0, CTA 0 of all_gather_matmul stored to it before, and nothing orders the two" in message_
        assert "rank 0, CTA 0 of all_gather_matmul then changed flag[0] on rank 0 (sim/test_races.py:" in message_
        assert "not by a release" in message_


def _lines(kernel):
    first = kernel.starting_line_number
    for number, line in enumerate(kernel.raw_src, first):
        if "tl.store(box" in line:
            yield number, "store"
        if "tl.load(box" in line:
            yield number, "load"


# -- scopes


@triton.jit
def signal_with(context, flag, WHO: tl.constexpr, SENDS: tl.constexpr, WAITS: tl.constexpr):
    epoch = current_epoch(context)
    rank = rank_of(context)
    if WHO == "cta":
        if tl.program_id(0) == 0:
            tl.atomic_xchg(flag, 1, sem="release", scope=SENDS)
        else:
            while tl.atomic_add(flag, 0, sem="acquire", scope=WAITS) == 0:
                pass
    elif WHO == "peer":
        if rank == 0:
            tl.atomic_xchg(segment_of(context, 1, tl.int64), epoch, sem="release", scope=SENDS)
        else:
            while tl.atomic_add(segment_of(context, 1, tl.int64), 0, sem="acquire", scope=WAITS) < epoch:
                pass
    else:
        segment = tl.load(context + SEGMENT)
        if rank == 0:
            post(context, Transfer(rank + 1, segment, 0, segment, 0, 0), 0, epoch, SEND)
        else:
            while tl.atomic_add(segment_of(context, 1, tl.int64), 0, sem="acquire", scope=WAITS) < epoch:
                pass
    finish(context, epoch, 2)


@pytest.mark.parametrize("sends", ["gpu", "sys"])
@pytest.mark.parametrize("waits", ["gpu", "sys"])
@pytest.mark.parametrize("who", ["cta", "peer", "network"])
def test_scopes(who, sends, waits):
    nodes, gpus = (2, 1) if who == "network" else (1, 2)

    def on_rank(group):
        workspace = group.workspace(OP, 1, 16)
        flag = words()
        arguments = dict(context=workspace.context, flag=flag, WHO=who, SENDS=sends, WAITS=waits)
        group.launch(Launch(op=OP, group=group, kernel=signal_with, grid=2 if who == "cta" else 1, arguments=arguments))

    enough = who == "cta" or (waits == "sys" and (who == "network" or sends == "sys"))
    if enough:
        passes(on_rank, nodes=nodes, gpus=gpus)
    else:
        races(on_rank, match="need scope='sys'", nodes=nodes, gpus=gpus)
