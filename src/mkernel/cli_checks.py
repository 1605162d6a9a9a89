"""What commands check before they begin, and how they report failures: in one line that says what to do."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import os
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mkernel import operators
from mkernel.runtime.errors import ArgumentError, MKernelError

if TYPE_CHECKING:
    from mkernel.runtime.world import Links
    from mkernel.workloads import Workload

WAYS = ("host", "nccl", "symm_mem")  # baselines of bench --against
MOST_SHARING = 128  # ranks that can share a GPU: each needs an SM, and all run at the same time
OUT_OF_MEMORY = ("allocate memory", "out of memory", "size calculation overflowed")  # torch's error messages


def check_file(path: Path | None, option: str) -> None:
    """Reject a file that could not be written at the end."""
    if path is None:
        return
    if not path.absolute().parent.is_dir():
        raise typer.BadParameter(f"there is no folder {path.absolute().parent}", param_hint=option)
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise typer.BadParameter(f"{path} cannot be written", param_hint=option)
    if option == "--html" and importlib.util.find_spec("plotly") is None:
        raise typer.BadParameter("pages need the package plotly: pip install 'mkernel-gpu[cli]'", param_hint=option)


def check_operator(op: str) -> None:
    """Reject an unknown operator before any large import."""
    try:
        operators.find(op)
    except ArgumentError as problem:
        raise typer.BadParameter(str(problem), param_hint="OP") from problem


def workload_and_shapes(
    op: str, shapes: list[str] | None, ranks: int, *needs: str
) -> tuple[Workload, list[tuple[int, ...]]]:
    """The workload of an operator, which must also have everything in `needs`, and the requested shapes."""
    try:
        operator = operators.find(op, "workload", *needs)  # reports a mistake before torch is imported
        workload = operator.load("workload")
    except MKernelError as problem:
        raise typer.BadParameter(str(problem), param_hint="OP") from problem
    from mkernel.bench.shapes import parse

    try:
        return workload, [parse(text, operator, ranks) for text in shapes or []]
    except MKernelError as problem:
        raise typer.BadParameter(str(problem), param_hint="SHAPE") from problem


class Device(str, Enum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Dtype(str, Enum):
    bf16 = "bf16"
    fp16 = "fp16"
    fp32 = "fp32"


Said = dict[str, int]  # the operator options given on the command line, by name


def takes_options(*parts: str, bench: bool = False) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a command: replace its parameter `said` by the options of all operators that have these parts, or of all
    benchmarks. The command receives those that were given as `said`."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        known = {
            option.name: option
            for operator in operators.registered(*parts).values()
            for option in operator.options
            if (option.bench if bench else option.calls)
        }

        @functools.wraps(command)
        def call(**arguments: Any) -> None:
            given = {name: arguments.pop(name) for name in known}
            command(**arguments, said={name: value for name, value in given.items() if value not in (None, False)})

        own = inspect.signature(command, eval_str=True).parameters
        if taken := set(own) & set(known):
            raise ArgumentError(
                f"operators cannot have the options {taken}: `mkernel {command.__name__}` has them already"
            )
        parameters = [parameter for name, parameter in own.items() if name != "said"]
        parameters += [_parameter(option) for option in known.values()]
        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return call

    return decorate


def _parameter(option: operators.Option) -> inspect.Parameter:
    kind: Any = bool
    parsed = typer.Option(option.flag, help=option.help)
    if option.kind is int:
        kind = int | None
        parsed = typer.Option(
            option.flag, min=1, max=option.most, show_default=option.default or False, help=option.help
        )
    default = False if option.kind is bool else None
    return inspect.Parameter(
        option.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, parsed]
    )


def options_of(operator: operators.Operator, said: Said, *, bench: bool = False) -> Said:
    """The options of an operator, or of its benchmark: those that were given, and False for flags that were not.
    Rejects options that it does not have."""
    own = {option.name: option for option in operator.options if (option.bench if bench else option.calls)}
    for name in said:
        if name not in own:
            flag = "--" + name.replace("_", "-")
            raise typer.BadParameter(f"{operator.name} has no such option", param_hint=flag)
    return {name: False for name, option in own.items() if option.kind is bool} | said


def check_gpus(ranks: int, nodes: int, option: str) -> None:
    """Reject more ranks than the GPUs of this machine, if any, could run at the same time."""
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus and ranks * nodes > gpus * MOST_SHARING:
        raise typer.BadParameter(
            f"{ranks * nodes} ranks cannot run on {gpus} GPU{'s' if gpus > 1 else ''}: each needs an SM of its own. "
            f"Use at most {gpus * MOST_SHARING}",
            param_hint=option,
        )


def shared_links(ranks: int, nodes: int, link: float | None, network: float | None) -> Links:
    """The links of ranks that share the GPUs of this machine."""
    import torch

    from mkernel.runtime.world import Links

    sharing = -(-ranks * nodes // max(torch.cuda.device_count(), 1))
    between = network is not None and nodes > 1
    return Links(
        nvlink=link / sharing if link and ranks > 1 else None,
        network=network / sharing if network and between else None,
        network_latency=5e-6 if between else 0.0,
    )


@contextlib.contextmanager
def failures_in_words() -> Iterator[None]:
    """Report failures that are not bugs of this package in one line, with exit code 1, instead of a traceback."""
    try:
        yield
    except BrokenPipeError:
        raise  # the reader of our output has gone: see CommandLine
    except (MKernelError, OSError) as problem:
        words = str(problem)
    except RuntimeError as problem:
        if not any(sign in str(problem) for sign in OUT_OF_MEMORY):
            raise
        words = f"not enough memory: {str(problem).splitlines()[0]}"
    else:
        return
    typer.echo(f"mkernel: {words}", err=True)
    raise typer.Exit(1)


def ways_of(against: str) -> tuple[str, ...]:
    """The baselines that --against lists."""
    ways = tuple(way.strip() for way in against.split(",") if way.strip())
    for way in ways:
        if way not in WAYS:
            raise typer.BadParameter(f"unknown baseline {way!r}; choose from {', '.join(WAYS)}", param_hint="--against")
    return ways
