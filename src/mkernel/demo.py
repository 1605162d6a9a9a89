"""`mkernel demo`: all_gather_matmul on a small cluster, checked, with what moved where and when.

In the simulator the operator runs under several seeded schedules; bytes and tile products are
counted. On GPUs it runs once for the check and then a few times for the clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.progress_bar import ProgressBar
from rich.table import Table

from mkernel.ops.all_gather_matmul import all_gather_matmul
from mkernel.runtime.group import Group
from mkernel.runtime.spawn import spawn

if TYPE_CHECKING:
    from mkernel.sim.world import Traffic

DTYPE = torch.bfloat16
SCHEDULES = 5  # seeds that the simulator runs
SIMULATED = (64, 64, 128)  # m (rows of one rank), n, k: about a second a schedule
ON_GPU = (1024, 2048, 4096)
CALLS = 10  # timed together on a GPU, back to back
ROUNDS = 5  # how often they are; the median is shown
HEAD_START = 40_000_000  # clock cycles, about 20 ms: the GPU waits while the host queues the calls
WIDEST = 8  # ranks that a matrix of bytes is shown for, as fits into 80 columns; beyond, sums


@dataclass(frozen=True)
class Check:
    """One rank's result beside the product in float64."""

    shape: tuple[int, ...]
    error: float
    bound: float

    @property
    def ok(self) -> bool:
        return self.error <= self.bound  # false for NaN


def run(nodes: int, gpus_per_node: int, device: str, seed: int, console: Console) -> int:
    """Run the demo on "cpu" (the simulator) or "cuda" and print it. Returns the exit code."""
    simulated = device == "cpu"
    m, n, k = SIMULATED if simulated else ON_GPU
    size = nodes * gpus_per_node
    cluster = f"{_count(nodes, 'node')} x {_count(gpus_per_node, 'GPU')}, simulated on the CPU"
    console.print(f"[bold]all_gather_matmul[/bold] on {cluster if simulated else _gpus(size)}")
    console.print(
        f"Each of the {_count(size, 'rank')} holds {m} rows of a matrix a with {k} columns, and its own matrix b of "
        f"{k} x {n} (bf16). One kernel per rank sends its rows to the others, receives theirs and multiplies what has "
        f"arrived by b, all at the same time. Each result is compared with a product in float64.\n"
        if size > 1
        else f"One rank holds a of {m} x {k} and b of {k} x {n} (bf16); there is nobody to gather from. The result is "
        f"compared with a product in float64.\n",
    )
    if simulated:
        wrong = _simulate(nodes, gpus_per_node, seed, console)
    else:
        wrong = _measure(gpus_per_node, seed, console)
    for problem in wrong:
        console.print(f"[bold red]wrong:[/bold red] {problem}")
    if not wrong:
        console.print("[bold green]All results are right.[/bold green]")
    return 1 if wrong else 0


# -- in the simulator


def _simulate(nodes: int, gpus_per_node: int, seed: int, console: Console) -> list[str]:
    """Run several schedules, print the tables; what was wrong."""
    size = nodes * gpus_per_node
    seeds = range(seed, seed + SCHEDULES)
    checks: list[list[Check]] = []
    traffics: list[Traffic] = []
    outputs: list[list[torch.Tensor]] = []
    with _progress(console, "schedules", SCHEDULES) as advance:
        for schedule in seeds:
            results = spawn(_on_simulated_rank, nodes=nodes, gpus_per_node=gpus_per_node, device="cpu", seed=schedule)
            checks.append([check for check, _, _ in results])
            outputs.append([y for _, y, _ in results])
            traffics.append(results[0][2])
            advance()

    wrong = [
        f"rank {rank}: error {check.error:.3g} is over the bound {check.bound:.3g} with seed {schedule}"
        for schedule, row in zip(seeds, checks)
        for rank, check in enumerate(row)
        if not check.ok
    ]
    wrong += [
        f"rank {rank}: seed {schedule} gave other bits than seed {seed}"
        for schedule, row in zip(seeds, outputs)
        for rank, y in enumerate(row)
        if not torch.equal(y, outputs[0][rank])
    ]
    for schedule, traffic in zip(seeds, traffics):
        wrong += _unexpected(traffic, nodes, gpus_per_node, schedule)

    worst = [max((row[rank] for row in checks), key=lambda check: _sortable(check.error)) for rank in range(size)]
    console.print(_results_table(f"Results, the worst of {SCHEDULES} schedules", worst, gpus_per_node))
    console.print(
        f"The seeds {seed} to {seeds[-1]} were run. A seed decides the order of everything that may happen in any "
        f"order, and the same seed gives the same order again.{'' if wrong else ' The bits of the results were equal.'}"
        "\n"
    )
    if size == 1:
        return wrong

    if gpus_per_node > 1:
        console.print(_bytes_table("Sent over NVLink, inside a node", traffics[0].nvlink))
    if nodes > 1:
        console.print(_bytes_table("Sent over the network, between nodes", traffics[0].network))
        spread = ", which passes them on over NVLink" if gpus_per_node > 1 else ""
        console.print(f"A rank's rows cross once to the rank of the same place in each other node{spread}.")
    console.print()
    console.print(_overlap_table(traffics, seed))
    console.print(
        "Products of a tile that a rank computed before its last byte had arrived were overlapped with transfers. "
        "The simulator counts steps, not seconds: the share is no measure of speed.\n"
    )
    return wrong


def _on_simulated_rank(group: Group) -> tuple[Check, torch.Tensor, Traffic]:
    from mkernel.sim.world import SimWorld

    assert isinstance(group.world, SimWorld)
    a, b = _operands(group, SIMULATED, 0)
    y = all_gather_matmul(a, b)
    assert isinstance(y, torch.Tensor)
    return _check(group, y, a, b), y, group.world.traffic


def _unexpected(traffic: Traffic, nodes: int, gpus_per_node: int, schedule: int) -> list[str]:
    """Bytes that should not have been sent, or were not."""
    m, _, k = SIMULATED
    block = m * k * DTYPE.itemsize
    found = []
    for sender in range(nodes * gpus_per_node):
        for receiver in range(nodes * gpus_per_node):
            same_node = sender // gpus_per_node == receiver // gpus_per_node
            counterparts = sender % gpus_per_node == receiver % gpus_per_node
            for name, sent, expected in (
                ("NVLink", traffic.nvlink, nodes * block if same_node and sender != receiver else 0),
                ("the network", traffic.network, block if counterparts and not same_node else 0),
            ):
                if sent[sender][receiver] != expected:
                    found.append(
                        f"rank {sender} sent {sent[sender][receiver]} bytes over {name} to rank {receiver} instead of "
                        f"{expected} with seed {schedule}"
                    )
    return found


def _overlap_table(traffics: Sequence[Traffic], seed: int) -> Table:
    table = _table("Tile products computed before the rank's last byte arrived")
    table.add_column("rank", justify="right")
    table.add_column("products", justify="right")
    table.add_column(f"before, seed {seed}", justify="right")
    table.add_column("share", justify="right")
    table.add_column("", width=12)
    table.add_column("other seeds", justify="right")
    for rank, products in enumerate(traffics[0].multiplications):
        shares = [traffic.before_last_arrival[rank] / max(products, 1) for traffic in traffics]
        table.add_row(
            str(rank),
            str(products),
            str(traffics[0].before_last_arrival[rank]),
            f"{shares[0]:.0%}",
            ProgressBar(total=1.0, completed=shares[0], width=12, complete_style="green"),
            f"{min(shares[1:]):.0%} to {max(shares[1:]):.0%}",
        )
    return table


# -- on GPUs


def _measure(ranks: int, seed: int, console: Console) -> list[str]:
    """Check one call and time a few, print the tables; what was wrong."""
    m, _, k = ON_GPU
    with _progress(console, "check and time", 1) as advance:
        results = spawn(_on_gpu_rank, seed, nodes=1, gpus_per_node=ranks, device="cuda")
        advance()
    checks = [check for check, _ in results]
    times: dict[str, float] = results[0][1]
    console.print(_results_table("Results", checks, ranks))
    console.print()
    if ranks > 1:
        block = m * k * DTYPE.itemsize
        sent = [[0 if sender == receiver else block for receiver in range(ranks)] for sender in range(ranks)]
        console.print(_bytes_table("Pushed from rank to rank, by the plan", sent))
        shared = ranks > torch.cuda.device_count()
        console.print("Ranks share a GPU: bytes between those stay in its memory.\n" if shared else "")
    table = _table(f"Time of one call, {CALLS} back to back on every rank")
    table.add_column("")
    table.add_column("ms", justify="right")
    for name, milliseconds in times.items():
        table.add_row(name, f"{milliseconds:.3f}")
    console.print(table)
    if ranks > 1:
        console.print(
            "The fused call starts to multiply before all rows are there; the last line is the same work one after "
            "the other. `mkernel bench` also paces the links to a given rate.\n"
        )
    return [
        f"rank {rank}: error {check.error:.3g} is over the bound {check.bound:.3g}"
        for rank, check in enumerate(checks)
        if not check.ok
    ]


def _on_gpu_rank(group: Group, seed: int) -> tuple[Check, dict[str, float]]:
    a, b = _operands(group, ON_GPU, seed)
    m, n, k = ON_GPU
    out = torch.empty(group.size * m, n, dtype=DTYPE, device=group.device)
    gathered = torch.empty(group.size * m, k, dtype=DTYPE, device=group.device)
    torch.cuda.current_stream(group.device).synchronize()
    parts = group.exchange("a", a)

    def fused() -> None:
        all_gather_matmul(a, b, out=out)

    def copy() -> None:
        for source, part in enumerate(parts):
            gathered[source * m : (source + 1) * m].copy_(part)

    def multiply() -> None:
        torch.mm(gathered, b, out=out)

    def one_after_the_other() -> None:
        copy()
        multiply()

    # load every kernel before one of ours waits for another rank
    one_after_the_other()
    torch.cuda._sleep(1)
    out.fill_(float("nan"))
    group.synchronize()
    group.barrier()
    fused()
    group.synchronize()
    check = _check(group, out, a, b)
    calls: dict[str, Callable[[], None]] = {
        "all_gather_matmul, fused": fused,
        "copy of all rows": copy,
        "torch.mm": multiply,
        "copy of all rows, then torch.mm": one_after_the_other,
    }
    return check, {name: _milliseconds(group, call) for name, call in calls.items()}


def _milliseconds(group: Group, call: Callable[[], None]) -> float:
    """The time of a call that all ranks make, on the slowest rank; the median of several rounds."""
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


def _operands(group: Group, shape: tuple[int, int, int], seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    m, n, k = shape
    generator = torch.Generator(group.device).manual_seed(1000 * seed + group.rank)
    a = torch.randn(m, k, generator=generator, device=group.device, dtype=DTYPE)
    b = torch.randn(k, n, generator=generator, device=group.device, dtype=DTYPE)
    return a, b


def _check(group: Group, y: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Check:
    exact = torch.cat(group.exchange("a", a)).double() @ b.double()
    error = (y.double() - exact).abs().max().item()
    return Check(tuple(y.shape), error, 4 * a.shape[1] ** 0.5 * torch.finfo(DTYPE).eps)


def _results_table(title: str, checks: Sequence[Check], gpus_per_node: int) -> Table:
    table = _table(title)
    for name in ("rank", "node", "result", "largest error", "bound"):
        table.add_column(name, justify="right")
    table.add_column("")
    for rank, check in enumerate(checks):
        table.add_row(
            str(rank),
            str(rank // gpus_per_node),
            " x ".join(str(length) for length in check.shape),
            f"{check.error:.3f}",
            f"{check.bound:.3f}",
            "[green]ok[/green]" if check.ok else "[bold red]WRONG[/bold red]",
        )
    return table


def _bytes_table(title: str, sent: Sequence[Sequence[int]]) -> Table:
    """Bytes from each rank (a line) to each rank (a column); for many ranks, to all of them."""
    table = _table(title)
    table.add_column("from", justify="right")
    matrix = len(sent) <= WIDEST
    for receiver in range(len(sent)) if matrix else ("all",):
        table.add_column(f"to {receiver}", justify="right")
    for sender, row in enumerate(sent):
        table.add_row(str(sender), *(_bytes(count) for count in (row if matrix else [sum(row)])))
    return table


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold")


def _bytes(count: int) -> str:
    if count == 0:
        return "-"
    for unit, size in (("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return f"{count} B"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _gpus(ranks: int) -> str:
    used = min(ranks, torch.cuda.device_count())
    return f"{used} x {torch.cuda.get_device_name(0)}, {_count(ranks, 'rank')}"


def _sortable(error: float) -> float:
    return error if error == error else float("inf")


@contextmanager
def _progress(console: Console, what: str, total: int) -> Iterator[Callable[[], None]]:
    """A bar while it lasts, where there is a terminal to show it."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=total)
        yield lambda: progress.advance(task)
