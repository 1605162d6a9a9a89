"""Wait records in files: what is written is read again, and a damaged file does no harm."""

import dataclasses
import json

import pytest

import mkernel as mk
from mkernel.runtime import record_files
from mkernel.runtime.chains import NetworkFailure

RECORDS = [
    mk.WaitRecord(True, "all_gather_matmul", 0, "compute", 3, "arrived", 1, 5, 1, 2, 30.25),
    mk.WaitRecord(False, "barrier", 2, "host", -1, "call", 1, 0, 2, 3, 1.0),
]


def test_written_and_read(tmp_path):
    path = tmp_path / "waits.jsonl"
    record_files.write(path, RECORDS, [NetworkFailure(1, 'broke: "why"\nthen')])
    assert len(path.read_text().splitlines()) == 3
    found = record_files.read([path])
    assert list(found.records) == RECORDS
    assert list(found.failures) == [NetworkFailure(1, 'broke: "why"\nthen')]
    assert found.damaged == ()


def test_an_error_saves_its_records_and_those_of_the_others(tmp_path):
    late = mk.CommTimeout("late", RECORDS[:1])
    late.others = tuple(RECORDS[1:])
    late.save(tmp_path / "waits.jsonl")
    assert list(record_files.read([tmp_path / "waits.jsonl"]).records) == RECORDS


def test_a_transport_error_saves_what_it_ended(tmp_path):
    failure = mk.TransportError("rank 1 is gone")
    failure.save(tmp_path / "nothing.jsonl")
    assert (tmp_path / "nothing.jsonl").read_text() == ""
    failure.__cause__ = mk.CommTimeout("late", RECORDS)
    failure.save(str(tmp_path / "waits.jsonl"))
    found = record_files.read([tmp_path / "waits.jsonl"])
    assert list(found.records) == RECORDS
    assert list(found.failures) == [NetworkFailure(0, "rank 1 is gone")]


def test_files_may_be_given_together_or_put_together(tmp_path):
    files = [tmp_path / f"waits.{rank}.jsonl" for rank in range(2)]
    for file, record in zip(files, RECORDS):
        record_files.write(file, [record])
    both = tmp_path / "both.jsonl"
    both.write_text("".join(file.read_text() for file in files))
    for paths in (files, [both], [both, *files, both]):  # each record counts once
        assert list(record_files.read(paths).records) == RECORDS


def changed(**values):
    return json.dumps({"mkernel": "wait", **dataclasses.asdict(RECORDS[0]), **values})


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (changed()[:60], "no JSON"),
        ("[" * 100000, "no JSON"),
        ("\x00\x01 garbage", "no JSON"),
        ("3", "no record of mkernel"),
        ('{"rank": 1}', "no record of mkernel"),
        ('{"mkernel": "other"}', "no record of mkernel"),
        ('{"mkernel": "wait"}', "timed_out is None, expected bool"),
        (changed(rank="0"), "rank is '0', expected int"),
        (changed(rank=True), "rank is True, expected int"),
        (changed(timed_out=1), "timed_out is 1, expected bool"),
        (changed(seconds=None), "seconds is None, expected float"),
        ('{"mkernel": "network failure", "rank": 1}', "message is None, expected str"),
    ],
)
def test_a_damaged_line_is_named_and_the_others_are_read(tmp_path, line, problem):
    path = tmp_path / "waits.jsonl"
    path.write_text(changed() + "\n\n" + line + "\n" + changed(rank=4))
    found = record_files.read([path])
    assert [record.rank for record in found.records] == [0, 4]
    (damaged,) = found.damaged
    assert damaged.startswith(f"{path}:3: ")
    assert problem in damaged


def test_bytes_that_are_no_text(tmp_path):
    path = tmp_path / "waits.jsonl"
    path.write_bytes(b"\xff\xfe\x00" * 50 + b"\n" + changed().encode())
    found = record_files.read([path])
    assert len(found.records) == 1
    assert len(found.damaged) == 1


def test_a_signal_of_another_version_can_be_shown():
    assert "rank 1" in str(dataclasses.replace(RECORDS[0], signal="of tomorrow"))


@pytest.mark.parametrize("path", ["no/such/file", "."])
def test_what_can_not_be_read_is_named(path):
    with pytest.raises(mk.ArgumentError, match="can not be read"):
        record_files.read([path])
