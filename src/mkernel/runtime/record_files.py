"""Wait records in files: JSON lines, so that the files of several ranks can be concatenated.

{"mkernel": "wait", "timed_out": true, "op": "all_gather_matmul", "rank": 0, "peer": 1, ...}
{"mkernel": "network failure", "rank": 2, "message": "..."}
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from mkernel.runtime.chains import NetworkFailure
from mkernel.runtime.errors import ArgumentError
from mkernel.runtime.printable import printable
from mkernel.runtime.records import WaitRecord

TYPES: dict[str, tuple[type, ...]] = {"bool": (bool,), "str": (str,), "int": (int,), "float": (int, float)}


@dataclass(frozen=True)
class Contents:
    """The contents of files. `damaged`: lines that could not be read, with file, line number and problem."""

    records: tuple[WaitRecord, ...]
    failures: tuple[NetworkFailure, ...]
    damaged: tuple[str, ...]


def write(path: str | Path, records: Iterable[WaitRecord], failures: Iterable[NetworkFailure] = ()) -> None:
    """Write a file, or overwrite it."""
    lines = [{"mkernel": "wait", **asdict(record)} for record in records]
    lines += [{"mkernel": "network failure", **asdict(failure)} for failure in failures]
    Path(path).write_text("".join(json.dumps(line) + "\n" for line in lines))


def read(paths: Sequence[str | Path]) -> Contents:
    """The distinct records of all files. Lines that are not records are skipped and listed as damaged."""
    found: dict[WaitRecord | NetworkFailure, None] = {}
    damaged = []
    for path in paths:
        try:
            text = Path(path).read_bytes().decode("utf-8", errors="replace")
        except OSError as problem:
            raise ArgumentError(printable(f"{path} cannot be read: {problem.strerror}")) from problem
        for number, line in enumerate(text.split("\n"), 1):
            if not line.strip():
                continue
            try:
                found[_parse(line)] = None
            except ValueError as problem:
                damaged.append(printable(f"{path}:{number}: {problem}"))
    return Contents(
        records=tuple(item for item in found if isinstance(item, WaitRecord)),
        failures=tuple(item for item in found if isinstance(item, NetworkFailure)),
        damaged=tuple(damaged),
    )


def _parse(line: str) -> WaitRecord | NetworkFailure:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError("this is not JSON; was the process killed while writing?") from None
    if not isinstance(values, dict) or values.get("mkernel") not in ("wait", "network failure"):
        raise ValueError("this is not a record of mkernel")
    kind = WaitRecord if values.pop("mkernel") == "wait" else NetworkFailure
    arguments: dict[str, Any] = {}
    for field in fields(kind):
        value = values.get(field.name)
        wanted = TYPES[str(field.type)]
        if not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted):
            raise ValueError(f"{field.name} is {value!r}, expected {field.type}")
        arguments[field.name] = value
    return kind(**arguments)
