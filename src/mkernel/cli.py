"""The command line: `mkernel --help` lists its commands."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

try:
    import typer
    from rich.console import Console
    from rich.markup import escape
except ImportError as missing:
    # the script that pip installs imports only this module: print one line instead of a traceback
    raise SystemExit(
        f"mkernel: the command line needs the package {missing.name}: pip install 'mkernel-gpu[cli]'"
    ) from missing

from mkernel import operators
from mkernel.cli_checks import (
    Device,
    Dtype,
    Said,
    check_file,
    check_gpus,
    check_operator,
    failures_in_words,
    options_of,
    shared_links,
    takes_options,
    ways_of,
    workload_and_shapes,
)
from mkernel.cli_compile import compile_kernels
from mkernel.cli_plan import plan as plan_calls
from mkernel.runtime.errors import MKernelError
from mkernel.version import __version__

if TYPE_CHECKING:
    from mkernel.bench.shapes import Wanted
    from mkernel.estimates import Simulation, Watch
    from mkernel.runtime.group import Group
    from mkernel.tracing import Trace

LINK = 450.0  # GB/s, the NVLink send rate of an H100 or H200
NETWORK = 50.0  # GB/s, the send rate of one 400 Gb/s network card per GPU


class CommandLine(typer.Typer):
    """Ends silently, as other Unix tools do, when the reader of its output goes away (`mkernel doctor | head`)."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        try:
            try:
                return super().__call__(*arguments, **options)
            finally:
                sys.stdout.flush()
        except BrokenPipeError:
            pass
        except SystemExit as end:  # typer and rich exit with 1 when a pipe is broken
            if not isinstance(end.__context__, BrokenPipeError):
                raise
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGPIPE)


main = CommandLine(
    help="Distributed GPU operators for PyTorch, each a single persistent kernel per rank.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)


def _names(*parts: str) -> str:
    """The names of the operators that have all of `parts`, for help texts."""
    return ", ".join(operators.registered(*parts))


Yes = Annotated[bool, typer.Option("--yes", help="Simulate without asking, however long it will take.")]


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
        int | None, typer.Option(min=1, show_default="2; 4 on CUDA", help="Ranks per node.")
    ] = None,
    device: Annotated[
        Device, typer.Option(help="cpu is the simulator; auto is cuda where there is a GPU, for one node.")
    ] = Device.auto,
    seed: Annotated[int, typer.Option(help="Seed of the first simulated schedule; on CUDA, of the inputs.")] = 0,
    html: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Also write a page with plots to this file.")
    ] = None,
    yes: Yes = False,
) -> None:
    """Run every operator on a small cluster, check its result, and show what moved where.

    The exit code is 1 if anything is wrong.
    """
    check_file(html, "--html")
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

    nodes, gpus_per_node = nodes or default_nodes, gpus_per_node or default_gpus
    page = str(html) if html is not None else None
    console = Console(highlight=False)
    with failures_in_words():
        if chosen == "cuda":
            check_gpus(gpus_per_node, nodes, "--gpus-per-node")
            code = demonstration.run(nodes, gpus_per_node, chosen, seed, console, html=page)
        else:
            simulation = demonstration.simulation(nodes * gpus_per_node)
            few = "mkernel demo --device cpu --nodes 2 --gpus-per-node 2"
            with _simulating(simulation, yes, "--gpus-per-node", few) as watch:
                code = demonstration.run(nodes, gpus_per_node, chosen, seed, console, html=page, begin=watch.begin)
    raise typer.Exit(code)


@main.command()
@takes_options(bench=True)
def bench(
    op: Annotated[
        str | None,
        typer.Argument(show_default="all", help=f"The operator: {_names('bench')}."),
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(metavar="MxNxK", help="Sizes over all ranks, as 16384x2048x8192; needs OP. Repeatable."),
    ] = None,
    shapes: Annotated[
        str | None,
        typer.Option(
            metavar="small|paper|FILE",
            help="A set of shapes: small ones, those of the published tables (shown next to the published figures), "
            "or a file with an operator and a shape on each line.",
        ),
    ] = None,
    against: Annotated[
        str,
        typer.Option(
            metavar="host,nccl,symm_mem",
            help="Baselines: host-driven copies (always), NCCL (one GPU per rank), and PyTorch's symmetric memory "
            "(in processes under MPS if ranks share a GPU). With these two, links are paced only with --link.",
        ),
    ] = "host",
    ranks: Annotated[int, typer.Option(min=1, help="Ranks per node.")] = 4,
    nodes: Annotated[int, typer.Option(min=1, help="Nodes.")] = 1,
    dtype: Annotated[Dtype, typer.Option(help="The dtype of operands and result.")] = Dtype.bf16,
    link: Annotated[
        float | None,
        typer.Option(
            metavar="GB/S", show_default="450", help="Pace the link of a GPU to this rate; ranks on one GPU share it."
        ),
    ] = None,
    network: Annotated[
        float | None,
        typer.Option(metavar="GB/S", show_default="50", help="The same for its network link, with 5 us latency."),
    ] = None,
    unpaced: Annotated[bool, typer.Option("--unpaced", help="Do not pace links.")] = False,
    latency: Annotated[
        bool,
        typer.Option(
            "--latency",
            help="Measure the host time of an eager call instead, and, with one rank, the time of its kernel, next to "
            "the library's; links are not paced.",
        ),
    ] = False,
    json: Annotated[Path | None, typer.Option(dir_okay=False, help="Also write the figures to this file.")] = None,
    csv: Annotated[Path | None, typer.Option(dir_okay=False, help="Also write them as a table.")] = None,
    html: Annotated[Path | None, typer.Option(dir_okay=False, help="Also write a report with plots.")] = None,
    *,
    said: Said,
) -> None:
    """Measure operators on the GPUs of this machine, against the library, the host-driven baseline and, on several
    GPUs, NCCL and PyTorch's symmetric memory.

    The exit code is 1 if a result is wrong, if a measurement failed, or if there is no GPU.
    """
    for name, rate in (("--link", link), ("--network", network)):
        if rate is not None and unpaced:
            raise typer.BadParameter(f"give either {name} or --unpaced, not both", param_hint=name)
        if rate is not None and not rate > 0:
            raise typer.BadParameter(f"must be more than 0 GB/s, got {rate:g}", param_hint=name)
    for path, option in ((json, "--json"), (csv, "--csv"), (html, "--html")):
        check_file(path, option)
    ways = ways_of(against)
    wanted = _wanted(op, shape, shapes, ranks * nodes)
    for one in {one.op: operators.find(one.op) for one in wanted}.values():
        options_of(one, said, bench=True)
        if nodes > 1 and not one.load("bench").several_nodes:
            raise typer.BadParameter(f"{one.name} is measured on one node only so far", param_hint="--nodes")
    check_gpus(ranks, nodes, "--ranks")
    if latency:
        from mkernel.bench import calls

        asked = [(one.op, one.shape) for one in wanted] if shape or shapes else []
        with failures_in_words():
            calls.command(op, asked, ranks, nodes, dtype.value, json)
        return
    # the other baselines use the real links, so the fused operator should use them too
    unpaced = unpaced or (link is None and any(way != "host" for way in ways))
    from mkernel import bench as benchmarks

    with failures_in_words():
        code = benchmarks.main(
            wanted,
            ranks=ranks,
            nodes=nodes,
            dtype=dtype.value,
            link=None if unpaced else link or LINK,
            network=None if unpaced else network or NETWORK,
            against=ways,
            options=tuple(said),
            json_path=json,
            csv_path=csv,
            html_path=html,
        )
    raise typer.Exit(code)


def _wanted(op: str | None, shape: list[str] | None, shapes: str | None, ranks: int) -> list[Wanted]:
    """What to measure."""
    all_of_them = operators.registered("bench")
    if op is not None:
        try:
            operators.find(op, "bench")
        except MKernelError as problem:
            raise typer.BadParameter(str(problem), param_hint="OP") from problem
    if shape and shapes:
        raise typer.BadParameter("give either --shape or --shapes, not both", param_hint="--shape")
    if shape and op is None:
        raise typer.BadParameter("a shape needs an operator: mkernel bench OP --shape ...", param_hint="--shape")
    option = "--shape" if shape else "--shapes"
    from mkernel.bench import shapes as known

    try:
        if shape and op is not None:
            return [known.Wanted(op, known.parse(text, all_of_them[op], ranks)) for text in shape]
        if shapes in (None, "small", "paper"):
            chosen = [all_of_them[op]] if op is not None else list(all_of_them.values())
            return known.choose(chosen, shapes or "default", ranks)
        return known.read(Path(shapes), all_of_them, op, ranks)
    except MKernelError as problem:
        raise typer.BadParameter(str(problem), param_hint=option) from problem


@main.command()
def doctor(
    json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Show what this machine has, what will be used, and how to fix each problem.

    The exit code is 1 if there is a problem.
    """
    import json as format

    from mkernel.doctor import diagnose

    diagnosis = diagnose()
    if json:
        typer.echo(format.dumps(diagnosis.to_dict(), indent=1))
    else:
        console = Console(highlight=False)
        style = {"ok": "green", "note": "yellow", "problem": "bold red"}
        section = ""
        for finding in diagnosis.findings:
            if finding.section != section:
                section = finding.section
                console.print(f"\n[bold]{section}[/bold]")
            mark = f"[{style[finding.status]}]{finding.status:>8}[/]"
            console.print(mark, f"{finding.name}:", escape(finding.found), soft_wrap=True)
            if finding.advice:
                console.print(" " * 8, escape(finding.advice), style="dim", soft_wrap=True)
        count = len(diagnosis.problems)
        console.print(f"\n{'No problem' if not count else '1 problem' if count == 1 else f'{count} problems'}.")
    raise typer.Exit(1 if diagnosis.problems else 0)


@main.command()
def why(
    files: Annotated[
        list[Path], typer.Argument(help="Files saved by the ranks with error.save(path): one file, or one per rank.")
    ],
) -> None:
    """Show who waited for whom when a call timed out, down to the rank that held up all others.

    The exit code is 1 if there is nothing to show.
    """
    from mkernel.runtime import chains, record_files

    try:
        contents = record_files.read(files)
    except MKernelError as problem:
        raise typer.BadParameter(str(problem), param_hint="FILES") from problem
    for line in contents.damaged:
        typer.echo(f"mkernel: left out {line}", err=True)
    found = chains.find(contents.records, contents.failures)
    if not found:
        typer.echo("mkernel: these files contain no records of waits", err=True)
        raise typer.Exit(1)
    ranks = sorted({record.rank for record in contents.records} | {failure.rank for failure in contents.failures})
    typer.echo(f"waits that were given up: {len(contents.records)}; ranks: {', '.join(map(str, ranks))}\n")
    for chain in found:
        typer.echo(f"{chain}\n")
    if any(chain.culprit[0] == "rank" and not chain.cycle for chain in found):
        typer.echo("(A rank that raised another error, and whose file is missing, looks as if it never arrived.)")


@main.command()
def trace(
    op: Annotated[str, typer.Argument(help=f"The operator: {_names('workload')}.")],
    shapes: Annotated[
        list[str] | None,
        typer.Argument(metavar="SHAPE...", help="As for bench: 16384x2048x8192; a small one by default."),
    ] = None,
    out: Annotated[
        Path,
        typer.Option(dir_okay=False, help="File for Perfetto; a page for the browser is written next to it, as .html."),
    ] = Path("trace.json"),
    ranks: Annotated[int, typer.Option(min=1, help="Ranks per node.")] = 4,
    nodes: Annotated[int, typer.Option(min=1, help="Nodes.")] = 1,
    device: Annotated[
        Device, typer.Option(help="cpu is the simulator; auto is cuda where there is a GPU.")
    ] = Device.auto,
    dtype: Annotated[Dtype, typer.Option(help="The dtype of operands and result.")] = Dtype.bf16,
    calls: Annotated[int, typer.Option(min=1, help="Calls per shape, one after the other.")] = 2,
    events: Annotated[int, typer.Option(min=1, help="Capacity for events, per role of a CTA.")] = 4096,
    unpaced: Annotated[bool, typer.Option("--unpaced", help="Do not pace links (on a GPU).")] = False,
    where: Annotated[
        int | None,
        typer.Option(min=0, metavar="RANK", help="Print where the time of this rank's CTAs went, in its last call."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the simulated schedule.")] = 0,
    yes: Yes = False,
) -> None:
    """Record what every CTA of every rank did and when: as a file for Perfetto, and as a page with a timeline."""
    check_file(out, "--out")
    if where is not None and where >= ranks * nodes:
        raise typer.BadParameter(f"must be a rank from 0 to {ranks * nodes - 1}, got {where}", param_hint="--where")
    if out.suffix == ".html":
        raise typer.BadParameter(
            f"{out} is the name of the page, which is written next to the file; use --out {out.with_suffix('.json')}",
            param_hint="--out",
        )
    workload, parsed = workload_and_shapes(op, shapes, ranks * nodes)
    import torch

    from mkernel.workloads import DTYPES

    chosen = ("cuda" if torch.cuda.is_available() else "cpu") if device is Device.auto else device.value
    if chosen == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter("torch sees no GPU; --device cpu is the simulator", param_hint="--device")
    wanted = parsed or [workload.on_gpu if chosen == "cuda" else workload.smallest(ranks * nodes)]
    from mkernel.estimates import Simulation, shorter_call, smallest_call
    from mkernel.tracing import command

    def record(begin: Callable[[Group], None] = lambda group: None) -> Trace:
        return command.run(
            workload,
            wanted,
            nodes=nodes,
            gpus_per_node=ranks,
            device=chosen,
            dtype=DTYPES[dtype.value],
            links=shared_links(ranks, nodes, None if unpaced else LINK, None if unpaced else NETWORK),
            calls=calls,
            events=events,
            seed=seed,
            begin=begin,
        )

    with failures_in_words():
        if chosen == "cuda":
            check_gpus(ranks, nodes, "--ranks")
            traced = record()
        else:
            jobs = [(workload, shape, calls) for shape in wanted]
            simulation = Simulation(jobs, ranks * nodes, DTYPES[dtype.value].itemsize, events)
            propose = functools.partial(shorter_call, workload, wanted[0], nodes, ranks)
            option = "SHAPE" if parsed else "--ranks"
            with _simulating(simulation, yes, option, smallest_call(workload), propose) as watch:
                traced = record(watch.begin)
        command.show(traced, out, out.with_suffix(".html"), Console(highlight=False), where)


@main.command()
def check(
    what: Annotated[
        str,
        typer.Argument(
            metavar="OP|FILE.py:FUNCTION",
            help=f"The operator: {_names('demo', 'workload')}. Or your own function, called as fn(group) on every "
            "rank, which raises if something is wrong.",
        ),
    ],
    nodes: Annotated[int, typer.Option(min=1, help="Nodes.")] = 2,
    gpus_per_node: Annotated[int, typer.Option(min=1, help="Ranks per node.")] = 2,
    schedules: Annotated[int, typer.Option(min=0, help="Systematic schedules, at most.")] = 100,
    random: Annotated[int, typer.Option(min=0, help="Random schedules to run after them.")] = 0,
    seed: Annotated[int, typer.Option(help="Seed of the first random schedule.")] = 0,
    schedule: Annotated[
        str | None, typer.Option(metavar="NAME", help="Run only this schedule, such as stall:0.cta3@17.")
    ] = None,
    without: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A schedule to skip, such as one-cta. Repeatable.")
    ] = None,
    shape: Annotated[
        str | None, typer.Option(metavar="MxNxK", help="Shape of the operator's calls, as for trace; default: small.")
    ] = None,
    calls: Annotated[
        int | None,
        typer.Option(min=1, show_default="2", help="Calls of the operator in a row, each with different inputs."),
    ] = None,
    yes: Yes = False,
) -> None:
    """Run an operator, or your own function, under many schedules of the simulator, and report what they covered.

    The exit code is 1 if one of them fails; its name, and the command that runs it alone, are printed.
    """
    if ":" in what and not what.rpartition(":")[0].endswith(".py"):
        raise typer.BadParameter(f"{what!r} is not a function of a file: write FILE.py:FUNCTION", param_hint="OP")
    if ":" not in what and not what.endswith(".py"):
        check_operator(what)
    from mkernel import checking
    from mkernel.sim.choices import ONE_CTA
    from mkernel.sim.explore import Exploration

    replay = ["mkernel", "check", what, "--nodes", str(nodes), "--gpus-per-node", str(gpus_per_node)]
    leave_out = list(without or ())
    with failures_in_words():
        path, _, name = what.rpartition(":")
        if path.endswith(".py") or what.endswith(".py"):
            if not name or what.endswith(".py"):
                raise typer.BadParameter(f"name a function of the file: {what.rstrip(':')}:on_rank", param_hint="OP")
            for option, value in (("--shape", shape), ("--calls", calls)):
                if value is not None:
                    raise typer.BadParameter("is for operators; a function makes its own calls", param_hint=option)
            try:
                on_rank = checking.load(Path(path), name)
            except MKernelError as problem:
                raise typer.BadParameter(str(problem), param_hint="OP") from problem
        else:
            asked = [shape] if shape is not None else None
            workload, parsed = workload_and_shapes(what, asked, nodes * gpus_per_node, "demo")
            from mkernel.estimates import Simulation

            chosen = parsed[0] if parsed else workload.operator.load("demo").simulated(nodes * gpus_per_node)
            simulation = Simulation([(workload, chosen, calls or 2)], nodes * gpus_per_node)
            _estimate(simulation, yes, "--shape" if parsed else "--gpus-per-node", f"mkernel check {what}")
            leave_out += [ONE_CTA] if workload.operator.co_resident else []
            on_rank = checking.calls_of(workload.operator, chosen, calls or 2)
            replay += ["--shape", shape] if shape is not None else []
            replay += ["--calls", str(calls)] if calls is not None else []
        try:
            exploration = Exploration(
                on_rank, nodes=nodes, gpus_per_node=gpus_per_node, schedules=schedules, random=random, seed=seed,
                only=schedule, without=leave_out,
            )  # fmt: skip
        except MKernelError as problem:
            option = "--schedule" if schedule is not None else "--without" if without else "--schedules"
            raise typer.BadParameter(str(problem), param_hint=option) from problem
        code = checking.run(exploration, [*replay, "--schedule"], Console(highlight=False))
    raise typer.Exit(code)


main.command("compile")(compile_kernels)
main.command("plan")(plan_calls)


@main.command()
@takes_options()
def tune(
    op: Annotated[str, typer.Argument(help=f"The operator: {_names('workload', 'space')}.")],
    shapes: Annotated[
        list[str] | None,
        typer.Argument(metavar="SHAPE...", help="As for bench: 16384x2048x8192; the first one of bench by default."),
    ] = None,
    ranks: Annotated[int, typer.Option(min=1, help="Ranks per node.")] = 4,
    nodes: Annotated[int, typer.Option(min=1, help="Nodes.")] = 1,
    dtype: Annotated[Dtype, typer.Option(help="The dtype of operands and result.")] = Dtype.bf16,
    seconds: Annotated[float, typer.Option(min=1, help="Time limit per shape.")] = 120.0,
    unpaced: Annotated[
        bool,
        typer.Option("--unpaced", help="Do not pace links, even if ranks share a GPU; for calls that do the same."),
    ] = False,
    *,
    said: Said,
) -> None:
    """Measure configurations of an operator on the GPUs of this machine, and store the best; later calls use it.

    It is stored in the file that MKERNEL_TUNED_FILE names, or in mkernel/tuned.json in the user's cache directory.
    """
    workload, parsed = workload_and_shapes(op, shapes, ranks * nodes, "space")
    import torch

    from mkernel.workloads import DTYPES

    options = options_of(workload.operator, said)
    if not torch.cuda.is_available():
        typer.echo("mkernel tune measures time, which needs a GPU; this machine has none.", err=True)
        raise typer.Exit(1)
    check_gpus(ranks, nodes, "--ranks")
    from mkernel.tuning import command

    # with one GPU per rank, links are real; ranks that share a GPU get paced links, as in a benchmark
    shared = torch.cuda.device_count() < ranks * nodes and not unpaced
    with failures_in_words():
        command.run(
            workload,
            parsed or [workload.on_gpu],
            nodes=nodes,
            gpus_per_node=ranks,
            dtype=DTYPES[dtype.value],
            links=shared_links(ranks, nodes, LINK if shared else None, NETWORK if shared else None),
            seconds=seconds,
            options=options,
            console=Console(highlight=False),
        )


def _somebody_can_answer() -> bool:
    return sys.stdin.isatty() and sys.stderr.isatty()


@contextlib.contextmanager
def _simulating(
    simulation: Simulation, yes: bool, option: str, small: str, shorter: Callable[[], str] | None = None
) -> Iterator[Watch]:
    """Show the progress of the simulation that runs in the block, if `_estimate` admits it."""
    from mkernel import estimates

    seconds = _estimate(simulation, yes, option, small, shorter)
    with estimates.progress(simulation, seconds) as watch:
        yield watch


def _estimate(
    simulation: Simulation, yes: bool, option: str, small: str, shorter: Callable[[], str] | None = None
) -> float | None:
    """Reject a simulation that does not fit into memory. Ask before a long one; reject it if stdin is not a terminal.
    `small` and `shorter` are commands that take seconds; `shorter` is similar to this one. Returns the estimated
    seconds, or None if the simulation is certainly short."""
    from mkernel import estimates

    try:
        simulation.check_fits()
    except MKernelError as problem:
        raise typer.BadParameter(f"{problem}. This fits: {small}", param_hint=option) from problem
    if simulation.is_surely_short():
        return None
    seconds = simulation.seconds()
    about = estimates.text_of(seconds)
    if seconds > estimates.LONG and not yes:
        long = f"the simulator would take about {about}. This takes seconds: {shorter() if shorter else small}"
        if not _somebody_can_answer():
            raise typer.BadParameter(f"{long}\n--yes runs it anyway", param_hint=option)
        typer.echo(f"mkernel: {long}", err=True)
        typer.confirm("Run it anyway?", abort=True, err=True)
    typer.echo(f"mkernel: simulating, for about {about}", err=True)
    return seconds


if __name__ == "__main__":
    main()
