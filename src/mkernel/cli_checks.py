"""What commands check before they begin, and how they fail: in a line that says what to do."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from mkernel import operators
from mkernel.runtime.errors import MKernelError

if TYPE_CHECKING:
    from mkernel.runtime.world import Links
    from mkernel.workloads import Workload

MOST_SHARING = 128  # ranks that can share a GPU: each needs an SM, and all run at the same time
OUT_OF_MEMORY = ("allocate memory", "out of memory", "size calculation overflowed")  # what torch says then


def check_file(path: Path | None, option: str) -> None:
    """Refuse a file that could not be written in the end."""
    if path is None:
        return
    if not path.absolute().parent.is_dir():
        raise typer.BadParameter(f"there is no folder {path.absolute().parent}", param_hint=option)
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise typer.BadParameter(f"{path} can not be written", param_hint=option)
    if option == "--html" and importlib.util.find_spec("plotly") is None:
        raise typer.BadParameter("pages need the package plotly: pip install 'mkernel-gpu[cli]'", param_hint=option)


def check_operator(op: str) -> None:
    """Refuse an operator that is not there, before anything large is imported."""
    if op not in operators.with_parts():
        names = ", ".join(operators.with_parts())
        raise typer.BadParameter(f"there is no operator {op!r} here; there are: {names}", param_hint="OP")


def workload_and_shapes(op: str, shapes: list[str] | None, ranks: int) -> tuple[Workload, list[tuple[int, ...]]]:
    """The workload of an operator, and the shapes that were asked for."""
    check_operator(op)
    from mkernel.workloads import workload_of

    workload = workload_of(op)
    try:
        return workload, [workload.parse(text, ranks) for text in shapes or []]
    except MKernelError as problem:
        raise typer.BadParameter(str(problem), param_hint="SHAPE") from problem


def check_gpus(ranks: int, nodes: int, option: str) -> None:
    """Refuse more ranks than the GPUs that are here, if any, could run at the same time."""
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus and ranks * nodes > gpus * MOST_SHARING:
        raise typer.BadParameter(
            f"{ranks * nodes} ranks can not run on {gpus} GPU{'s' if gpus > 1 else ''}: each needs an SM for itself. "
            f"There can be {gpus * MOST_SHARING} at most",
            param_hint=option,
        )


def shared_links(ranks: int, nodes: int, link: float | None, network: float | None) -> Links:
    """The links of ranks that share the GPUs which are here."""
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
    """What is no mistake in this package ends in a line, and exit code 1, instead of a traceback."""
    try:
        yield
    except BrokenPipeError:
        raise  # nobody reads any more: see CommandLine
    except (MKernelError, OSError) as problem:
        words = str(problem)
    except RuntimeError as problem:
        if not any(sign in str(problem) for sign in OUT_OF_MEMORY):
            raise
        words = f"there is not enough memory for that: {str(problem).splitlines()[0]}"
    else:
        return
    typer.echo(f"mkernel: {words}", err=True)
    raise typer.Exit(1)
