"""Requests: the ring's layout, its turns, and what happens when it is full."""

import pytest
import torch
import triton
import triton.language as tl

import mkernel as mk
from mkernel.lang import context as words
from mkernel.lang import requests as layout
from mkernel.lang.context import SEGMENT, rank_of, segment_of
from mkernel.lang.requests import Transfer, post, wait_sent
from mkernel.lang.roles import COMPUTE, SEND
from mkernel.lang.signals import ARRIVED, wait

from .harness import SOON, launch, simulate, workspace_of

HEADER = layout.HEADER_WORDS.value
WORDS = layout.REQUEST_WORDS.value


def own_ring(group, workspace, capacity):
    """A ring that nobody takes requests out of, and what its producers share."""
    ring = group.world.memory.host_words(group.world_rank, HEADER + capacity * WORDS + 8)
    ring[layout.CAPACITY.value] = capacity
    ring[HEADER + capacity * WORDS :] = -1  # canaries
    posting = group.world.memory.upload(group.world_rank, [0, capacity, capacity])
    workspace.context[words.RING.value] = ring.data_ptr()
    workspace.context[words.POSTING.value] = posting.data_ptr()
    return ring, posting


@triton.jit
def post_one(context, peer, source_segment, source, segment, target, size, signal, value, out):
    ticket = post(context, Transfer(peer, source_segment, source, segment, target, size), signal, value, SEND)
    tl.store(out + tl.program_id(0), ticket)


BIG = dict(source=(5 << 32) + 24, target=(7 << 40) + 8, size=(3 << 32) + 16, signal=(9 << 33) + 8, value=(1 << 50) + 1)
SMALL = dict(source=1, target=2, size=3, signal=4, value=5)


@pytest.mark.parametrize("numbers", [BIG, SMALL], ids=["beyond 4 GiB", "small"])
def test_fields_are_where_they_are_documented(numbers):
    def rank(group):
        workspace = workspace_of(group)
        ring, posting = own_ring(group, workspace, 4)
        out = torch.full((1,), -7, dtype=torch.int64)
        launch(group, workspace, post_one, peer=65535, source_segment=0x7FFFFE, segment=0xABCDEF, out=out, **numbers)
        return ring.tolist(), posting.tolist(), int(out)

    ((ring, posting, ticket),) = simulate(rank)
    assert ticket == 0
    assert posting[layout.TAKEN.value] == 1
    assert ring[layout.CONSUMED.value] == ring[layout.COMPLETED.value] == 0
    request = ring[HEADER : HEADER + WORDS]
    assert request[layout.TURN.value] == 1
    assert request[layout.PEER_AND_SEGMENTS.value] == 65535 | 0xABCDEF << 16 | 0x7FFFFE << 40
    assert request[layout.SOURCE.value] == numbers["source"]
    assert request[layout.TARGET.value] == numbers["target"]
    assert request[layout.BYTES.value] == numbers["size"]
    assert request[layout.SIGNAL.value] == numbers["signal"]
    assert request[layout.VALUE.value] == numbers["value"]
    assert not any(ring[HEADER + WORDS : HEADER + 4 * WORDS])
    assert ring[HEADER + 4 * WORDS :] == [-1] * 8


def test_a_request_has_64_bytes_and_its_words_differ():
    names = ("TURN", "PEER_AND_SEGMENTS", "SOURCE", "TARGET", "BYTES", "SIGNAL", "VALUE")
    places = [getattr(layout, name).value for name in names]
    assert len(set(places)) == len(places)
    assert max(places) < WORDS == 8
    header = [getattr(layout, name).value for name in ("CONSUMED", "COMPLETED", "CAPACITY")]
    assert len(set(header)) == 3
    assert max(header) < HEADER


@pytest.mark.parametrize("seed", range(5))
def test_many_producers_take_different_slots(seed):
    grid = 8

    def rank(group):
        workspace = workspace_of(group)
        ring, _ = own_ring(group, workspace, grid)
        out = torch.zeros(grid, dtype=torch.int64)
        launch(group, workspace, post_one, grid=grid, peer=1, source_segment=2, segment=3, out=out, **SMALL)
        return ring, out

    ((ring, tickets),) = simulate(rank, seed=seed)
    assert sorted(tickets.tolist()) == list(range(grid))
    requests = ring[HEADER : HEADER + grid * WORDS].view(grid, WORDS)
    assert (requests[:, layout.TURN.value] == 1).all()
    assert (requests[:, layout.VALUE.value] == 5).all()


def test_the_turn_grows_each_time_round():
    """A ring that is emptied by hand: turn numbers tell old requests from new ones."""

    def rank(group):
        workspace = workspace_of(group)
        ring, _ = own_ring(group, workspace, 2)
        out = torch.zeros(1, dtype=torch.int64)
        turns = []
        for taken in range(7):
            ring[layout.CONSUMED.value] = taken
            launch(group, workspace, post_one, peer=1, source_segment=2, segment=3, out=out, **SMALL)
            assert int(out) == taken
            turns.append(ring[HEADER : HEADER + 2 * WORDS].view(2, WORDS)[:, layout.TURN.value].tolist())
        return turns

    assert simulate(rank)[0] == [[1, 0], [1, 1], [2, 1], [2, 2], [3, 2], [3, 3], [4, 3]]


def test_the_host_is_asked_only_when_the_ring_seems_full():
    """What one producer has read is enough for those that follow; until then none reads host memory."""

    def rank(group):
        workspace = workspace_of(group)
        ring, posting = own_ring(group, workspace, 4)
        out = torch.zeros(1, dtype=torch.int64)
        free = []
        for consumed in (-100, -100, -100, -100, 2, -100, 6):  # -100: who looked there would wait for ever
            ring[layout.CONSUMED.value] = consumed
            launch(group, workspace, post_one, peer=1, source_segment=2, segment=3, out=out, **SMALL)
            free.append(posting[layout.FREE.value].item())
        return int(out), free

    assert simulate(rank, timeout=SOON) == [(6, [4, 4, 4, 4, 6, 6, 10])]


def test_a_full_ring_is_waited_for_and_the_wait_ends():
    def rank(group):
        workspace = workspace_of(group)
        ring, _ = own_ring(group, workspace, 4)
        out = torch.full((6,), -7, dtype=torch.int64)
        with pytest.raises(mk.CommTimeout) as caught:
            launch(group, workspace, post_one, grid=6, peer=1, source_segment=2, segment=3, out=out, **SMALL)
        return ring, out.tolist(), caught.value.records

    ((ring, tickets, records),) = simulate(rank, timeout=SOON)
    assert sorted(tickets) == [-1, -1, 0, 1, 2, 3]
    assert (ring[HEADER : HEADER + 4 * WORDS].view(4, WORDS)[:, layout.TURN.value] == 1).all(), "overwritten"
    assert [record.signal for record in records] == ["ring space"] * 2
    assert {record.role for record in records} == {"send"}
    assert sorted((record.index, record.expected) for record in records) == [(4, 1), (5, 2)]
    assert all(record.seen == 0 for record in records)


@triton.jit
def send_many(context, each, first_signal, out):
    """Every CTA of rank 0 posts `each` requests, which only set signals, and waits for them."""
    cta = tl.program_id(0)
    segment = tl.load(context + SEGMENT)
    if rank_of(context) == 0:
        last = tl.full((), -1, tl.int64)
        for i in range(each):
            number = cta * each + i
            transfer = Transfer(tl.cast(1, tl.int32), segment, 0, segment, 0, 0)
            last = post(context, transfer, (first_signal + number) * 8, number + 1, SEND)
        there = wait_sent(context, last, SEND)
        tl.store(out + cta, there.to(tl.int64))


def signals_of_many(grid, each, *, seed, capacity):
    def rank(group):
        workspace = workspace_of(group, grid * each + 2, 1024)
        group._ring[layout.CAPACITY.value] = capacity
        group._posting[:] = torch.tensor([0, capacity, capacity])
        group.barrier()
        out = torch.zeros(grid, dtype=torch.int64)
        launch(group, workspace, send_many, grid=grid, each=each, first_signal=1, out=out)
        group.barrier()
        counts = [group._ring[word.value].item() for word in (layout.CONSUMED, layout.COMPLETED)]
        counts.append(group._posting[layout.TAKEN.value].item())
        return workspace.segment.memory.view(torch.int64)[: grid * each + 2].clone(), out, counts

    (_, sent, counts), (signals, _, idle) = simulate(rank, nodes=2, gpus=1, seed=seed)
    total = grid * each
    assert sent.tolist() == [1] * grid
    assert signals.tolist() == [0, *range(1, total + 1), 0]
    assert counts == [total] * 3
    assert idle == [0] * 3


@pytest.mark.parametrize("capacity", [1, 2, 4])
@pytest.mark.parametrize("seed", range(3))
def test_small_rings_are_wrapped_around_many_times(seed, capacity):
    signals_of_many(5, 12, seed=seed, capacity=capacity)


@pytest.mark.thorough
def test_thousands_of_requests():
    """Four CTAs through a ring of four places: it is wrapped around 600 times."""
    signals_of_many(4, 600, seed=1, capacity=4)


@pytest.mark.parametrize("ticket", [20_000, (1 << 31) - 2, (1 << 32) - 1, 1 << 45])
def test_tickets_of_a_long_life(ticket):
    """After so many requests the ring still finds the slot and the turn."""
    capacity = 4

    def rank(group):
        workspace = workspace_of(group)
        ring, posting = own_ring(group, workspace, capacity)
        posting[layout.TAKEN.value] = ticket
        ring[layout.CONSUMED.value] = ticket
        out = torch.zeros(3, dtype=torch.int64)
        launch(group, workspace, post_one, grid=3, peer=1, source_segment=2, segment=3, out=out, **SMALL)
        return ring, out

    ((ring, tickets),) = simulate(rank)
    expected = [ticket, ticket + 1, ticket + 2]
    assert sorted(tickets.tolist()) == expected
    turns = ring[HEADER : HEADER + capacity * WORDS].view(capacity, WORDS)[:, layout.TURN.value].tolist()
    for number in expected:
        assert turns[number % capacity] == number // capacity + 1
    assert turns[(ticket + 3) % capacity] == 0


@triton.jit
def send_and_receive(context, count, size, data_start, out):
    """Rank 0 sends blocks, rank 1 waits for each and copies it out."""
    rank = rank_of(context)
    segment = tl.load(context + SEGMENT)
    place = tl.arange(0, 8)
    for i in range(count):
        offset = data_start + i * 8
        if rank == 0:
            mine = segment_of(context, 0, tl.int64)
            tl.store(mine + offset + place, place + 10 * i + 1)
            post(
                context,
                Transfer(tl.cast(1, tl.int32), segment, offset * 8, segment, offset * 8, size),
                i * 8,
                i + 1,
                SEND,
            )
        else:
            mine = segment_of(context, 1, tl.int64)
            wait(context, mine + i, i + 1, COMPUTE, ARRIVED, 0, i)
            tl.store(out + i * 8 + place, tl.load(mine + offset + place))


@pytest.mark.parametrize("seed", range(3))
def test_data_is_there_when_the_request_signals_it(seed):
    count = 12

    def rank(group):
        workspace = workspace_of(group, count, count * 64)
        out = torch.zeros(count, 8, dtype=torch.int64)
        launch(group, workspace, send_and_receive, count=count, size=64, data_start=workspace.data_start // 8, out=out)
        return out

    _, received = simulate(rank, nodes=2, gpus=1, seed=seed)
    assert received.tolist() == [[place + 10 * i + 1 for place in range(8)] for i in range(count)]


@triton.jit
def wait_for_nobody(context, ticket, out):
    there = wait_sent(context, ticket, SEND)
    tl.store(out, there.to(tl.int64))


@pytest.mark.parametrize(("completed", "ticket", "there"), [(3, 2, 1), (3, 0, 1), (0, -1, 1), (3, 3, 0)])
def test_wait_sent_waits_for_all_up_to_its_ticket(completed, ticket, there):
    def rank(group):
        workspace = workspace_of(group)
        ring, _ = own_ring(group, workspace, 4)
        ring[layout.COMPLETED.value] = completed
        out = torch.full((1,), -7, dtype=torch.int64)
        record = None
        try:
            launch(group, workspace, wait_for_nobody, ticket=ticket, out=out)
        except mk.CommTimeout as error:
            record = error.record
        return int(out), record

    ((found, record),) = simulate(rank, timeout=SOON)
    assert found == there
    assert (record is None) == bool(there)
    if record:
        assert (record.signal, record.seen, record.expected) == ("sent", completed, ticket + 1)


@triton.jit
def post_what_never_came(context, out):
    """Wait in vain, then ask the network to hand on what did not come."""
    rank = rank_of(context)
    segment = tl.load(context + SEGMENT)
    wait(context, segment_of(context, rank, tl.int64), 1, SEND, ARRIVED, 1 - rank, 0)
    tl.store(out, post(context, Transfer(1 - rank, segment, 0, segment, 512, 8), 8, 1, SEND))


def test_nothing_is_sent_after_giving_up():
    """Over the network nobody could tell the peer that it got what was not there."""

    def rank(group):
        workspace = workspace_of(group)
        pair = group.subset([0, 1])  # which does not give up with the group
        out = torch.full((1,), -7, dtype=torch.int64)
        if group.rank == 0:
            workspace.context[words.TIMEOUT.value] = int(SOON * 1e9)
            with pytest.raises(mk.CommTimeout):
                launch(group, workspace, post_what_never_came, out=out)
        pair.barrier()
        return int(out), int(workspace.segment.memory.view(torch.int64)[1])

    assert simulate(rank, nodes=2) == [(-1, 0), (-7, 0)]
