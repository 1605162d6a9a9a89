"""NCCL and PyTorch's symmetric memory as baselines: start them, check them, time them.

In a fused call, all ranks are threads of this process. These baselines run with one process per GPU, as in programs
that use them, so each measurement starts its own processes; see `peers`. Their inputs are those of the fused call.
Their results are checked in the same way, and a wrong one is not timed. A call is timed from when all ranks have
arrived to when the last one is done.

NCCL needs a GPU for each rank. PyTorch's symmetric memory does not: where ranks share GPUs, it is measured in processes
under MPS, and the fused operator in the same processes beside it, with links that are not paced (shared_gpu.py).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from mkernel import operators
from mkernel.bench import mps, nccl, peers, shared_gpu, symm_mem
from mkernel.bench.peers import Peer, PeerFailure
from mkernel.bench.problems import Problem, Products
from mkernel.bench.timing import Stopwatch
from mkernel.operators import BACKWARD, Reference, Shape
from mkernel.runtime.errors import MKernelError

LIBRARIES = {"nccl": nccl, "symm_mem": symm_mem}
SECONDS = 300.0  # time limit for the processes of one measurement, to start, check and time


def refusal(name: str, ranks: int, nodes: int, options: Sequence[str] = ()) -> str | None:
    """Why a library cannot be measured on this machine, and what would work; None if it can."""
    gpus = torch.cuda.device_count()
    if BACKWARD.name in options:
        return f"it has no {BACKWARD.flag}; use --against host"
    if nodes > 1:
        return f"it can be measured only within one machine, got --nodes {nodes}; use --nodes 1"
    if ranks < 2:
        return f"it needs 2 or more ranks, got --ranks {ranks}"
    if ranks > gpus:
        works = f"--ranks {gpus} or fewer would work" if gpus > 1 else "--against host works with one"
        if name != "symm_mem":
            return f"it needs one GPU per rank, but there are {gpus} for {ranks} ranks; {works}"
        if (missing := mps.refusal()) is not None:
            return f"processes that share a GPU need MPS, but {missing}; {works}"
    return None


def measure(
    name: str,
    op: str,
    shape: Shape,
    *,
    ranks: int,
    dtype: torch.dtype,
    bound: float,
    fused_ms: float,
    repeats: int,
    options: Sequence[str] = (),
) -> dict[str, Any]:
    """The figures of one library for one shape, to be added to those of the fused operator. The error must stay within
    the fused operator's `bound`. Keys: NAME_ms, NAME_speedup (how much faster the fused operator is), NAME_way,
    NAME_max_error, NAME_status ("measured", "not available", "failed" or "wrong") and NAME_note, an explanation; where
    ranks share GPUs also NAME_fused_ms, the fused operator's time beside it."""
    found: dict[str, Any] = {"ms": None, "way": None, "max_error": None, "status": "not available", "note": ""}
    operator = operators.find(op, "bench")
    problem = operator.load("bench").problem
    if problem is None:
        refused: str | None = f"{op} has no such baseline yet: its Benchmark has no problem"
    else:
        refused = LIBRARIES[name].refusal(operators.resolve(problem), shape, dtype)
    shared = name == "symm_mem" and ranks > torch.cuda.device_count()
    if shared and refused is None and not issubclass(operators.resolve(problem), Products):
        refused = f"{op} is not measured in processes that share a GPU"
    if refused is not None:
        found["note"] = refused
    elif shared:
        found |= _measure_shared(op, shape, ranks, dtype)
        fused_ms = found.get("fused_ms") or fused_ms
    else:
        gc.collect()
        torch.cuda.empty_cache()  # the processes need the memory that this one only caches
        arguments = (name, problem, shape, dtype, bound, repeats, tuple(options))
        try:
            found |= peers.run(measure_on_rank, ranks, *arguments, seconds=SECONDS)
        except PeerFailure as problem:
            found |= {"status": "failed", "note": str(problem)}
    found["speedup"] = found["ms"] / fused_ms if found["ms"] is not None else None
    return {f"{name}_{key}": value for key, value in found.items()}


def _measure_shared(op: str, shape: Shape, ranks: int, dtype: torch.dtype) -> dict[str, Any]:
    """The figures of symmetric memory, and of the fused operator beside it, in processes that share GPUs."""
    gc.collect()
    torch.cuda.empty_cache()
    try:
        (figures,) = shared_gpu.measure([(op, shape)], ranks, dtype)
    except (PeerFailure, MKernelError) as problem:
        return {"status": "failed", "note": str(problem)}
    if figures["status"] != "measured":
        return {"status": figures["status"], "note": figures["note"]}
    where = f"{shared_gpu.explanation(ranks)}: {figures['ours_ms']:.3f} fused, {figures['ms']:.3f} {figures['way']}"
    note = "; ".join(filter(None, (where, figures["note"])))
    return dict(
        status="measured", ms=figures["ms"], way=figures["way"], max_error=figures["max_error"],
        fused_ms=figures["ours_ms"], note=note,
    )  # fmt: skip


def is_right(result: dict[str, Any], names: Iterable[str] = tuple(LIBRARIES)) -> bool:
    """Could all requested baselines be compared with the fused operator?"""
    return all(result.get(f"{name}_status") not in ("failed", "wrong") for name in names)


def remarks(result: dict[str, Any]) -> dict[str, str]:
    """A remark about each library in a result."""
    said = {}
    for name, library in LIBRARIES.items():
        status, way, note, faster = (result.get(f"{name}_{key}") for key in ("status", "way", "note", "speedup"))
        if status is not None:
            timed = f"{way} takes {faster:.2f} times the fused time" if faster is not None else ""
            words = "; ".join(filter(None, (timed, note) if status == "measured" else (note, timed)))
            how = {"measured": "", "wrong": "WRONG RESULT: "}.get(status, f"{status}: ")
            said[name] = f"{library.TITLE}: {how}{words}"
    return said


# -- in the process of a rank


def measure_on_rank(
    peer: Peer, name: str, reference: Reference, shape: Shape, dtype: torch.dtype, bound: float, repeats: int,
    options: Sequence[str],
) -> None:  # fmt: skip
    """Check and time every way in which a library can compute the operator. Reports the fastest correct one."""
    device = device_of(peer.rank)
    peer.say("making inputs")
    problem: Problem = operators.resolve(reference)(peer.rank, peer.size, shape, dtype, device, options)
    ways = LIBRARIES[name].prepare(problem, peer)
    notes, right, wrong = list(ways.notes), {}, False
    for way, call in ways.calls.items():
        peer.say(f"checking {way}")
        try:
            ways.barrier()
            error, failure = problem.error(call()), ""
        except RuntimeError as problem_of_way:
            error, failure = float("inf"), str(problem_of_way).strip().partition("\n")[0]
            peer.say(f"{way} failed: {failure}")
        error = max(each if each == each else float("inf") for each in peer.exchange(error))
        failures = [each for each in peer.exchange(failure) if each]
        if failures:
            notes.append(f"{way} failed: {failures[0]}")
        elif error > bound:
            wrong = True
            notes.append(f"{way} has an error of {error:.2g}, but at most {bound:.2g} is allowed; it was not timed")
        else:
            right[way] = error
    found: dict[str, Any] = {"status": "wrong" if wrong else "measured" if right else "failed"}
    if right:
        stopwatch = PeerStopwatch(peer, ways.barrier)
        peer.say(f"timing {', '.join(right)}")
        times = stopwatch.bursts({way: ways.calls[way] for way in right}, repeats)
        best = min(times, key=lambda way: times[way])
        found |= {"ms": times[best], "way": best, "max_error": right[best]}
        notes += [f"{way} takes {took:.3f} ms" for way, took in times.items() if way != best]
    peer.report(found | {"note": "; ".join(notes)})


def device_of(rank: int) -> torch.device:
    """Select the GPU of a rank, and make it the current one."""
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


class PeerStopwatch(Stopwatch):
    """Times the calls of a rank in its own process; the time of a call is that of the slowest rank."""

    def __init__(self, peer: Peer, barrier: Callable[[], object]):
        super().__init__([torch.cuda.current_stream()])
        self._peer, self._barrier = peer, barrier

    def barrier(self) -> object:
        return self._barrier()

    def time(self, call: Callable[[], object], repeats: int) -> list[float]:
        return [max(times) for times in zip(*self._peer.exchange(super().time(call, repeats)))]
