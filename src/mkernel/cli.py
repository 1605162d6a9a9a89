"""The command line: `mkernel demo`, `mkernel bench`, `mkernel trace`, `mkernel tune`."""

from __future__ import annotations

import re
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

try:
    import typer
    from rich.console import Console
except ImportError as missing:
    # the script that pip installs imports this module and nothing else: one line instead of a traceback
    raise SystemExit(
        f"mkernel: the command line needs the package {missing.name}: pip install mkernel[cli]"
    ) from missing

from mkernel.runtime.errors import MKernelError
from mkernel.runtime.records import OPS
from mkernel.runtime.world import Links
from mkernel.version import __version__

if TYPE_CHECKING:
    from mkernel.workloads import Workload

LINK = 450.0  # GB/s that an H100 or H200 sends over NVLink
NETWORK = 50.0  # GB/s that it sends through a network card of its own: 400 Gb/s

main = typer.Typer(
    help="Distributed GPU operators for PyTorch, each of them one persistent kernel per rank.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)


class Device(str, Enum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Dtype(str, Enum):
    bf16 = "bf16"
    fp16 = "fp16"
    fp32 = "fp32"


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"mkernel {__version__}")
        raise typer.Exit


@main.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@main.command()
def demo(
    nodes: Annotated[int | None, typer.Option(min=1, show_default="2; 1 on CUDA", help="Nodes.")] = None,
    gpus_per_node: Annotated[
        int | None, typer.Option(min=1, show_default="2; 4 on CUDA", help="Ranks of each node.")
    ] = None,
    device: Annotated[
        Device, typer.Option(help="cpu is the simulator; auto is cuda where there is a GPU, for one node.")
    ] = Device.auto,
    seed: Annotated[int, typer.Option(help="Of the first simulated schedule; on CUDA, of the inputs.")] = 0,
) -> None:
    """Run all_gather_matmul on a small cluster, check it, and show what moved where.

    The exit code is 1 if anything is wrong.
    """
    import torch

    chosen = device.value
    if chosen == "auto":
        chosen = "cuda" if torch.cuda.is_available() and nodes in (None, 1) else "cpu"
    if chosen == "cuda":
        if not torch.cuda.is_available():
            raise typer.BadParameter("torch sees no GPU; --device cpu is the simulator", param_hint="--device")
        if nodes not in (None, 1):
            raise typer.BadParameter(
                f"the demo on CUDA shows one node, got {nodes}; --device cpu simulates several",
                param_hint="--nodes",
            )
    default_nodes, default_gpus = (1, 4) if chosen == "cuda" else (2, 2)
    from mkernel import demo as demonstration

    try:
        code = demonstration.run(
            nodes or default_nodes, gpus_per_node or default_gpus, chosen, seed, Console(highlight=False)
        )
    except MKernelError as problem:
        raise _failed(problem) from problem
    raise typer.Exit(code)


@main.command()
def bench(
    op: Annotated[str, typer.Argument(help=f"The operator: {', '.join(OPS)}.")],
    shape: Annotated[
        list[str] | None,
        typer.Option(metavar="MxNxK", help="Rows of all ranks x columns x depth, as 16384x2048x8192. Repeatable."),
    ] = None,
    ranks: Annotated[int, typer.Option(min=1, help="Ranks of each node.")] = 4,
    nodes: Annotated[int, typer.Option(min=1, help="Nodes.")] = 1,
    dtype: Annotated[Dtype, typer.Option(help="Of the operands and the result.")] = Dtype.bf16,
    link: Annotated[
        float | None,
        typer.Option(
            metavar="GB/S", show_default="450", help="Pace the link of a GPU to this rate; ranks on one GPU share it."
        ),
    ] = None,
    network: Annotated[
        float | None,
        typer.Option(metavar="GB/S", show_default="50", help="The same for its way to other nodes, with 5 us latency."),
    ] = None,
    unpaced: Annotated[bool, typer.Option("--unpaced", help="Do not pace links.")] = False,
    json: Annotated[Path | None, typer.Option(dir_okay=False, help="Also write the figures to this file.")] = None,
) -> None:
    """Measure an operator on the GPUs that are here, beside the library and the host-driven way."""
    if op not in OPS:
        raise typer.BadParameter(f"there is no operator {op!r}; there are: {', '.join(OPS)}", param_hint="OP")
    shapes = [_parse_shape(text, ranks * nodes) for text in shape] if shape else None
    for name, rate in (("--link", link), ("--network", network)):
        if rate is not None and unpaced:
            raise typer.BadParameter(f"give either {name} or --unpaced, not both", param_hint=name)
        if rate is not None and not rate > 0:
            raise typer.BadParameter(f"must be more than 0 GB/s, got {rate:g}", param_hint=name)
    if json is not None and not json.absolute().parent.is_dir():
        raise typer.BadParameter(f"there is no folder {json.absolute().parent}", param_hint="--json")
    from mkernel import bench as benchmarks

    try:
        code = benchmarks.main(
            op=op,
            shapes=shapes,
            ranks=ranks,
            nodes=nodes,
            dtype=dtype.value,
            link=None if unpaced else link or LINK,
            network=None if unpaced else network or NETWORK,
            json_path=str(json) if json is not None else None,
        )
    except MKernelError as problem:
        raise _failed(problem) from problem
    raise typer.Exit(code)


def _parse_shape(text: str, size: int) -> tuple[int, int, int]:
    match = re.fullmatch(r"(\d+)x(\d+)x(\d+)", text.strip().lower())
    m, n, k = (int(number) for number in match.groups()) if match else (0, 0, 0)
    if not (m and n and k):
        raise typer.BadParameter(
            f"{text!r} is no shape; write m_total x n x k as three whole numbers, 1 or more: 16384x2048x8192",
            param_hint="--shape",
        )
    if m % size:
        raise typer.BadParameter(
            f"{text}: the rows of all ranks ({m}) must be divisible by the number of ranks ({size})",
            param_hint="--shape",
        )
    return m, n, k


@main.command()
def trace(
    op: Annotated[str, typer.Argument(help="The operator.")],
    shapes: Annotated[
        list[str] | None,
        typer.Argument(metavar="SHAPE...", help="As for bench: 16384x2048x8192; a small one by default."),
    ] = None,
    out: Annotated[
        Path,
        typer.Option(dir_okay=False, help="For Perfetto; a page for the browser goes beside it, as .html."),
    ] = Path("trace.json"),
    ranks: Annotated[int, typer.Option(min=1, help="Ranks of each node.")] = 4,
    nodes: Annotated[int, typer.Option(min=1, help="Nodes.")] = 1,
    device: Annotated[
        Device, typer.Option(help="cpu is the simulator; auto is cuda where there is a GPU.")
    ] = Device.auto,
    dtype: Annotated[Dtype, typer.Option(help="Of the operands and the result.")] = Dtype.bf16,
    calls: Annotated[int, typer.Option(min=1, help="Calls of each shape, one after the other.")] = 2,
    events: Annotated[int, typer.Option(min=1, help="Events that each role of a CTA has room for.")] = 4096,
    unpaced: Annotated[bool, typer.Option("--unpaced", help="Do not pace links (on a GPU).")] = False,
    seed: Annotated[int, typer.Option(help="Of the simulated schedule.")] = 0,
) -> None:
    """Write down what every CTA of every rank did and when: a file for Perfetto, and a page with a timeline."""
    import torch

    from mkernel.workloads import DTYPES

    workload, parsed = _workload(op, shapes, ranks * nodes)
    if not out.absolute().parent.is_dir():
        raise typer.BadParameter(f"there is no folder {out.absolute().parent}", param_hint="--out")
    chosen = ("cuda" if torch.cuda.is_available() else "cpu") if device is Device.auto else device.value
    if chosen == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter("torch sees no GPU; --device cpu is the simulator", param_hint="--device")
    default = workload.on_gpu if chosen == "cuda" else workload.smallest(ranks * nodes)
    from mkernel.tracing import command

    try:
        traced = command.run(
            workload,
            parsed or [default],
            nodes=nodes,
            gpus_per_node=ranks,
            device=chosen,
            dtype=DTYPES[dtype.value],
            links=_links(ranks, nodes, None if unpaced else LINK, None if unpaced else NETWORK),
            calls=calls,
            room=events,
            seed=seed,
        )
        command.show(traced, out, out.with_suffix(".html"), Console(highlight=False))
    except MKernelError as problem:
        raise _failed(problem) from problem


@main.command()
def tune(
    op: Annotated[str, typer.Argument(help="The operator.")],
    shapes: Annotated[
        list[str] | None,
        typer.Argument(metavar="SHAPE...", help="As for bench: 16384x2048x8192, which is the default."),
    ] = None,
    ranks: Annotated[int, typer.Option(min=1, help="Ranks of each node.")] = 4,
    nodes: Annotated[int, typer.Option(min=1, help="Nodes.")] = 1,
    dtype: Annotated[Dtype, typer.Option(help="Of the operands and the result.")] = Dtype.bf16,
    seconds: Annotated[float, typer.Option(min=1, help="For each shape.")] = 120.0,
    unpaced: Annotated[
        bool,
        typer.Option("--unpaced", help="Do not pace links, though ranks share a GPU; for calls in the same place."),
    ] = False,
) -> None:
    """Measure configurations of an operator on the GPUs that are here, and keep the best: later calls take it.

    It is kept in the file that MKERNEL_TUNED_FILE names, or in mkernel/tuned.json in the user's cache folder.
    """
    import torch

    from mkernel.workloads import DTYPES

    workload, parsed = _workload(op, shapes, ranks * nodes)
    if not torch.cuda.is_available():
        typer.echo("mkernel tune measures time, which needs a GPU; there is none here.", err=True)
        raise typer.Exit(1)
    from mkernel.tuning import command

    # several GPUs have real links; ranks that share one get paced ones, as in a benchmark
    shared = torch.cuda.device_count() < ranks * nodes and not unpaced
    try:
        command.run(
            workload,
            parsed or [workload.on_gpu],
            nodes=nodes,
            gpus_per_node=ranks,
            dtype=DTYPES[dtype.value],
            links=_links(ranks, nodes, LINK if shared else None, NETWORK if shared else None),
            seconds=seconds,
            console=Console(highlight=False),
        )
    except MKernelError as problem:
        raise _failed(problem) from problem


def _workload(op: str, shapes: list[str] | None, ranks: int) -> tuple[Workload, list[tuple[int, ...]]]:
    """The workload of an operator, and the shapes that were asked for."""
    from mkernel.workloads import workload_of

    try:
        workload = workload_of(op)
    except MKernelError as problem:
        raise typer.BadParameter(str(problem), param_hint="OP") from problem
    try:
        return workload, [workload.parse(text, ranks) for text in shapes or []]
    except MKernelError as problem:
        raise typer.BadParameter(str(problem), param_hint="SHAPE") from problem


def _links(ranks: int, nodes: int, link: float | None, network: float | None) -> Links:
    """The links of ranks that share the GPUs which are here."""
    import torch

    sharing = -(-ranks * nodes // max(torch.cuda.device_count(), 1))
    between = network is not None and nodes > 1
    return Links(
        nvlink=link / sharing if link and ranks > 1 else None,
        network=network / sharing if network and between else None,
        network_latency=5e-6 if between else 0.0,
    )


def _failed(problem: MKernelError) -> typer.Exit:
    typer.echo(f"mkernel: {problem}", err=True)
    return typer.Exit(1)


if __name__ == "__main__":
    main()
