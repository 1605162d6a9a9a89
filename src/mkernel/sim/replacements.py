"""Device functions that stand for others in a run: which are allowed, and that each of them was called.

A test of a protocol breaks one step of it, and sees that the simulator finds that. So that the step is not found by
its source, which a rename or another formatting would change, it is named: `Options(replace={wait_rows: no_wait})`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from mkernel.runtime.errors import ArgumentError
from mkernel.sim.interpreter import JIT


def _name(function: Any) -> str:
    return f"{function.__module__}.{function.__qualname__}" if hasattr(function, "__qualname__") else repr(function)


def check_replacements(replace: Mapping[Any, Any]) -> None:
    """Refuse what cannot be replaced."""
    for old, new in replace.items():
        for function in (old, new):
            if not isinstance(function, JIT):
                raise ArgumentError(f"replace: {_name(function)} must be a @triton.jit function")
        if old.fn is new.fn:
            raise ArgumentError(f"replace: {_name(old.fn)} would be replaced by itself, which changes nothing")
        expected, got = (list(inspect.signature(each.fn).parameters) for each in (old, new))
        if expected != got:
            raise ArgumentError(
                f"replace: {_name(new.fn)} must have the parameters ({', '.join(expected)}) of {_name(old.fn)}, "
                f"got ({', '.join(got)})"
            )


def check_reached(replace: Mapping[Any, Any], called: set[Any], failure: Exception | None = None) -> None:
    """Refuse a run that should have called these functions, and has not; it may have ended in a failure."""
    missed = [_name(old.fn) for old in replace if old.fn not in called]
    if missed:
        raise ArgumentError(
            f"replace: {', '.join(missed)} was never called in this run, so that nothing was replaced there: name a "
            f"function that the kernel calls, or run what calls it"
        ) from failure
