"""`mkernel plan`: predicts the time of calls on clusters that need not exist."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from mkernel import operators
from mkernel.cli_checks import (
    Dtype,
    Said,
    check_file,
    failures_in_words,
    options_of,
    takes_options,
    workload_and_shapes,
)
from mkernel.runtime.errors import MKernelError


class Scaling(str, Enum):
    weak = "weak"
    strong = "strong"


class Nic(str, Enum):
    cx7 = "cx7"
    efa = "efa"


@takes_options("model")
def plan(
    op: Annotated[
        str | None, typer.Argument(help=f"The operator: {', '.join(operators.registered('workload', 'model'))}.")
    ] = None,
    shape: Annotated[
        str | None,
        typer.Argument(metavar="SHAPE", help="As for bench, on the first number of nodes; its first one by default."),
    ] = None,
    nodes: Annotated[str, typer.Option(help="2:1024 for powers of two, or a list such as 2,3,8.")] = "1:128",
    gpus_per_node: Annotated[
        int | None, typer.Option(min=1, show_default="the machine's", help="Ranks per node.")
    ] = None,
    machine: Annotated[
        str, typer.Option(help="h200-cx7, h200-efa, h100-cx7, gb200-nvl72, or a file, see --calibrate.")
    ] = "h200-cx7",
    nic: Annotated[Nic | None, typer.Option(show_default="the machine's", help="The network between nodes.")] = None,
    scaling: Annotated[
        Scaling, typer.Option(help="weak: what is divided among the ranks grows with them; strong: the shape stays.")
    ] = Scaling.weak,
    search: Annotated[bool, typer.Option("--search", help="Look for the best split of CTAs, and chunks.")] = False,
    layer: Annotated[
        str | None, typer.Option(help="A whole layer instead of an operator, such as mlp; the shape is the layer's.")
    ] = None,
    dtype: Annotated[
        Dtype, typer.Option(help="The dtype of operands and result: bf16 or fp16, at the same rates.")
    ] = Dtype.bf16,
    late: Annotated[
        float, typer.Option(min=0, metavar="us", help="One rank begins this many microseconds after the others.")
    ] = 0.0,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    html: Annotated[Path | None, typer.Option(dir_okay=False, help="Also write a page with plots.")] = None,
    calibrate: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False, help="Measure the network and the GPUs of this machine, and write a machine to this file."
        ),
    ] = None,
    *,
    said: Said,
) -> None:
    """Predict how long calls of an operator take on clusters that you do not have, and what bounds them.

    The plan of a call is carried out on a model of the machine; docs/scale.md says how far to trust it.
    """
    if calibrate is not None:
        if op is not None or layer is not None:
            _refuse({}, f"only measures; predict with --machine {calibrate} afterwards", **{"--calibrate": True})
        given = {"--gpus-per-node": gpus_per_node, "--nic": nic, "--search": search, "--late": late, "--json": json}
        _refuse(said, "not possible with --calibrate, which only measures", **given, **{"--html": html})
        _calibrate(calibrate, machine)
        return
    if layer is None and op is None:
        raise typer.BadParameter("name an operator, or a layer with --layer", param_hint="OP")
    check_file(html, "--html")
    from mkernel.bench.shapes import check as check_shape
    from mkernel.scale import layers
    from mkernel.scale.command import Asked, default_shape, divisible, parse_nodes, run, run_layer
    from mkernel.scale.machine import load, with_network
    from mkernel.scale.predict import check_dtype
    from mkernel.workloads import DTYPES

    try:
        numbers = parse_nodes(nodes)
    except MKernelError as problem:
        raise typer.BadParameter(str(problem), param_hint="--nodes") from problem
    try:
        chosen = load(machine)
        if nic is not None:
            chosen = with_network(chosen, f"h200-{nic.value}")
    except MKernelError as problem:
        raise typer.BadParameter(str(problem), param_hint="--machine") from problem
    try:
        check_dtype(DTYPES[dtype.value], chosen)
    except MKernelError as problem:
        raise typer.BadParameter(str(problem), param_hint="--dtype") from problem
    ranks = gpus_per_node or chosen.gpus_per_node
    console = Console(highlight=False)
    weak, lenient = scaling is Scaling.weak, ":" in nodes
    if layer is not None:
        _refuse({}, "the shape of a layer is the only argument", SHAPE=shape)
        _refuse(said, "not possible with --layer", **{"--search": search, "--late": late, "--html": html})
        try:
            sizes = layers.parse(layer, op)  # without an operator, the first argument is the shape
            numbers, note = divisible(
                numbers, lambda n: layers.check(layer, layers.shape_on(sizes, n, numbers[0], weak), n * ranks),
                weak=weak, lenient=lenient,
            )  # fmt: skip
        except MKernelError as problem:
            raise typer.BadParameter(str(problem), param_hint="--layer") from problem
        _note(note)
        with failures_in_words():
            run_layer(
                layer, sizes, numbers, ranks, chosen, DTYPES[dtype.value], weak=weak, as_json=json, console=console
            )
        return
    assert op is not None
    # a shape that stays is checked for each number of nodes below
    workload, parsed = workload_and_shapes(op, [shape] if shape else None, numbers[0] * ranks if weak else 1, "model")
    operator = workload.operator
    sizes = parsed[0] if parsed else default_shape(operator, numbers[0] * ranks)
    if not weak:
        try:
            numbers, note = divisible(
                numbers, lambda n: check_shape(sizes, operator, n * ranks), weak=False, lenient=lenient
            )
        except MKernelError as problem:
            raise typer.BadParameter(str(problem), param_hint="SHAPE") from problem
        _note(note)
    asked = Asked(
        operator=operator,
        shape=sizes,
        nodes=numbers,
        gpus_per_node=ranks,
        machine=chosen,
        dtype=DTYPES[dtype.value],
        options=options_of(operator, said),
        weak=weak,
        search=search,
        timeline=html is not None,
        late=late * 1e-6,
    )
    with failures_in_words():
        run(asked, as_json=json, html=html, console=console)


def _refuse(said: Said, why: str, **given: object) -> None:
    """Reject options that do not apply, if they were given."""
    flags = [name for name, value in given.items() if value] + ["--" + name.replace("_", "-") for name in said]
    if flags:
        raise typer.BadParameter(why, param_hint=flags[0])


def _note(text: str) -> None:
    if text:
        typer.echo(f"mkernel: {text}", err=True)


def _calibrate(path: Path, machine: str) -> None:
    check_file(path, "--calibrate")
    if path.suffix != ".json":
        raise typer.BadParameter(f"the name must end in .json, got {path}", param_hint="--calibrate")
    from mkernel.scale.calibrate import calibrate

    terminal = Console(stderr=True)
    with failures_in_words(), terminal.status("") as status:
        found, how = calibrate(path, machine, lambda what: status.update(f"measuring {what}"))
    typer.echo(
        f"measured on this machine: {how}. Network: {found['network'] / 1e9:.3g} GB/s, "
        f"{found['network_seconds'] * 1e6:.3g} us from a request to its signal, "
        f"{found['request_seconds'] * 1e6:.3g} us for each of many. All else is from {machine}: {path}"
    )
