"""The registry of operators: one entry for each, from which every tool learns what it needs about it.

This module itself knows no operator. A package registers its operators when it is imported:

    register(Operator(name="shift", summary="gives each rank the vector of its neighbour", ...))

`mkernel demo`, `bench`, `trace`, `tune`, `check`, `compile` and `plan`, `mk.explain`, wait records and traces find them
here. A separately installed package names its module in the entry point group `mkernel.operators`; that module is
imported when all operators are first requested.

Entries are cheap to import. What only a tool needs (inputs for the demo, a benchmark) is given as a reference,
"package.module:name", and imported on first use.
"""

from __future__ import annotations

import importlib
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from mkernel.runtime.errors import ArgumentError

GROUP = "mkernel.operators"  # entry point group
OWN_SIGNALS = 16  # first kind of an operator's own; lower kinds are shared by all operators, see lang/signals.py

Shape = tuple[int, ...]
Reference = str | Callable[..., Any]  # "package.module:name", or the object itself


@dataclass(frozen=True)
class Signal:
    """A kind of signal that an operator waits for, and its name in wait records and traces.

    kind: what its kernels pass as KIND to `wait`, at least 16: a number, or a reference to a tl.constexpr.
    awaited: completes the sentence "rank 1 waited for ..."; {peer} and {index} are those of the wait.
    """

    kind: int | str
    name: str
    awaited: str = "rank {peer} (index {index})"

    @property
    def number(self) -> int:
        """The kind as a number; resolves a reference."""
        return self.kind if isinstance(self.kind, int) else int(resolve(self.kind).value)


@dataclass(frozen=True)
class Option:
    """A command-line option for an operator's calls: the name `kv_heads` becomes --kv-heads.

    kind: bool for a flag, int for a number of at least 1. most: the largest number. default: the default, described for
        the help text. bench: the benchmark accepts the option. calls: tune, compile and plan do.
    """

    name: str
    help: str
    kind: type = bool
    most: int | None = None
    default: str = ""
    bench: bool = False
    calls: bool = True

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")


BACKWARD = Option("backward", "Measure the backward pass: the gradients of both operands.", bench=True, calls=False)

SCALING = (
    Option("tensorwise", "fp8: one scale for each operand, instead of one for each row and column.", bench=True),
    Option("blockwise", "fp8: scales for blocks of 1x128 and 128x128.", bench=True),
    Option("fast_accum", "fp8: fast accumulation. Not with --blockwise.", bench=True),
)
QUANTIZE = Option("quantize", "fp8: the kernel quantizes what it sends, which is bf16.", bench=True)


@dataclass(frozen=True)
class Operator:
    """An operator's entry: everything that tools need to know without importing the operator.

    name: the name of the public function, used in every table, trace and error.
    summary: what it does, in one line.
    function, explain: the public function, and the one that returns its plan; both have the same parameters.
    dimensions: the names of the numbers of a shape, in command-line order.
    shared: those of them that are divided among the ranks.
    shapes, small: shapes for GPUs: what `mkernel bench` measures by default, and with `--shapes small`.
    signals: the operator's own signals, besides those that all operators share.
    options: additional command-line options for its calls.
    workload: a `mkernel.workloads.Workload`, for trace, tune, check, compile and plan.
    space: (group, plan) -> `mkernel.tuning.spaces.Space`, the configurations that tune tries.
    demo: a `mkernel.demo.case.Demo`, for demo and check.
    bench: a `mkernel.bench.benchmark.Benchmark`, for bench.
    model: a `mkernel.scale.model.Model`, for plan.
    part_of: the operator whose demo includes this one; "" if it has its own.
    co_resident: do CTAs of a launch wait for each other in both directions, so that all must be resident?
    """

    name: str
    summary: str
    function: Reference
    explain: Reference
    dimensions: tuple[str, ...]
    shared: tuple[str, ...]
    shapes: tuple[Shape, ...]
    small: tuple[Shape, ...] = ()
    signals: tuple[Signal, ...] = ()
    options: tuple[Option, ...] = ()
    workload: Reference | None = None
    space: Reference | None = None
    demo: Reference | None = None
    bench: Reference | None = None
    model: Reference | None = None
    part_of: str = ""
    co_resident: bool = False

    def load(self, part: str) -> Any:
        """Resolve one of the entry's references: "function", "explain", "workload", "demo", "bench" and so on."""
        named = getattr(self, part)
        if named is None:
            others = ", ".join(registered(part)) or "no operator"
            raise ArgumentError(
                f"{self.name} has no {part} in its registry entry; operators that have one: {others}. Add one to an "
                f"operator of your own with Operator(..., {part}='module:name')"
            )
        try:
            return resolve(named)
        except ArgumentError as problem:
            raise ArgumentError(f"{self.name} was registered with {part}={named!r}: {problem}") from problem


def resolve(reference: Reference) -> Any:
    """The object that a reference names, imported if necessary."""
    if not isinstance(reference, str):
        return reference
    module, _, name = reference.partition(":")
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as problem:
        if problem.name is None or not f"{module}.".startswith(f"{problem.name}."):
            raise  # the module exists, but something it imports does not
        raise ArgumentError(f"there is no module {module!r}; write 'package.module:name'") from problem
    if not name or not hasattr(found, name):
        raise ArgumentError(f"module {module!r} has no {name!r}; write 'package.module:name'")
    return getattr(found, name)


_registered: dict[str, Operator] = {}
_lock = threading.RLock()  # ranks may be threads
_discovered = False
_thread = threading.local()  # discovering: this thread is importing operators


def register(operator: Operator) -> Operator:
    """Make an operator known to all tools. Registering the same entry again has no effect."""
    _check(operator)
    with _lock:
        known = _registered.get(operator.name)
        if known is not None and known != operator:
            raise ArgumentError(
                f"an operator {operator.name!r} is already registered, with a different entry: choose another name"
            )
        for option in operator.options:
            for other in _registered.values():
                if any(theirs.name == option.name and theirs != option for theirs in other.options):
                    raise ArgumentError(
                        f"{operator.name}: {other.name} already has a different option {option.flag}; choose another "
                        f"name, or use the same Option"
                    )
        _registered[operator.name] = operator
    return operator


def unregister(name: str) -> None:
    """Remove an operator from the registry."""
    with _lock:
        _registered.pop(name, None)


def registered(*parts: str) -> dict[str, Operator]:
    """All operators by name, in order of registration; only those that have all of `parts`, if any are given."""
    _discover()
    with _lock:
        return {
            name: operator
            for name, operator in _registered.items()
            if all(getattr(operator, part) is not None for part in parts)
        }


def find(name: str, *parts: str) -> Operator:
    """The operator with this name and all of `parts`; otherwise an error that lists the available operators."""
    known = registered(*parts)
    if name not in known:
        if name in registered():
            missing = next(part for part in parts if getattr(registered()[name], part) is None)
            registered()[name].load(missing)  # raises
        what = f"operator {name!r}" if isinstance(name, str) else f"{type(name).__name__} among the names of operators"
        raise ArgumentError(f"there is no {what}; there are: {', '.join(known)}")
    return known[name]


def signal_of(op: str, kind: int) -> Signal | None:
    """One of an operator's own signals, by number."""
    return next((signal for signal in _signals(op) if signal.number == kind), None)


def signal_named(op: str, name: str) -> Signal | None:
    """One of an operator's own signals, by name."""
    return next((signal for signal in _signals(op) if signal.name == name), None)


def _signals(op: str) -> tuple[Signal, ...]:
    operator = registered().get(op)
    return operator.signals if operator is not None else ()


def _check(operator: Operator) -> None:
    """Reject an entry that tools could not use."""
    if not operator.name.isidentifier():
        raise ArgumentError(f"an operator's name must be a Python identifier; got {operator.name!r}")
    where = f"operator {operator.name}"
    for name in set(operator.shared) - set(operator.dimensions):
        raise ArgumentError(
            f"{where}: shared contains {name!r}, which is not one of the dimensions {operator.dimensions}"
        )
    if not operator.shapes:
        raise ArgumentError(f"{where}: shapes must contain at least one shape, for a GPU")
    for shape in (*operator.shapes, *operator.small):
        if len(shape) != len(operator.dimensions):
            raise ArgumentError(f"{where}: the shape {shape} must have one number for each of {operator.dimensions}")
    kinds = [signal.kind for signal in operator.signals]
    for kind in kinds:
        if (isinstance(kind, int) and kind < OWN_SIGNALS) or kinds.count(kind) > 1:
            raise ArgumentError(f"{where}: signals must have distinct kinds of at least {OWN_SIGNALS}; got {kind}")
    for option in operator.options:
        if not option.name.isidentifier() or option.kind not in (bool, int):
            raise ArgumentError(
                f"{where}: an option must have an identifier as its name, and bool or int as its kind; got {option}"
            )


def _discover() -> None:
    """Import the operators of this package and of others. An entry point that fails to load is skipped with a
    warning.

    Several threads may call this at the same time, and a module that is being imported may use the registry. So no
    lock is held during imports: every thread imports the modules, and Python's import lock makes it wait for a thread
    that is already importing them."""
    global _discovered
    if _discovered or getattr(_thread, "discovering", False):
        return
    _thread.discovering = True
    try:
        importlib.import_module("mkernel.ops")  # registers this package's operators
        for point in metadata.entry_points(group=GROUP):
            _load(point)
        _discovered = True
    finally:
        _thread.discovering = False


def _load(point: metadata.EntryPoint) -> None:
    try:
        found = point.load()
        if isinstance(found, Operator):
            register(found)
    except Exception as problem:
        warnings.warn(
            f"mkernel: the operators of {point.value!r} (entry point {point.name!r}) are skipped: "
            f"{type(problem).__name__}: {problem}",
            stacklevel=2,
        )
