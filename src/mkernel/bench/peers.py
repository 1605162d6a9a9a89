"""One process per rank, for the baselines that need it: NCCL and PyTorch's symmetric memory.

`run` starts the processes as torchrun would, and always ends them: when one fails, when they take too long, or when
this process is interrupted. A store in this process holds what each rank reports, its current step, and why it failed.
So this is known whatever happens to the other processes.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
import torch.nn.functional as F

from mkernel.runtime import messages, secret

POLL = 0.5  # seconds between checks of the deadline
GRACE = 1.0  # seconds for the others to end by themselves after one has failed


@dataclass(frozen=True)
class Peer:
    """A rank's view of the others, in its own process. The default process group uses gloo."""

    rank: int
    size: int
    store: dist.Store

    def exchange(self, value: Any) -> list[Any]:
        """All ranks' values, by rank."""
        mine = torch.frombuffer(bytearray(messages.encode(value, secret.OPEN, "bench")), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([mine.numel()], device="cpu"))
        most = max(int(size) for size in sizes)
        gathered = [torch.zeros(most, dtype=torch.uint8, device="cpu") for _ in range(self.size)]
        dist.all_gather(gathered, F.pad(mine, (0, most - mine.numel())))
        texts = [each[: int(size)].numpy().tobytes() for each, size in zip(gathered, sizes)]
        return [messages.decode(text, secret.OPEN, "bench") for text in texts]

    def say(self, what: str) -> None:
        """Record what this rank is doing, for the error message if it never ends."""
        self.store.set(f"at/{self.rank}", what)

    def report(self, value: Any) -> None:
        """Set what `run` returns; only rank 0's value counts."""
        if self.rank == 0:
            self.store.set("report", json.dumps(value))


class PeerFailure(Exception):
    """Why there is no report: the error of a rank, how its process ended, or what each rank was doing when time was
    up."""


def run(function: Callable[..., None], ranks: int, *arguments: Any, seconds: float) -> Any:
    """Call function(peer, *arguments) in a new process for each rank. Returns what rank 0 reported.

    The function must be importable by name. All processes have ended when this returns or raises.
    """
    deadline = time.monotonic() + seconds
    limit = timedelta(seconds=seconds)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=limit)
    given = (function, ranks, store.port, limit, arguments)
    context = multiprocessing.start_processes(_rank, given, ranks, join=False, daemon=True, start_method="spawn")
    failure = ""
    try:
        while not context.join(POLL, grace_period=GRACE):
            if time.monotonic() >= deadline:
                failure = f"it took longer than {seconds:g} s; {_progress(store, ranks)}"
                break
    except (multiprocessing.ProcessExitedException, multiprocessing.ProcessRaisedException) as ended:
        reason = str(ended).strip().splitlines()[-1]
        failure = _first_failure(store) or f"{reason}; {_progress(store, ranks)}"
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()
            process.join()
    if store.check(["report"]):
        return json.loads(store.get("report"))
    raise PeerFailure(failure or "no rank reported anything")


def _rank(rank: int, function: Callable[..., None], ranks: int, port: int, limit: timedelta, arguments: Any) -> None:
    multiprocessing._prctl_pr_set_pdeathsig(signal.SIGKILL)  # type: ignore[attr-defined]  # never outlive the parent
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit)
    try:
        store.set(f"at/{rank}", "starting")
        group = dist.PrefixStore("group", store)
        dist.init_process_group("gloo", store=group, rank=rank, world_size=ranks, timeout=limit)
        function(Peer(rank, ranks, store), *arguments)
        dist.destroy_process_group()
    except Exception as problem:
        # the first failure is the cause: the other ranks fail because this one has left
        number = store.add("failures", 1)
        lines = str(problem).strip().splitlines() or [""]
        store.set(f"failure/{number}", f"rank {rank}: {type(problem).__name__}: {lines[0]}")
        os._exit(1)  # do not wait for a GPU that is waiting for the other ranks
    os._exit(0)


def _first_failure(store: dist.Store) -> str:
    return store.get("failure/1").decode() if store.check(["failure/1"]) else ""


def _progress(store: dist.Store, ranks: int) -> str:
    keys = [f"at/{rank}" for rank in range(ranks)]
    found = [store.get(key).decode() if store.check([key]) else "not started" for key in keys]
    return ", ".join(f"rank {rank}: {what}" for rank, what in enumerate(found))
