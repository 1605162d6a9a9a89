"""The command line: `mkernel --help` lists its commands."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

try:
    import typer
    from rich.console import Console
    from rich.markup import escape
except ImportError as missing:
    # the script that pip installs imports this module and nothing else: one line instead of a traceback
    raise SystemExit(
        f"mkernel: the command line needs the package {missing.name}: pip install 'mkernel-gpu[cli]'"
    ) from missing

from mkernel import operators
from mkernel.cli_checks import (
    Dtype,
    Said,
    check_file,
    check_gpus,
    check_operator,
    failures_in_words,
    options_of,
    shared_links,
    takes_options,
    workload_and_shapes,
)
from mkernel.cli_compile import compile_kernels
from mkernel.runtime.errors import MKernelError
from mkernel.version import __version__

if TYPE_CHECKING:
    from mkernel.bench.shapes import Wanted
    from mkernel.estimates import Simulation, Watch
    from mkernel.runtime.group import Group
    from mkernel.tracing import Trace

LINK = 450.0  # GB/s that an H100 or H200 sends over NVLink
WAYS = ("host", "nccl", "symm_mem")  # of bench --against
NETWORK = 50.0  # GB/s that it sends through a network card of its own: 400 Gb/s


class CommandLine(typer.Typer):
    """Ends as other Unix tools do, without a word, when whoever reads its output has gone (`mkernel doctor | head`)."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        try:
            try:
                return super().__call__(*arguments, **options)
            finally:
                sys.stdout.flush()  # what is still in the buffer
        except BrokenPipeError:
            pass
        except SystemExit as end:  # typer and rich exit with 1 when a pipe is broken
            if not isinstance(end.__context__, BrokenPipeError):
                raise
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGPIPE)


main = CommandLine(
    help="Distributed GPU operators for PyTorch, each of them one persistent kernel per rank.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)


def _names(*parts: str) -> str:
    """The operators that have these, for the help."""
    return ", ".join(operators.registered(*parts))


class Device(str, Enum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


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
        int | None, typer.Option(min=1, show_default="2; 4 on CUDA", help="Ranks of each node.")
    ] = None,
    device: Annotated[
        Device, typer.Option(help="cpu is the simulator; auto is cuda where there is a GPU, for one node.")
    ] = Device.auto,
    seed: Annotated[int, typer.Option(help="Of the first simulated schedule; on CUDA, of the inputs.")] = 0,
    html: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Also write a page with plots to this file.")
    ] = None,
    yes: Yes = False,
) -> None:
    """Run every operator on a small cluster, check it, and show what moved where.

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
            help="A set of shapes: small ones, those of the published tables (shown beside their figures), or a file "
            "with an operator and a shape in each line.",
        ),
    ] = None,
    against: Annotated[
        str,
        typer.Option(
            metavar="host,nccl,symm_mem",
            help="What to compare with: host-driven copies (always); NCCL, and PyTorch's symmetric-memory operators, "
            "both with a GPU for each rank, and with links unpaced unless --link is given.",
        ),
    ] = "host",
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
    csv: Annotated[Path | None, typer.Option(dir_okay=False, help="Also write them as a table.")] = None,
    html: Annotated[Path | None, typer.Option(dir_okay=False, help="Also write a report with plots.")] = None,
    *,
    said: Said,
) -> None:
    """Measure operators on the GPUs that are here, beside the library, the host-driven way and, on several GPUs, NCCL
    and PyTorch's symmetric memory.

    The exit code is 1 if a result is wrong, if a measurement failed, or if there is no GPU.
    """
    for name, rate in (("--link", link), ("--network", network)):
        if rate is not None and unpaced:
            raise typer.BadParameter(f"give either {name} or --unpaced, not both", param_hint=name)
        if rate is not None and not rate > 0:
            raise typer.BadParameter(f"must be more than 0 GB/s, got {rate:g}", param_hint=name)
    for path, option in ((json, "--json"), (csv, "--csv"), (html, "--html")):
        check_file(path, option)
    ways = _ways(against)
    wanted = _wanted(op, shape, shapes, ranks * nodes)
    for one in {one.op: operators.find(one.op) for one in wanted}.values():
        options_of(one, said, bench=True)
        if nodes > 1 and not one.load("bench").several_nodes:
            raise typer.BadParameter(f"{one.name} is measured on one node only so far", param_hint="--nodes")
    check_gpus(ranks, nodes, "--ranks")
    # the other ways go over the links that are there: what is compared with them should, too
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


def _ways(against: str) -> tuple[str, ...]:
    ways = tuple(way.strip() for way in against.split(",") if way.strip())
    for way in ways:
        if way not in WAYS:
            raise typer.BadParameter(f"there is no way {way!r}; there are: {', '.join(WAYS)}", param_hint="--against")
    return ways


def _wanted(op: str | None, shape: list[str] | None, shapes: str | None, ranks: int) -> list[Wanted]:
    """What to measure."""
    all_of_them = operators.registered("bench")
    if op is not None and op not in all_of_them:
        raise typer.BadParameter(
            f"there is no operator {op!r} to measure; there are: {', '.join(all_of_them)}", param_hint="OP"
        )
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
    """Say what is on this machine, what will be used, and what to do about each problem.

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
        list[Path], typer.Argument(help="What the ranks saved: error.save(path), one file or one for each rank.")
    ],
) -> None:
    """Show who waited for whom when a call timed out, down to the one that everybody waited for.

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
        typer.echo("mkernel: there are no records of waits in these files", err=True)
        raise typer.Exit(1)
    ranks = sorted({record.rank for record in contents.records} | {failure.rank for failure in contents.failures})
    typer.echo(f"{len(contents.records)} waits of {len(ranks)} ranks were given up: {', '.join(map(str, ranks))}\n")
    for chain in found:
        typer.echo(f"{chain}\n")
    if any(chain.culprit[0] == "rank" and not chain.cycle for chain in found):
        typer.echo("(A rank that raised an error of its own, but whose file is not here, looks as if it never came.)")


@main.command()
def trace(
    op: Annotated[str, typer.Argument(help=f"The operator: {_names('workload')}.")],
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
    where: Annotated[
        int | None,
        typer.Option(min=0, metavar="RANK", help="Print where the time of this rank's CTAs went, in its last call."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the simulated schedule.")] = 0,
    yes: Yes = False,
) -> None:
    """Write down what every CTA of every rank did and when: a file for Perfetto, and a page with a timeline."""
    check_file(out, "--out")
    if where is not None and where >= ranks * nodes:
        raise typer.BadParameter(f"there are the ranks 0 to {ranks * nodes - 1}; got {where}", param_hint="--where")
    if out.suffix == ".html":
        raise typer.BadParameter(
            f"{out} is the name of the page that goes beside the file; write --out {out.with_suffix('.json')}",
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
            room=events,
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
            help=f"The operator: {_names('demo', 'workload')}. Or a function of yours, called as fn(group) on "
            "every rank, which raises if something is wrong.",
        ),
    ],
    nodes: Annotated[int, typer.Option(min=1, help="Nodes.")] = 2,
    gpus_per_node: Annotated[int, typer.Option(min=1, help="Ranks of each node.")] = 2,
    schedules: Annotated[int, typer.Option(min=0, help="Systematic schedules, at most.")] = 100,
    random: Annotated[int, typer.Option(min=0, help="Random schedules to run behind them.")] = 0,
    seed: Annotated[int, typer.Option(help="Of the first random schedule.")] = 0,
    schedule: Annotated[
        str | None, typer.Option(metavar="NAME", help="Run this schedule alone, as stall:0.cta3@17.")
    ] = None,
    without: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A schedule to leave out, as one-cta. Repeatable.")
    ] = None,
    shape: Annotated[
        str | None, typer.Option(metavar="MxNxK", help="Of the operator's calls, as for trace; a small one by default.")
    ] = None,
    calls: Annotated[
        int | None,
        typer.Option(min=1, show_default="2", help="Calls of the operator in a row, with other inputs each."),
    ] = None,
    yes: Yes = False,
) -> None:
    """Run an operator, or a function of yours, under many schedules of the simulator, and say what they covered.

    The exit code is 1 if one of them fails; its name, and the command that runs it alone, are printed.
    """
    if not what.rpartition(":")[0].endswith(".py") and not what.endswith(".py"):
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


@main.command()
@takes_options()
def tune(
    op: Annotated[str, typer.Argument(help=f"The operator: {_names('workload', 'space')}.")],
    shapes: Annotated[
        list[str] | None,
        typer.Argument(metavar="SHAPE...", help="As for bench: 16384x2048x8192; the first one of bench by default."),
    ] = None,
    ranks: Annotated[int, typer.Option(min=1, help="Ranks of each node.")] = 4,
    nodes: Annotated[int, typer.Option(min=1, help="Nodes.")] = 1,
    dtype: Annotated[Dtype, typer.Option(help="Of the operands and the result.")] = Dtype.bf16,
    seconds: Annotated[float, typer.Option(min=1, help="For each shape.")] = 120.0,
    unpaced: Annotated[
        bool,
        typer.Option("--unpaced", help="Do not pace links, though ranks share a GPU; for calls in the same place."),
    ] = False,
    *,
    said: Said,
) -> None:
    """Measure configurations of an operator on the GPUs that are here, and keep the best: later calls take it.

    It is kept in the file that MKERNEL_TUNED_FILE names, or in mkernel/tuned.json in the user's cache folder.
    """
    workload, parsed = workload_and_shapes(op, shapes, ranks * nodes, "space")
    import torch

    from mkernel.workloads import DTYPES

    options = options_of(workload.operator, said)
    if not torch.cuda.is_available():
        typer.echo("mkernel tune measures time, which needs a GPU; there is none here.", err=True)
        raise typer.Exit(1)
    check_gpus(ranks, nodes, "--ranks")
    from mkernel.tuning import command

    # several GPUs have real links; ranks that share one get paced ones, as in a benchmark
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
    """Show progress while a simulation runs inside, if `_estimate` lets it."""
    from mkernel import estimates

    seconds = _estimate(simulation, yes, option, small, shorter)
    with estimates.progress(simulation, seconds) as watch:
        yield watch


def _estimate(
    simulation: Simulation, yes: bool, option: str, small: str, shorter: Callable[[], str] | None = None
) -> float | None:
    """Refuse a simulation that does not fit, and ask about a long one, or refuse it where there is nobody to ask.
    `small`, `shorter`: commands that take seconds, the latter like this one. How long it will take; None if that is
    surely short."""
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
            raise typer.BadParameter(f"{long}\n--yes runs it all the same", param_hint=option)
        typer.echo(f"mkernel: {long}", err=True)
        typer.confirm("Run it all the same?", abort=True, err=True)
    typer.echo(f"mkernel: simulating, for about {about}", err=True)
    return seconds


if __name__ == "__main__":
    main()
