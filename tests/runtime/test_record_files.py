"""Wait records in files: what is written is read again, and a damaged file does no harm."""

import dataclasses
import json

import pytest
from typer.testing import CliRunner

import mkernel as mk
from mkernel import cli
from mkernel.runtime import record_files
from mkernel.runtime.chains import NetworkFailure
from mkernel.runtime.printable import printable

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
        (changed()[:60], "not JSON"),
        ("[" * 100000, "not JSON"),
        ("\x00\x01 garbage", "not JSON"),
        ("3", "not a record of mkernel"),
        ('{"rank": 1}', "not a record of mkernel"),
        ('{"mkernel": "other"}', "not a record of mkernel"),
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
    with pytest.raises(mk.ArgumentError, match="cannot be read"):
        record_files.read([path])


# what a terminal would obey: escape sequences in 7 and in 8 bits, a title, backspaces, line breaks, marks of direction
ORDERS = [
    "\x1b[2J", "\x9b31m", "\x1b]0;title\x07", "a\b\b", "one\rtwo", "one\ntwo", "\x85", "\x7f",
    "\u202e", "\u2066", "\u2028",
]  # fmt: skip


@pytest.mark.parametrize("order", ORDERS, ids=ascii)
def test_what_a_file_says_is_no_order_to_the_terminal(tmp_path, order):
    """In every field that is text, in lines that are damaged, and in the names of files."""
    words = f"before{order}after"
    path = tmp_path / f"waits {order}.jsonl"
    wait = dataclasses.asdict(RECORDS[0]) | {"op": words, "role": words, "signal": words}
    back = dataclasses.asdict(RECORDS[0]) | {"rank": 1, "peer": 0, "op": words + "!"}  # waits for each other
    lines = [
        {"mkernel": "wait", **wait},
        {"mkernel": "wait", **back},
        {"mkernel": "network failure", "rank": 3, "message": words},
        {"mkernel": "wait", **wait, "rank": words},
        {"mkernel": words},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + words.replace("\n", "") + "\n")
    result = CliRunner().invoke(cli.main, ["why", str(path)], color=True)
    assert result.exit_code == 0, result.output
    assert all(line.isprintable() for line in result.output.split("\n"))
    for shown in (f"  {printable(words)}: rank 0, role {printable(words)}", f"signal '{printable(words)}'"):
        assert shown in result.output
    assert f"the network of rank 3 failed: {printable(words)}\n" in result.output
    found = record_files.read([path])
    assert len(found.damaged) >= 3
    assert all(line.isprintable() for line in found.damaged)


@pytest.mark.parametrize("order", ORDERS, ids=ascii)
def test_a_file_that_can_not_be_read_is_named_without_orders(tmp_path, order):
    result = CliRunner().invoke(cli.main, ["why", str(tmp_path / f"no{order}file")], color=True)
    assert result.exit_code == 2
    assert all(line.isprintable() for line in result.output.split("\n"))
    with pytest.raises(mk.ArgumentError) as error:
        record_files.read([tmp_path / f"no{order}file"])
    assert str(error.value).isprintable()


def test_ordinary_text_stays_as_it_is():
    text = 'rank 1\'s GPU: größer, 深い, C:\\x1b, "quoted"'
    assert printable(text) == text
    assert printable("\x1b[0m\u202e\n\U000e0001") == "\\x1b[0m\\u202e\\n\\U000e0001"
