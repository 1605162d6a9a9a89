"""Device functions with some of their lines changed, for variants that must be found broken."""

from __future__ import annotations

import inspect
import itertools
import linecache
import textwrap
from typing import Any

_numbers = itertools.count()


def edited(function: Any, *changes: tuple[str, str]) -> Any:
    """A @jit function like this one, but with these changes of its source: what it contains once, and what stands there
    instead. Spaces at the ends of lines and the indentation of the whole do not count."""
    source = textwrap.dedent(inspect.getsource(function.fn))
    for old, new in changes:
        old, new = (textwrap.dedent(text).strip("\n") for text in (old, new))
        places = [i for i in range(len(source.splitlines())) if _is_at(source.splitlines(), i, old.splitlines())]
        assert len(places) == 1, f"{function.fn.__name__} contains this {len(places)} times: {old}"
        lines = source.splitlines()
        indent = lines[places[0]][: len(lines[places[0]]) - len(lines[places[0]].lstrip())]
        lines[places[0] : places[0] + len(old.splitlines())] = [indent + line for line in new.splitlines()]
        source = "\n".join(lines) + "\n"
    name = f"{inspect.getsourcefile(function.fn)} (edited {next(_numbers)})"
    linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name
    around = dict(function.fn.__globals__)
    exec(compile(source, name, "exec", flags=_ANNOTATIONS), around)
    return around[function.fn.__name__]


def _is_at(lines: list[str], place: int, wanted: list[str]) -> bool:
    """Do these lines stand here, with any indentation?"""
    found = textwrap.dedent("\n".join(lines[place : place + len(wanted)])).splitlines()
    return [line.rstrip() for line in found] == [line.rstrip() for line in wanted]


_ANNOTATIONS = __import__("__future__").annotations.compiler_flag
