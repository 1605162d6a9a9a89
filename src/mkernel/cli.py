"""The command line: `mkernel demo`, `mkernel bench`."""

from __future__ import annotations

import re
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

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
from mkernel.version import __version__

LINK = 450.0  # GB/s that an H100 or H200 sends over NVLink

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
                f"several nodes on CUDA are not supported yet, got {nodes}; --device cpu simulates them",
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
        typer.Option(
            metavar="MxNxK",
            help="Rows of all ranks x columns x depth, as 16384x2048x8192; for ring_attention batch, heads, positions "
            "of all ranks and head dimension, as B4xH16xS12288xD128. Repeatable.",
        ),
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
    unpaced: Annotated[bool, typer.Option("--unpaced", help="Do not pace links.")] = False,
    json: Annotated[Path | None, typer.Option(dir_okay=False, help="Also write the figures to this file.")] = None,
    causal: Annotated[bool, typer.Option("--causal", help="ring_attention: with a causal mask.")] = False,
    zigzag: Annotated[bool, typer.Option("--zigzag", help="ring_attention: in the zigzag layout.")] = False,
) -> None:
    """Measure an operator on the GPUs that are here, beside the library and the host-driven way."""
    if op not in OPS:
        raise typer.BadParameter(f"there is no operator {op!r}; there are: {', '.join(OPS)}", param_hint="OP")
    attention = op == "ring_attention"
    if (causal or zigzag) and not attention:
        raise typer.BadParameter(f"{op} has no mask and no layout of ranks", param_hint="--causal, --zigzag")
    parse = _parse_attention_shape if attention else _parse_shape
    shapes: list[Any] | None = [parse(text, ranks * nodes) for text in shape] if shape else None
    if link is not None and unpaced:
        raise typer.BadParameter("give either --link or --unpaced, not both", param_hint="--link")
    if link is not None and not link > 0:
        raise typer.BadParameter(f"must be more than 0 GB/s, got {link:g}", param_hint="--link")
    if json is not None and not json.absolute().parent.is_dir():
        raise typer.BadParameter(f"there is no folder {json.absolute().parent}", param_hint="--json")
    options: dict[str, Any] = dict(
        shapes=shapes,
        ranks=ranks,
        nodes=nodes,
        dtype=dtype.value,
        link=None if unpaced else link or LINK,
        json_path=str(json) if json is not None else None,
    )
    from mkernel import bench as benchmarks

    try:
        if attention:
            from mkernel.bench import ring_attention

            code = ring_attention.main(causal=causal, layout="zigzag" if zigzag else "contiguous", **options)
        else:
            code = benchmarks.main(op=op, **options)
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


def _parse_attention_shape(text: str, size: int) -> tuple[int, int, int, int]:
    match = re.fullmatch(r"b(\d+)xh(\d+)xs(\d+)xd(\d+)", text.strip().lower())
    batch, heads, positions, dim = (int(number) for number in match.groups()) if match else (0, 0, 0, 0)
    if not (batch and heads and positions and dim):
        raise typer.BadParameter(
            f"{text!r} is no shape; write batch, heads, positions of all ranks and head dimension: B4xH16xS12288xD128",
            param_hint="--shape",
        )
    if positions % (2 * size):
        raise typer.BadParameter(
            f"{text}: the positions of all ranks ({positions}) must be divisible by twice the number of ranks ({size})",
            param_hint="--shape",
        )
    return batch, heads, positions, dim


def _failed(problem: MKernelError) -> typer.Exit:
    typer.echo(f"mkernel: {problem}", err=True)
    return typer.Exit(1)


if __name__ == "__main__":
    main()
