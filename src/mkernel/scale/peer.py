"""The CUDA library mKernel in the model: its own schedules, for comparison with the times that it publishes.

Its source is public, and so are times on 2 nodes of 8 H200 with EFA. Its kernels give CTAs roles, as ours do, but other
ones, and hand over work between them in other ways. An operator's package says in peer.py how mKernel's kernel goes
through a published size: which CTAs have which role, in which order they take tiles and chunks (with the numbers of its
benchmarks), and what waits for what. Resources and steps are those of the Engine. What its kernels reach on a GPU is in
peer.json. validation.py compares.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

import numpy as np

from mkernel.scale.engine import Lanes, Link
from mkernel.scale.machine import Machine, load

Array = Any
SMS = 132
TILE_M, TILE_N = 128, 256  # of all its GEMMs
TILE_BYTES = TILE_M * TILE_N * 2


@dataclass(frozen=True)
class Peer:
    """What its kernels reach, in units of a Machine.

    machine: of an SM, the network, and bulk copies over NVLink. cache: bytes that all SMs read from the L2 cache.
    multicast: bytes that a GPU receives by multicast. scattered: bytes that a GPU sends in adds to other GPUs' memory,
    sums in the switch, and stores of single words. start_seconds: how much longer a call takes that is timed alone.
    back_to_back: operators of which calls are timed one after the other instead. calibration: by operator and size,
    what a published time calibrates.
    """

    machine: Machine
    cache: float
    multicast: float
    scattered: float
    start_seconds: float
    back_to_back: frozenset[str]
    calibration: Mapping[str, Mapping[str, str]]
    sources: Mapping[str, str]

    def tile(self, depth: int, ctas: int) -> float:
        """Seconds for a tile of a GEMM, if so many CTAs multiply: at the rate of an SM, or at that of the cache, of
        which each tile reads all rows and columns."""
        read = ctas * (TILE_M + TILE_N) * depth * 2 / self.cache
        return max(self.machine.tile(TILE_M, TILE_N, depth), read + self.machine.tile_seconds)


def load_peer() -> Peer:
    given = json.loads(resources.files("mkernel.scale").joinpath("peer.json").read_text())
    machine = replace(load(given["based_on"]), name="mKernel", **given["machine"])
    return Peer(
        machine, given["cache"], given["multicast"], given["scattered"], given["start_seconds"],
        frozenset(given["back_to_back"]), given["calibration"], given["sources"],
    )  # fmt: skip


def run_list(lanes: Lanes, ready: Array, seconds: float) -> None:
    """Tiles that are ready at these times, of which CTA i of n takes the i-th, the (i + n)-th and so on."""
    count = len(lanes.clock)
    steps = -(-len(ready) // count)
    padded = np.append(ready, np.zeros(steps * count - len(ready))).reshape(steps, count)
    lanes.run(padded, seconds, -(-(len(ready) - np.arange(count)) // count), "multiply", "rows")


def move(lanes: Lanes, ready: Array, seconds: float, link: Link, nbytes: float) -> Array:
    """Chunks that are ready at these times, dealt in turn: a lane works on one for so long, and until the link has
    carried it. Returns when each is through."""
    done, count = np.empty(len(ready)), len(lanes.clock)
    for first in range(0, len(ready), count):
        chunk = np.arange(first, min(first + count, len(ready)))
        which = chunk - first
        lanes.wait(ready[chunk], "chunks", which)
        through = link.carry(lanes.clock[which], nbytes)
        lanes.work(seconds, "copy", which)
        lanes.wait(through, "NVLink", which)
        done[chunk] = lanes.clock[which]
    return done


def claim(lanes: Lanes, ready: Array, seconds: float, kind: str) -> Array:
    """Jobs that lanes claim in order, each when it is free, and that begin when they are ready. Returns when each is
    done."""
    free = [(clock, lane) for lane, clock in enumerate(lanes.clock.tolist())]
    heapq.heapify(free)
    jobs, done = np.zeros(len(lanes.clock)), np.empty(len(ready))
    for job, time in enumerate(ready.tolist()):
        clock, lane = free[0]
        done[job] = max(clock, time) + seconds
        jobs[lane] += 1
        heapq.heapreplace(free, (done[job], lane))
    end = np.array([clock for clock, _ in sorted(free, key=lambda each: each[1])])
    lanes.wait(end - jobs * seconds, "jobs")
    lanes.work(jobs * seconds, kind)
    return done
