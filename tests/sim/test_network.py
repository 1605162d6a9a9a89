"""The network: no order, but the data before its signal, and nothing where it does not belong."""

import pytest
import torch
import triton
import triton.language as tl

import mkernel as mk
from mkernel.lang import requests as layout
from mkernel.lang.context import SEGMENT, rank_of, segment_of
from mkernel.lang.requests import Transfer, post, wait_sent
from mkernel.lang.roles import COMPUTE, SEND
from mkernel.lang.signals import ARRIVED, notify, wait
from mkernel.sim.memory import Memory

from .harness import OP, launch, simulate

WORDS = tl.constexpr(8)  # of a block


@triton.jit
def send_blocks(context, count, data_start, out):
    """Rank 0 sends blocks; rank 1 writes down in which order they came, and what was in them then."""
    segment = tl.load(context + SEGMENT)
    place = tl.arange(0, WORDS)
    if rank_of(context) == 0:
        mine = segment_of(context, 0, tl.int64)
        for i in range(count):
            offset = data_start + i * WORDS
            tl.store(mine + offset + place, 100 * (i + 1) + place)
            post(
                context,
                Transfer(tl.cast(1, tl.int32), segment, offset * 8, segment, offset * 8, WORDS * 8),
                i * 8,
                1,
                SEND,
            )
    else:
        mine = segment_of(context, 1, tl.int64)
        arrived = 0
        while arrived < count:
            for i in range(count):
                seen = tl.atomic_add(mine + i, 0, sem="acquire", scope="sys")
                if (seen > 0) & (tl.load(out + i) == 0):
                    arrived += 1
                    tl.store(out + i, arrived)
                    block = tl.load(mine + data_start + i * WORDS + place)
                    tl.store(out + count + i * WORDS + place, block)


def arrivals(seed: int, count: int) -> tuple[list[int], list[list[int]]]:
    def rank(group):
        workspace = group.workspace(OP, count, count * 64)
        out = torch.zeros(count * 9, dtype=torch.int64)
        launch(
            group, send_blocks, context=workspace.context, count=count, data_start=workspace.data_start // 8, out=out
        )
        return out, group.world.traffic.network

    _, (out, traffic) = simulate(rank, nodes=2, gpus=1, seed=seed)
    assert traffic == [[0, count * 64], [0, 0]]
    return out[:count].tolist(), out[count:].view(count, 8).tolist()


def test_requests_overtake_each_other():
    orders = {tuple(arrivals(seed, 2)[0]) for seed in range(20)}
    assert orders == {(1, 2), (2, 1)}


@pytest.mark.parametrize("seed", range(10))
def test_the_signal_never_comes_before_its_data(seed):
    order, blocks = arrivals(seed, 9)
    assert sorted(order) == list(range(1, 10))
    assert blocks == [[100 * (i + 1) + place for place in range(8)] for i in range(9)]


def test_completions_are_counted_in_order(monkeypatch):
    """COMPLETED = n: the first n requests have been sent, whatever else was sent before."""
    count, out_of_order = 12, False
    written = []
    write = Memory.write

    def logged(self, addresses, values):
        if values.size == 1 and values.itemsize == 8:
            written.append((int(addresses[0]), int(values[0])))
        write(self, addresses, values)

    monkeypatch.setattr(Memory, "write", logged)

    def rank(group):
        workspace = group.workspace(OP, count, count * 64)
        written.clear()
        out = torch.zeros(count * 9, dtype=torch.int64)
        launch(
            group, send_blocks, context=workspace.context, count=count, data_start=workspace.data_start // 8, out=out
        )
        group.barrier()
        return group._ring.data_ptr() + 8 * layout.COMPLETED.value, workspace.segment.memory.data_ptr()

    for seed in range(6):
        (counter, _), (_, signals) = simulate(rank, nodes=2, gpus=1, seed=seed)
        signalled, completed = [], 0
        for address, value in written:
            if signals <= address < signals + 8 * count:
                signalled.append((address - signals) // 8)
            elif address == counter:
                assert value >= completed
                completed = value
                assert set(range(completed)) <= set(signalled)
        out_of_order |= signalled != sorted(signalled)
        # the last ones may still be on their way when the receiver has all it waited for
        assert sorted(signalled) == list(range(count))
    assert out_of_order


@triton.jit
def reuse_the_source(context, data_start, out, PATIENT: tl.constexpr):
    """Rank 0 sends a block and overwrites it, at once or when it was sent."""
    segment = tl.load(context + SEGMENT)
    place = tl.arange(0, WORDS)
    mine = segment_of(context, rank_of(context), tl.int64)
    if rank_of(context) == 0:
        tl.store(mine + data_start + place, 1 + 0 * place)
        ticket = post(
            context,
            Transfer(tl.cast(1, tl.int32), segment, data_start * 8, segment, data_start * 8, WORDS * 8),
            0,
            1,
            SEND,
        )
        if PATIENT:
            wait_sent(context, ticket, SEND)
        tl.store(mine + data_start + place, 2 + 0 * place)
        notify(mine + 1, 1)
    else:
        wait(context, mine, 1, COMPUTE, ARRIVED, 0, 0)
        tl.store(out + place, tl.load(mine + data_start + place))


@pytest.mark.parametrize("patient", [True, False])
def test_a_source_may_be_written_again_when_it_was_sent(patient):
    def rank(group):
        workspace = group.workspace(OP, 2, 64)
        out = torch.zeros(8, dtype=torch.int64)
        start = workspace.data_start // 8
        launch(group, reuse_the_source, context=workspace.context, data_start=start, out=out, PATIENT=patient)
        return tuple(out.tolist())

    if patient:
        assert {simulate(rank, nodes=2, gpus=1, seed=seed)[1] for seed in range(8)} == {(1,) * 8}
    else:
        for seed in range(8):
            with pytest.raises(mk.RaceError, match=r"to the network (has )?load"):
                simulate(rank, nodes=2, gpus=1, seed=seed)


@triton.jit
def set_twice(context):
    """Two requests without data for one signal, the smaller value last."""
    segment = tl.load(context + SEGMENT)
    if rank_of(context) == 0:
        post(context, Transfer(tl.cast(1, tl.int32), segment, 0, segment, 0, 0), 8, 1 << 40, SEND)
        ticket = post(context, Transfer(tl.cast(1, tl.int32), segment, 0, segment, 0, 0), 8, 5, SEND)
        wait_sent(context, ticket, SEND)


def test_signals_only_grow():
    def rank(group):
        workspace = group.workspace(OP, 4, 64)
        launch(group, set_twice, context=workspace.context)
        group.barrier()
        return workspace.segment.memory.view(torch.int64)[:4].tolist()

    for seed in range(8):
        assert simulate(rank, nodes=2, gpus=1, seed=seed) == [[0] * 4, [0, 1 << 40, 0, 0]]


@triton.jit
def ask(context, peer, source_segment, source, segment, target, size, signal):
    if rank_of(context) == 0:
        ticket = post(context, Transfer(peer, source_segment, source, segment, target, size), signal, 1, SEND)
        wait_sent(context, ticket, SEND)


def asking(**changes):
    """One request of 64 bytes from rank 0's workspace to rank 1's, with some numbers changed."""

    def rank(group):
        workspace = group.workspace(OP, 4, 1024)
        number = workspace.segment.number
        request = dict(peer=1, source_segment=number, source=1024, segment=number, target=2048, size=64, signal=8)
        launch(group, ask, context=workspace.context, **(request | changes))
        return workspace.segment.memory.numel()

    return simulate(rank, nodes=2, gpus=1)


def test_a_request_may_use_all_that_was_declared():
    size = asking()[0]
    asking(source=size - 64, target=size - 64)
    asking(source=1024, target=1024, size=size - 1024)
    asking(source=size, target=size, size=0)
    with pytest.raises(mk.SimulatorError, match="8 bytes after the end of the signals of all_gather_matmul on rank"):
        asking(source=40, target=1024, size=8)


@pytest.mark.parametrize(
    "changes",
    [
        dict(source=1 << 20),
        dict(target=1 << 20),
        dict(signal=1 << 20),
        dict(source=-8),
        dict(target=-8),
        dict(signal=-8),
        dict(size=1 << 33),
        dict(size=-64),
        dict(target=(1 << 32) + 2048),
        dict(segment=77),
        dict(source_segment=77),
        dict(peer=2),
    ],
    ids=str,
)
def test_a_request_outside_of_the_segments_is_an_error(changes):
    with pytest.raises(mk.SimulatorError, match="request"):
        asking(**changes)


def test_the_last_bytes_of_a_request_count():
    size = asking()[0]
    for changes in (dict(source=size - 63), dict(target=size - 63), dict(signal=size - 7)):
        with pytest.raises(mk.SimulatorError, match="outside"):
            asking(**changes)


def test_every_group_has_its_own_network():
    """The whole group and two halves of it, one after the other, with operators that need the network."""

    def rank(group):
        a, b = torch.full((8, 16), float(group.rank + 1)), torch.ones(16, 8)
        whole = mk.all_gather_matmul(a, b)
        half = group.split(group.local_rank)
        part = mk.all_gather_matmul(a, b, group=half)
        again = mk.all_gather_matmul(a, b)
        return half.nodes, whole[::8, 0].tolist(), part[::8, 0].tolist(), torch.equal(whole, again)

    for seed in range(3):
        for number, found in enumerate(simulate(rank, nodes=2, gpus=2, seed=seed)):
            local = number % 2
            assert found == (2, [16.0, 32.0, 48.0, 64.0], [16.0 * (1 + local), 16.0 * (3 + local)], True)
