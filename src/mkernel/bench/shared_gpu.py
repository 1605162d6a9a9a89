"""Processes that share a GPU: the operators beside PyTorch's symmetric-memory ones.

    python -m mkernel.bench.shared_gpu

Every rank is a process, and all of them use one GPU, under MPS (mps.py). Links are not paced: the memory of the other
ranks is memory of the same GPU, for both sides alike. So this compares the work of communicating, not links.

Times are of eager calls, as a program makes them: a number of calls in a row, from when all ranks have arrived until
the GPU has finished, divided by their number; the slowest rank counts. So a call takes the time of the host or of the
GPU, whichever is longer. Both sides are measured in turns, and the median of each counts. The results of both are
compared with float64 first.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import typer

from mkernel import operators
from mkernel.bench import mps, peers
from mkernel.bench.peers import Peer, PeerFailure
from mkernel.bench.problems import Products
from mkernel.operators import Shape
from mkernel.runtime.errors import MKernelError

Case = tuple[str, Shape]
ROUNDS = 7  # the median counts
ROUND_SECONDS = 0.015
MOST_CALLS = 50  # of a round
TIMEOUT = 60.0
SECONDS_PER_CASE = 30.0  # time limit, with compiling
OVERLAPPING = ("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "TORCH_SYMMMEM_ALLOW_OVERLAPPING_DEVICES")


def all_cases() -> list[Case]:
    """What operators want to have measured here."""
    benchmarks = {name: one.load("bench") for name, one in operators.registered().items() if one.bench is not None}
    return [(name, shape) for name, benchmark in benchmarks.items() for shape in benchmark.shared_gpu_shapes]


def measure(
    cases: Sequence[Case], ranks: int, dtype: torch.dtype, rounds: int = ROUNDS, printing: bool = False
) -> list[dict[str, Any]]:
    """The figures of all cases, in processes under MPS. Raises PeerFailure, or MKernelError if there is no MPS."""
    # WORLD_SIZE is for mkernel.environment: these processes are some of several
    shared = dict.fromkeys(OVERLAPPING, "1") | {"WORLD_SIZE": str(ranks)}
    with mps.running() as variables, patch.dict(os.environ, variables | shared):  # processes get a copy of it
        limit = 60.0 + SECONDS_PER_CASE * len(cases)
        return peers.run(measure_on_rank, ranks, list(cases), dtype, rounds, printing, seconds=limit)


# -- in the process of a rank


def measure_on_rank(peer: Peer, cases: Sequence[Case], dtype: torch.dtype, rounds: int, printing: bool) -> None:
    """Measure all cases, and report their figures. printing: each as soon as it is known."""
    import mkernel as mk

    peer.say("starting mkernel")
    if torch.cuda.is_available():
        torch.cuda.set_device(peer.rank % torch.cuda.device_count())
    group = mk.init(timeout=TIMEOUT)
    found = []
    for op, shape in cases:
        peer.say(f"measuring {op} {shape}")
        with torch.no_grad():
            figures = _beside(peer, group, op, shape, dtype, rounds)
        found.append({"op": op, "shape": list(shape), "ranks": peer.size} | figures)
        if printing and peer.rank == 0:
            print(line_of(found[-1]), flush=True)
    peer.report(found)
    group.close()


def _beside(peer: Peer, group: Any, op: str, shape: Shape, dtype: torch.dtype, rounds: int) -> dict[str, Any]:
    """The figures of one case."""
    benchmark = operators.find(op, "bench").load("bench")
    kind: type[Products] = operators.resolve(benchmark.problem)
    problem = kind(peer.rank, peer.size, shape, dtype, group.device, ())
    calls: dict[str, Callable[[], Any]] = {"mkernel": benchmark.latency(group, shape, dtype).call}
    calls |= problem.symm_mem().calls
    bound, notes, right, errors = problem.error_bound, [], {}, {}
    for way, call in calls.items():
        try:
            error, failure = problem.error(call()), ""
        except RuntimeError as reason:
            error, failure = float("inf"), str(reason).strip().partition("\n")[0]
        error = max(each if each == each else float("inf") for each in peer.exchange(error))
        failures = [each for each in peer.exchange(failure) if each]
        if failures or error > bound:
            notes.append(f"{way} failed: {failures[0]}" if failures else f"{way} has an error of {error:.2g}")
        else:
            right[way], errors[way] = call, error
    if "mkernel" not in right or len(right) < 2:
        return {"status": "failed", "note": "; ".join(notes)}
    times = eager_ms(peer, right, rounds)
    ours = times.pop("mkernel")
    way = min(times, key=lambda name: times[name])
    notes += [f"{name} takes {took:.3f} ms" for name, took in times.items() if name != way]
    return dict(
        status="measured", ours_ms=ours, ms=times[way], way=way, max_error=errors[way], note="; ".join(notes)
    )  # fmt: skip


def eager_ms(peer: Peer, calls: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Milliseconds of an eager call of each way: the median of several rounds, which take turns."""

    def took(call: Callable[[], Any], count: int) -> float:
        dist.barrier()
        begun = time.perf_counter()
        for _ in range(count):
            call()
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        return max(peer.exchange((time.perf_counter() - begun) / count)) * 1e3

    counts = {}
    for way, call in calls.items():
        took(call, 3)
        counts[way] = max(3, min(MOST_CALLS, int(ROUND_SECONDS * 1e3 / took(call, 3))))
    times: dict[str, list[float]] = {way: [] for way in calls}
    for _ in range(rounds):
        for way, call in calls.items():
            times[way].append(took(call, counts[way]))
    return {way: sorted(each)[len(each) // 2] for way, each in times.items()}


# -- the command

HEADER = f"{'ranks':>5}  {'operator':<22} {'shape':>15} {'mkernel ms':>10} {'torch ms':>9} {'ratio':>6}  torch's way"


def line_of(result: Mapping[str, Any]) -> str:
    """The figures of a case as a line of the table. ratio: torch's time over ours."""
    head = f"{result['ranks']:>5}  {result['op']:<22} {'x'.join(map(str, result['shape'])):>15}"
    if result["status"] != "measured":
        return f"{head} {'-':>10} {'-':>9} {'-':>6}  {result['status']}: {result['note']}"
    ratio = result["ms"] / result["ours_ms"]
    slower = "  SLOWER" if ratio < 1 else ""
    return f"{head} {result['ours_ms']:>10.3f} {result['ms']:>9.3f} {ratio:>6.2f}  {result['way']}{slower}"


def explanation(ranks: int) -> str:
    """What the table shows."""
    return f"{ranks} processes share a GPU under MPS, links are not paced; milliseconds of an eager call, wall time"


def main(
    ranks: Annotated[str, typer.Option(metavar="N,...", help="Numbers of processes.")] = "2,4",
    op: Annotated[str | None, typer.Option(help="Only this operator.")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Also write the figures to this file.")] = None,
) -> None:
    """Measure the operators beside PyTorch's symmetric-memory ones, in processes that share a GPU."""
    numbers = ranks.split(",")
    if not all(number.isdigit() and int(number) > 1 for number in numbers):
        raise typer.BadParameter(f"2 or more processes share a GPU, got {ranks!r}", param_hint="--ranks")
    wanted = all_cases()
    cases = [case for case in wanted if op in (None, case[0])]
    if not cases:
        known = ", ".join(dict.fromkeys(name for name, _ in wanted))
        raise typer.BadParameter(f"{op!r} is not measured here; there are: {known}", param_hint="--op")
    if torch.cuda.device_count() == 0:
        print("this measures time, which needs a GPU; this machine has none")
        sys.exit(1)
    results: list[dict[str, Any]] = []
    failed = False
    for number in map(int, numbers):
        print(f"{explanation(number)}, bf16\n{HEADER}", flush=True)
        try:
            results += measure(cases, number, torch.bfloat16, printing=True)
        except (PeerFailure, MKernelError) as reason:
            print(f"{number} processes: failed: {reason}", flush=True)
            failed = True
        if json_path is not None:
            json_path.write_text(json.dumps(results, indent=1))
    sys.exit(1 if failed or any(result["status"] == "failed" for result in results) else 0)


if __name__ == "__main__":
    # importable by its name in the processes, where this module is not the main one
    from mkernel.bench.shared_gpu import main as command

    typer.run(command)
