"""push_rows: the block, the whole block and nothing but the block, at every destination."""

import pytest
import torch
import triton
import triton.language as tl

from mkernel.lang.context import rank_of
from mkernel.lang.copy import Peers, push_rows, wait_paced
from mkernel.lang.device import clock
from mkernel.lang.matrix import Block
from mkernel.runtime.operands import constants

from .harness import launch, simulate, workspace_of

HALF = 4096
CANARY = -77.0


@triton.jit
def push(context, sender, source, target, rows, columns, peers, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    if rank_of(context) == sender:
        push_rows(context, source, target, rows, columns, peers, ROWS, COLUMNS)


def push_and_look(source, *, start, stride, first=0, modulus=1, base=0, count=1, gpus=1, sender=0, rows=4, columns=8,
                  dtype=torch.float32, seed=0):  # fmt: skip
    """Push `source` to element `start` of the ranks' second halves; all of every rank's data, afterwards."""

    def rank(group):
        workspace = workspace_of(group, 16, HALF)
        data = workspace.segment.memory[workspace.data_start :].view(dtype)
        data.fill_(CANARY)
        group.barrier()
        launch(
            group, workspace, push, sender=sender,
            source=Block(source if group.rank == sender else torch.zeros(1, dtype=dtype), *source.stride()),
            target=Block((workspace.data_start + HALF) // source.element_size() + start, stride, 1),
            rows=source.shape[0], columns=source.shape[1], peers=Peers(base, first, modulus, *constants(count)),
            ROWS=rows, COLUMNS=columns,
        )  # fmt: skip
        group.barrier()
        assert not workspace.segment.memory[: workspace.data_start].any(), "signals were touched"
        return data.clone()

    return simulate(rank, gpus=gpus, seed=seed)


def expected(source, start, stride):
    size = source.element_size()
    data = torch.full((2 * HALF // size,), CANARY, dtype=source.dtype)
    for number, row in enumerate(source):
        place = HALF // size + start + number * stride
        data[place : place + row.numel()] = row
    return data


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(4, 8), (1, 1), (3, 5), (9, 17), (13, 8), (4, 30), (1, 100), (33, 3)])
def test_blocks_of_any_size(shape, dtype):
    source = torch.randn(shape).to(dtype)
    stride = shape[1] + 3
    (found,) = push_and_look(source, start=5, stride=stride, dtype=dtype)
    assert torch.equal(found, expected(source, 5, stride))


def views():
    plain = torch.arange(40 * 60, dtype=torch.float32).view(40, 60)
    return {
        "padded rows": plain[:9, :13],
        "every other row": plain[3:21:2, 4:17],
        "every third column": plain[:7, 1::3],
        "transposed": plain[:13, :9].t(),
        "one row again and again": plain[2:3, :11].expand(6, 11),
        "one column again and again": plain[:6, 5:6].expand(6, 11),
        "every other, transposed": plain[::4, ::5].t(),
    }


@pytest.mark.parametrize("name", views())
def test_sources_with_strides(name):
    source = views()[name]
    (found,) = push_and_look(source, start=0, stride=24)
    assert torch.equal(found, expected(source, 0, 24))


@pytest.mark.parametrize("rows", [0, 1])
def test_an_empty_block_touches_nothing(rows):
    (found,) = push_and_look(torch.zeros(rows, 0 if rows else 4), start=0, stride=4)
    assert (found == CANARY).all()


@pytest.mark.parametrize(
    ("gpus", "first", "modulus", "base", "count", "targets"),
    [
        (3, 1, 3, 0, 2, {1, 2}),
        (3, 2, 3, 0, 2, {2, 0}),
        (4, 2, 4, 0, 3, {2, 3, 0}),
        (4, 0, 2, 2, 2, {2, 3}),
        (4, 1, 2, 2, 1, {3}),
        (2, 0, 1, 1, 1, {1}),
        (3, 0, 3, 0, 0, set()),
    ],
)
def test_several_destinations(gpus, first, modulus, base, count, targets):
    source = torch.randn(7, 11)
    for seed in range(2):
        found = push_and_look(source, start=2, stride=12, first=first, modulus=modulus, base=base, count=count,
                              gpus=gpus, seed=seed)  # fmt: skip
        for number, data in enumerate(found):
            if number in targets:
                assert torch.equal(data, expected(source, 2, 12))
            else:
                assert (data == CANARY).all()


@pytest.mark.parametrize(("rows", "columns"), [(1, 16), (16, 1), (2, 64), (8, 4)])
def test_the_pieces_in_flight_may_have_any_shape(rows, columns):
    source = torch.randn(11, 21)
    (found,) = push_and_look(source, start=1, stride=23, rows=rows, columns=columns)
    assert torch.equal(found, expected(source, 1, 23))


@pytest.mark.parametrize("direction", ["rows", "columns"])
@pytest.mark.thorough
def test_rows_and_columns_may_be_gigabytes_apart(direction):
    """Offsets in the source have 64 bits. Only the pages that are touched cost memory."""
    apart = 2**30
    memory = torch.empty(3 * apart + 16, dtype=torch.int8)
    source = memory.as_strided((4, 1), (apart, 1)) if direction == "rows" else memory.as_strided((1, 4), (1, apart))
    source.copy_(torch.arange(1, 5, dtype=torch.int8).view(source.shape))

    def rank(group):
        workspace = workspace_of(group, 16, HALF)
        launch(
            group, workspace, push, sender=0, source=Block(source, *source.stride()),
            target=Block(workspace.data_start, 1, 1), rows=source.shape[0], columns=source.shape[1],
            peers=Peers(0, 0, 1, *constants(1)), ROWS=4, COLUMNS=4,
        )  # fmt: skip
        return workspace.half(0)[:5].tolist()

    assert simulate(rank)[0] == [1, 2, 3, 4, 0]


@triton.jit
def paced(context, sent, nanoseconds_per_mib, out):
    start = clock()
    wait_paced(start, tl.cast(sent, tl.int64), nanoseconds_per_mib)
    tl.store(out, clock() - start)


@pytest.mark.parametrize(("sent", "rate", "least"), [(1 << 20, 5_000, 5_000), (1 << 22, 5_000, 20_000), (0, 5_000, 0)])
def test_paced_copies_take_their_time(sent, rate, least):
    def rank(group):
        out = torch.zeros(1, dtype=torch.int64)
        launch(group, workspace_of(group), paced, sent=sent, nanoseconds_per_mib=rate, out=out)
        return int(out)

    assert least <= simulate(rank)[0] <= 4 * least + 2_000


def test_pacing_of_many_gigabytes():
    """Bytes sent times nanoseconds per MiB needs more than 32 bits."""

    def rank(group):
        out = torch.zeros(1, dtype=torch.int64)
        launch(group, workspace_of(group), paced, sent=1 << 36, nanoseconds_per_mib=2_000, out=out)
        return int(out)

    assert simulate(rank)[0] >= 2_000 << 16
