"""`mkernel demo`: run every operator on a small cluster, check it, and show what moved where and how much overlapped.

In the simulator, an operator runs under several seeded schedules; bytes and tile products are counted, and the calls
are traced. On GPUs, it runs once to check the result, and then a few times to measure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from mkernel import operators, tables
from mkernel.estimates import Simulation
from mkernel.runtime.group import Group
from mkernel.runtime.spawn import spawn
from mkernel.tracing.events import Share
from mkernel.tracing.session import OVERLAP, trace

SCHEDULES = 3  # seeds that the simulator runs each operator with
CALLS = 10  # calls timed together on a GPU, back to back
ROUNDS = 5  # how often they are timed; the median is shown
HEAD_START = 40_000_000  # clock cycles, about 20 ms: the GPU waits while the host queues the calls


@dataclass(frozen=True)
class Check:
    """One rank's result compared with float64: the largest error, and the largest error as a share of its bound."""

    shape: tuple[int, ...]
    error: float
    share: float

    @property
    def ok(self) -> bool:
        return self.share <= 1.0  # False for NaN


@dataclass
class Shown:
    """What the demo shows of one operator."""

    name: str
    summary: str
    inputs: str
    checks: list[Check]  # by rank; in the simulator the worst of all schedules
    wrong: list[str] = field(default_factory=list)
    # in the simulator: bytes from rank to rank, within nodes and between them; by schedule and rank: tile products, and
    # how many of them were computed before the rank's last byte had arrived
    nvlink: list[list[int]] = field(default_factory=list)
    network: list[list[int]] = field(default_factory=list)
    products: list[list[int]] = field(default_factory=list)
    before_last_arrival: list[list[int]] = field(default_factory=list)
    overlaps: list[list[Share]] = field(default_factory=list)  # by schedule and rank: `Trace.overlap`
    # on GPUs, in ms
    times: dict[str, float] = field(default_factory=dict)

    @property
    def overlap(self) -> Share:
        """The overlap as shown by `mkernel trace`: the mean over ranks that copied, the minimum over schedules."""
        copied = [[share for share in ranks if not math.isnan(share)] for ranks in self.overlaps]
        return Share(min((sum(ranks) / len(ranks) for ranks in copied if ranks), default=math.nan))

    def to_dict(self) -> dict[str, Any]:
        return {
            "operator": self.name,
            "summary": self.summary,
            "inputs": self.inputs,
            "ok": not self.wrong,
            "wrong": self.wrong,
            "ranks": [
                {"shape": list(check.shape), "error": check.error, "share_of_bound": check.share}
                for check in self.checks
            ],
            "nvlink_bytes": self.nvlink,
            "network_bytes": self.network,
            "products": self.products,
            "products_before_last_arrival": self.before_last_arrival,
            "copies_behind_tiles": self.overlaps,
            "milliseconds": self.times,
        }


def simulation(ranks: int) -> Simulation:
    """What the demo simulates on this many ranks."""
    jobs = [
        (operator.load("workload"), operator.load("demo").simulated(ranks), SCHEDULES)
        for operator in shown_operators()
        if operator.workload is not None
    ]
    return Simulation(jobs, ranks)


def shown_operators() -> list[operators.Operator]:
    """The operators that have their own demo."""
    return [operator for operator in operators.registered("demo").values() if not operator.part_of]


def run(
    nodes: int, gpus_per_node: int, device: str, seed: int, console: Console, html: str | None = None,
    begin: Callable[[Group], None] = lambda group: None,
) -> int:  # fmt: skip
    """Run the demo on "cpu" (the simulator) or "cuda" and print it; `html`: also write a page. Every simulated rank
    calls `begin` first. Returns the exit code."""
    simulated = device == "cpu"
    size = nodes * gpus_per_node
    cluster = f"{_count(nodes, 'node')} x {_count(gpus_per_node, 'GPU')}, simulated on the CPU"
    place = cluster if simulated else _gpus(size)
    console.print(f"[bold]mkernel[/bold] on {place}\n")
    chosen = shown_operators()
    shown = []
    if simulated:  # `begin` shows progress
        shown = [_simulate(operator, nodes, gpus_per_node, seed, begin) for operator in chosen]
    else:
        with _progress(console, len(chosen)) as advance:
            for operator in chosen:
                shown.append(_measure(operator, gpus_per_node, seed, advance))
    for one in shown:
        console.print(f"[bold]{one.name}[/bold]: {one.summary}.")
        console.print(f"  Each rank holds {one.inputs} (bf16).", style="dim")
    console.print()
    tables.show(_table(shown, simulated), console)
    if simulated:
        console.print(
            f"Each ran with the seeds {seed} to {seed + SCHEDULES - 1}, which determine the order of all concurrent "
            "events. Errors are the largest over all seeds, against PyTorch in float64, as a share of what rounding "
            "allows. NVLink and network: bytes sent within nodes and between them. Overlap, as in "
            f"`mkernel trace`: the share of {OVERLAP}; the mean over ranks, and the minimum over seeds. Simulated "
            "times use made-up rates: the share does not measure speed."
        )
    else:
        emulated = " Ranks share a GPU here: times are emulated." if size > torch.cuda.device_count() else ""
        console.print(
            "Errors are against PyTorch in float64, as a share of what rounding allows. Fused is one call; library "
            f"is the arithmetic alone, by PyTorch, on all ranks.{emulated} `mkernel bench` has more baselines."
        )
    wrong = [f"{one.name}: {problem}" for one in shown for problem in one.wrong]
    for problem in wrong:
        console.print(f"[bold red]wrong:[/bold red] {problem}")
    if not wrong:
        console.print("[bold green]All results are right.[/bold green]")
    if html is not None:
        from mkernel.demo.page import page

        with open(html, "w", encoding="utf-8") as file:
            file.write(page(place, simulated, shown))
        console.print(f"The page is in {html}", soft_wrap=True)
    return 1 if wrong else 0


# -- in the simulator


def _simulate(
    operator: operators.Operator, nodes: int, gpus_per_node: int, seed: int, begin: Callable[[Group], None]
) -> Shown:
    """Run an operator under several schedules."""
    shown = Shown(operator.name, operator.summary, "", [])
    checks: list[list[Check]] = []
    first: list[torch.Tensor] = []
    for schedule in range(seed, seed + SCHEDULES):
        results = spawn(
            _on_simulated_rank, operator, begin, nodes=nodes, gpus_per_node=gpus_per_node, device="cpu", seed=schedule
        )
        checks.append([check for check, *_ in results])
        shown.inputs, traffic, sends, traced = results[0][2:]
        for rank, (check, y, *_) in enumerate(results):
            if not check.ok:
                shown.wrong.append(f"rank {rank}: error {check.error:.3g} is over the bound with seed {schedule}")
            elif first and not torch.equal(y, first[rank]):
                shown.wrong.append(f"rank {rank}: seed {schedule} gave other bits than seed {seed}")
        first = first or [y for _, y, *_ in results]
        if sends is not None:
            shown.wrong += _unexpected(traffic, sends, nodes, gpus_per_node, schedule)
        shown.nvlink, shown.network = traffic.nvlink, traffic.network
        shown.products.append(traffic.multiplications)
        shown.before_last_arrival.append(traffic.before_last_arrival)
        shown.overlaps.append([traced.overlap(rank, 0) for rank in range(nodes * gpus_per_node)])
    shown.checks = [max((row[rank] for row in checks), key=_severity) for rank in range(nodes * gpus_per_node)]
    return shown


def _on_simulated_rank(group: Group, operator: operators.Operator, begin: Callable[[Group], None]) -> tuple[Any, ...]:
    from mkernel.sim.world import SimWorld

    begin(group)
    assert isinstance(group.world, SimWorld)
    case = operator.load("demo").on_rank(group, 0)
    with trace(group) as traced:
        given = case.call()
    y = case.result(given)
    return compare(y, *case.exact()), y, case.inputs, group.world.traffic, case.sends, traced


def _unexpected(traffic: Any, sends: tuple[int, int], nodes: int, gpus_per_node: int, schedule: int) -> list[str]:
    """Describe bytes that were sent but should not have been, or the reverse."""
    found = []
    for sender in range(nodes * gpus_per_node):
        for receiver in range(nodes * gpus_per_node):
            same_node = sender // gpus_per_node == receiver // gpus_per_node
            counterparts = sender % gpus_per_node == receiver % gpus_per_node
            for name, sent, expected in (
                ("NVLink", traffic.nvlink, sends[0] if same_node and sender != receiver else 0),
                ("the network", traffic.network, sends[1] if counterparts and not same_node else 0),
            ):
                if sent[sender][receiver] != expected:
                    found.append(
                        f"rank {sender} sent {sent[sender][receiver]} bytes over {name} to rank {receiver} instead of "
                        f"{expected} with seed {schedule}"
                    )
    return found


# -- on GPUs


def _measure(operator: operators.Operator, ranks: int, seed: int, advance: Callable[[], None]) -> Shown:
    """Check one call, and time a few."""
    results = spawn(_on_gpu_rank, operator, seed, nodes=1, gpus_per_node=ranks, device="cuda")
    advance()
    checks = [check for check, _, _ in results]
    wrong = [
        f"rank {rank}: error {check.error:.3g} is over the bound" for rank, check in enumerate(checks) if not check.ok
    ]
    return Shown(operator.name, operator.summary, results[0][2], checks, wrong, times=results[0][1])


def _on_gpu_rank(group: Group, operator: operators.Operator, seed: int) -> tuple[Check, dict[str, float], str]:
    case = operator.load("demo").on_rank(group, seed, large=True)
    # load every kernel before a fused kernel waits for another rank
    case.library()
    torch.cuda._sleep(1)
    group.synchronize()
    group.barrier()
    given = case.call()
    group.synchronize()
    check = compare(case.result(given), *case.exact())
    calls: dict[str, Callable[[], Any]] = {"fused": case.call, "library": case.library}
    return check, {name: _milliseconds(group, call) for name, call in calls.items()}, case.inputs


def _milliseconds(group: Group, call: Callable[[], Any]) -> float:
    """The time of a collective call on the slowest rank; the median of several rounds."""
    rounds = []
    for _ in range(ROUNDS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        group.synchronize()
        group.barrier()
        torch.cuda._sleep(HEAD_START)
        start.record()
        for _ in range(CALLS):
            call()
        end.record()
        group.synchronize()
        rounds.append(max(group.exchange("time", start.elapsed_time(end) / CALLS)))
    return sorted(rounds)[ROUNDS // 2]


# -- on both


def compare(y: torch.Tensor, exact: torch.Tensor, bound: torch.Tensor | float) -> Check:
    """Compare a rank's result with what `Case.exact` returns."""
    if y.shape != exact.shape:
        return Check(tuple(y.shape), float("inf"), float("inf"))
    error = (y.double() - exact).abs()
    return Check(tuple(y.shape), _largest(error), _largest(error / bound))


def _largest(values: torch.Tensor) -> float:
    return float("nan") if bool(values.isnan().any()) else values.max().item() if values.numel() else 0.0


def _severity(check: Check) -> float:
    return check.share if check.share == check.share else float("inf")


def _table(shown: Sequence[Shown], simulated: bool) -> Table:
    table = Table(box=box.SIMPLE, padding=0)  # fits into 80 columns
    table.add_column("operator", no_wrap=True)
    table.add_column("result", no_wrap=True)
    columns = ("error", "NVLink", "network", "overlap") if simulated else ("error", "fused", "library", "ratio")
    for name in columns:
        table.add_column(name, justify="right")
    table.add_column("")
    for one in shown:
        worst = max(one.checks, key=_severity)
        if simulated:
            figures = [_bytes(sum(map(sum, one.nvlink))), _bytes(sum(map(sum, one.network))), f"{one.overlap:.0%}"]
        else:
            fused, library = one.times["fused"], one.times["library"]
            figures = [f"{fused:.3f} ms", f"{library:.3f} ms", f"{library / fused:.2f}"]
        table.add_row(
            one.name,
            "x".join(map(str, worst.shape)),
            f"{worst.share:.0%}",
            *figures,
            "[bold red]WRONG[/bold red]" if one.wrong else "[green]ok[/green]",
        )
    return table


def _bytes(count: int) -> str:
    if count == 0:
        return "-"
    for unit, size in (("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}" if count % size else f"{count // size} {unit}"
    return f"{count} B"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _gpus(ranks: int) -> str:
    used = min(ranks, torch.cuda.device_count())
    return f"{used} x {torch.cuda.get_device_name(0)}, {_count(ranks, 'rank')}"


@contextmanager
def _progress(console: Console, total: int) -> Iterator[Callable[[], None]]:
    """Show a progress bar, if the console is a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("running", total=total)
        yield lambda: progress.advance(task)
