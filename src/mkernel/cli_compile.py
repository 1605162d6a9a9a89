"""`mkernel compile`: compile what a call would launch, for a GPU that need not be present."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mkernel import operators, tables
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

if TYPE_CHECKING:
    from mkernel.runtime.group import Group
    from mkernel.runtime.world import Launch


@takes_options()
def compile_kernels(
    op: Annotated[str, typer.Argument(help=f"The operator: {', '.join(operators.registered('workload'))}.")],
    shape: Annotated[
        list[str] | None,
        typer.Option(metavar="MxNxK", help="As for bench: 16384x2048x8192; a small one by default. Repeatable."),
    ] = None,
    arch: Annotated[str, typer.Option(help="The GPU: sm_80 (A100), sm_90a (H100, H200), sm_100a (B200).")] = "sm_90a",
    ranks: Annotated[int, typer.Option(min=1, help="Ranks per node.")] = 4,
    nodes: Annotated[int, typer.Option(min=1, help="Nodes.")] = 1,
    dtype: Annotated[Dtype, typer.Option(help="The dtype of operands and result.")] = Dtype.bf16,
    ptx: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Also write the PTX to this file; with one shape.")
    ] = None,
    *,
    said: Said,
) -> None:
    """Compile the kernel that a call would launch, for a GPU that need not be present, and show the resources it needs.

    The exit code is 1 if it cannot be compiled.
    """
    from mkernel.compiling import capability_of, compile_launch, launched
    from mkernel.workloads import DTYPES

    workload, shapes = workload_and_shapes(op, shape, ranks * nodes)
    operator = workload.operator
    options = options_of(operator, said)
    check_file(ptx, "--ptx")
    if ptx is not None and len(shapes) > 1:
        raise typer.BadParameter(f"takes one shape, got {len(shapes)}", param_hint="--ptx")
    try:
        capability = capability_of(arch)
    except MKernelError as problem:
        raise typer.BadParameter(str(problem), param_hint="--arch") from problem
    console = Console(highlight=False)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=f"{op} for {arch}", title_justify="left")
    for name in ("shape", "kernel", "CTAs", "warps", "registers", "spilled", "shared memory", "PTX"):
        table.add_column(name, justify="left" if name in ("shape", "kernel") else "right", no_wrap=True)
    remarks = []

    def prepared(group: Group, sizes: tuple[int, ...]) -> tuple[Launch, Any]:
        tried = workload.make(group, sizes, DTYPES[dtype.value], **options).tried
        plan = tried.explain(None)  # rejects what a call would reject
        return tried.prepare(None), plan

    with failures_in_words():
        for sizes in shapes or [(operator.small or operator.shapes)[0]]:
            launch, plan = launched(functools.partial(prepared, sizes=sizes), (nodes, ranks), capability)
            compiled = compile_launch(launch, capability)
            name = "x".join(map(str, sizes))
            table.add_row(
                name, launch.kernel.fn.__name__, str(launch.grid), str(launch.options.get("num_warps", 4)),
                str(compiled.registers), str(compiled.spilled), str(compiled.shared), str(len(compiled.ptx)),
            )  # fmt: skip
            remarks += [f"{name}: {plan}", *compiled.warnings]
            if ptx is not None:
                ptx.write_text(compiled.ptx)
    tables.show(table, console)
    console.print("registers: per thread. In bytes: spilled, per thread; shared memory, per CTA; PTX, as text")
    for remark in remarks:
        console.print(escape(remark), soft_wrap=True)
    if ptx is not None:
        console.print(f"The PTX is in {escape(str(ptx))}", soft_wrap=True)
