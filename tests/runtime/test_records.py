"""Wait records: what a person reads when a wait was given up."""

import dataclasses

import pytest
import torch

import mkernel as mk
from mkernel.lang import roles, signals
from mkernel.ops.attention import kinds
from mkernel.runtime import records

RECORD = mk.WaitRecord(
    timed_out=True,
    op="all_gather_matmul",
    rank=3,
    role="compute",
    cta=17,
    signal="arrived",
    peer=5,
    index=21,
    seen=8,
    expected=9,
    seconds=30.5,
)


def test_a_record_reads_well():
    assert str(RECORD) == (
        "all_gather_matmul: rank 3, role compute, CTA 17 waited 30.5 s for chunk 21 of rank 5's rows: "
        "signal 'arrived' is 8, expected 9 (timed out)"
    )


@pytest.mark.parametrize(
    ("signal", "words"),
    [
        ("entered", "rank 5 to enter the epoch"),
        ("arrived", "chunk 21 of rank 5's rows"),
        ("ring space", "take a request out of the full ring"),
        ("sent", "finish sending"),
    ],
)
def test_every_signal_has_words(signal, words):
    assert words in str(dataclasses.replace(RECORD, signal=signal))


def test_who_followed_is_told_apart():
    assert "gave up with the group" in str(dataclasses.replace(RECORD, timed_out=False))
    assert "timed out" not in str(dataclasses.replace(RECORD, timed_out=False))


def table_of(*rows: list[int]) -> torch.Tensor:
    table = torch.zeros(records.COUNT, records.WORDS, dtype=torch.int64)
    for row in rows:
        table[row[4], : len(row)] = torch.tensor(row)
    return table.view(-1)


def row(reason, cta, nanoseconds, kind=signals.ARRIVED, role=roles.INTRA, peer=1):
    return [
        reason.value,
        records.number_of("all_gather_matmul"),
        2,
        role.value,
        cta,
        kind.value,
        peer,
        40 + cta,
        6,
        7,
        nanoseconds,
    ]


def test_an_empty_table_has_no_records():
    assert records.read(table_of()) == []


def test_those_that_timed_out_come_first_the_longest_before():
    table = table_of(
        row(signals.TOLD_TO_LEAVE, 0, 9_000_000_000),
        row(signals.TIMED_OUT, 5, 1_000_000_000),
        row(signals.TIMED_OUT, 1023, 2_500_000_000, role=roles.SEND, kind=signals.SENT),
    )
    found = records.read(table)
    assert [record.cta for record in found] == [1023, 5, 0]
    assert [record.timed_out for record in found] == [True, True, False]
    assert found[0] == mk.WaitRecord(True, "all_gather_matmul", 2, "send", 1023, "sent", 1, 40 + 1023, 6, 7, 2.5)


def test_a_rank_that_never_came_comes_before_what_others_did_not_send():
    """A peer that waits for it sends nothing; that wait may have begun first, and have told this one to leave."""
    table = table_of(
        row(signals.TIMED_OUT, 0, 1_000_200_000),
        row(signals.TOLD_TO_LEAVE, 1, 600_000_000, kind=signals.ENTERED),
        row(signals.TIMED_OUT, 2, 1_000_000_000),
    )
    assert [record.cta for record in records.read(table)] == [1, 0, 2]
    assert mk.CommTimeout("words", records.read(table)).is_cause


@pytest.mark.parametrize("within", [-1, 2])
def test_waits_for_others_come_before_those_within_the_rank(within):
    """A CTA that waits for others of its rank, or for its rank to be done with something, tells least."""
    table = table_of(
        row(signals.TIMED_OUT, 0, 1_000_000_002, kind=kinds.FREED, peer=within),
        row(signals.TIMED_OUT, 1, 1_000_000_001),
        row(signals.TIMED_OUT, 2, 1_000_000_000, kind=signals.ENTERED, peer=3),
    )
    assert [record.peer for record in records.read(table)] == [3, 1, within]


def test_a_rank_that_is_only_late_does_not():
    table = table_of(
        row(signals.TOLD_TO_LEAVE, 0, 100_000_000, kind=signals.ENTERED),
        row(signals.TIMED_OUT, 1, 1_000_000_000),
        row(signals.TOLD_TO_LEAVE, 2, 200_000_000),
    )
    assert [record.cta for record in records.read(table)] == [1, 0, 2]


@pytest.mark.parametrize("kind", [signals.ENTERED, signals.ARRIVED, signals.RING_SPACE, signals.SENT])
@pytest.mark.parametrize("role", [roles.SEND, roles.INTRA, roles.COMPUTE])
def test_everything_that_a_kernel_can_write_can_be_read(kind, role):
    (record,) = records.read(table_of(row(signals.TIMED_OUT, 1, 1, kind, role)))
    assert str(record)


REFUSAL = row(signals.OVER_CAPACITY, 5, 0)


@pytest.mark.parametrize(
    ("rows", "taken", "left"),
    [
        ([], None, 0),
        ([REFUSAL], mk.CapacityError, 0),
        ([row(signals.INVALID_ID, 0, 0)], mk.RoutingError, 0),
        ([REFUSAL, row(signals.OVER_CAPACITY, 7, 0)], mk.CapacityError, 1),
        ([REFUSAL, row(signals.TIMED_OUT, 3, 1)], mk.CapacityError, 1),
        ([row(signals.TIMED_OUT, 3, 1)], None, 1),
    ],
)
def test_taking_a_refusal_leaves_the_other_records(rows, taken, left):
    table = table_of(*rows)
    table[records.RECORDED] = 1
    refusal = records.take_refusal(table)
    assert type(refusal) is (taken or type(None))
    assert int(table[records.RECORDED]) == left
    assert int((table.view(-1, records.WORDS)[:, 0] != 0).sum()) == len(rows) - (taken is not None)


def test_an_error_carries_its_records():
    error = mk.CommTimeout("words", [RECORD])
    assert error.record is RECORD
    assert error.records == (RECORD,)
    assert isinstance(error, (mk.MKernelError, RuntimeError))
    assert mk.CommTimeout("words").record is None


def test_the_cause_is_told_from_what_followed():
    assert mk.CommTimeout("words", [RECORD]).is_cause
    assert not mk.CommTimeout("words", [dataclasses.replace(RECORD, timed_out=False)]).is_cause
    assert not mk.CommTimeout("words").is_cause


def test_ranks_that_did_not_come_have_records_too():
    error = records.absent("barrier", rank=2, missing=[1, 3], size=4, seconds=1.5)
    assert [(record.rank, record.peer) for record in error.records] == [(2, 1), (2, 3)]
    assert (error.record.signal, error.record.seen, error.record.expected) == ("call", 2, 4)
    for words in ("barrier", "rank 2", "rank 1", "1.5 s", "[1, 3]"):
        assert words in str(error)


def test_errors_are_what_they_say():
    assert issubclass(mk.ArgumentError, ValueError)
    assert issubclass(mk.Deadlock, mk.SimulatorError)
    for error in (mk.ArgumentError, mk.CommTimeout, mk.SimulatorError, mk.TransportError):
        assert issubclass(error, mk.MKernelError)
