"""Which shapes to measure: from the command line, from a file, or from a named set."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mkernel.bench import published
from mkernel.operators import Operator, Shape
from mkernel.runtime.errors import ArgumentError

LARGEST = 2**31 - 1  # kernels use 32-bit sizes


@dataclass(frozen=True)
class Wanted:
    """One measurement. `row`: the published figures for it, if there are any."""

    op: str
    shape: Shape
    row: dict[str, Any] | None = None


def parse(text: str, operator: Operator, ranks: int) -> Shape:
    """Parse a shape from the command line, such as 16384x2048x8192 or B4xH16xS49152xD128."""
    pattern = "x".join(r"[a-wyz]?(\d+)" for _ in operator.dimensions)
    match = re.fullmatch(pattern, text.strip().lower())
    shape = tuple(int(number) for number in match.groups()) if match else ()
    if not shape or not all(shape):
        example = "x".join(map(str, operator.shapes[0]))
        raise ArgumentError(
            f"{text!r} is not a shape of {operator.name}; write {' x '.join(operator.dimensions)} as "
            f"{len(operator.dimensions)} integers, 1 or more: {example}"
        )
    if max(shape) > LARGEST:
        raise ArgumentError(f"{text}: sizes may be at most {LARGEST}")
    check(shape, operator, ranks)
    return shape


def check(shape: Shape, operator: Operator, ranks: int) -> None:
    """Reject a shape that cannot be divided among the ranks."""
    for name, number in zip(operator.dimensions, shape):
        if name in operator.shared and number % ranks:
            raise ArgumentError(
                f"{'x'.join(map(str, shape))}: {name} of {operator.name} ({number}) must be divisible by the number "
                f"of ranks ({ranks})"
            )


def read(path: Path, operators: Mapping[str, Operator], op: str | None, ranks: int) -> list[Wanted]:
    """Read shapes from a file: an operator and a shape on each line, or only a shape if `op` is given. A # begins a
    comment. If `op` is given, lines for other operators are skipped."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) else "it is not a text file"
        raise ArgumentError(f"--shapes is 'small', 'paper' or a file; {path} cannot be read: {reason}") from problem
    wanted = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        name = words[0] if len(words) == 2 else op
        if name is None or len(words) > 2:
            raise ArgumentError(f"{path}:{number}: write an operator and a shape, such as: {_example(operators)}")
        if name not in operators:
            raise ArgumentError(f"{path}:{number}: there is no operator {name!r}; there are: {', '.join(operators)}")
        try:
            shape = parse(words[-1], operators[name], ranks)
        except ArgumentError as problem:
            raise ArgumentError(f"{path}:{number}: {problem}") from problem
        if op in (None, name):
            wanted.append(Wanted(name, shape))
    if not wanted:
        raise ArgumentError(
            f"{path} has no shapes{f' of {op}' if op else ''}; write lines such as: {_example(operators)}"
        )
    return wanted


def _example(operators: Mapping[str, Operator]) -> str:
    operator = next(iter(operators.values()))
    return f"{operator.name} {'x'.join(map(str, operator.shapes[0]))}"


def choose(chosen: Sequence[Operator], which: str, ranks: int) -> list[Wanted]:
    """The shapes of a set: "default", "small" or "paper"."""
    wanted = []
    for operator in chosen:
        if which == "paper":
            how = operator.load("bench").published
            rows = published.rows(operator.name) if how is not None else []
            found = [Wanted(operator.name, how.shape(row["size"], ranks), row) for row in rows]
        else:
            small = operator.small or operator.shapes
            found = [Wanted(operator.name, shape) for shape in (small if which == "small" else operator.shapes)]
        for one in found:
            check(one.shape, operator, ranks)
        wanted += found
    if not wanted:
        names = ", ".join(operator.name for operator in chosen)
        raise ArgumentError(f"there are no published figures for {names}; use 'small', or a file with shapes")
    return wanted
