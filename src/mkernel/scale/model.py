"""What an operator's package says about a call, for `mkernel plan`.

`run` carries out a plan on an `Engine`: which lanes there are, in which order each goes through its tiles and chunks,
what a step waits for, and what it sends. Orders and numbers come from the plan and from the kernels' own functions
(`mkernel.scale.evaluate`). `work` is what a rank has to do at the least, from which the floor follows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mkernel.operators import Shape
from mkernel.runtime.config import Config, Settings
from mkernel.scale.engine import Engine
from mkernel.scale.peer import Peer


@dataclass(frozen=True)
class Problem:
    """A call: its shape, the bytes of an element, and the operator's options."""

    shape: Shape
    element: int
    options: Mapping[str, Any]


@dataclass(frozen=True)
class Work:
    """What one rank computes and sends.

    flops: of the library's call; library: of which kind, as in a machine's `library_flops`. memory: bytes that it reads
    and writes. nvlink, network: bytes sent to the node, and to other nodes.

    Of the host-driven way: collectives: how many there are. kernels: launched one after the other, the library's
    included. host_network: bytes sent to other nodes, if not as many. placed: bytes read and written to put into place
    what comes, which overlaps with paced links; moved: by other kernels.
    """

    flops: float
    library: str
    memory: float
    nvlink: float
    network: float
    collectives: int = 1
    kernels: int = 2
    host_network: float | None = None
    placed: float = 0.0
    moved: float = 0.0


@dataclass(frozen=True)
class Timed:
    """A call of one node that `mkernel plan --calibrate` times, and what follows from it.

    constant: of a Machine, such as "tile_seconds", or "sm_flops.gemm": the value with which the model takes as long.
    None: none. library: the kind of work whose `library_flops` the library's time gives.
    """

    constant: str | None
    shape: Shape
    ranks: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    config: Config | None = None
    library: str | None = None


@dataclass(frozen=True)
class Model:
    """run: (engine, plan, problem). work: (problem, nodes, GPUs per node) -> Work. ranks: (problem, ranks) -> those
    among which the slowest is sought, where they differ. peer: (engine, peer, size): mKernel's own schedule for a size
    that it publishes. timed: calls that calibrate a machine."""

    run: Callable[[Engine, Any, Problem], None]
    work: Callable[[Problem, int, int], Work]
    ranks: Callable[[Problem, int], Sequence[int]] = lambda problem, ranks: (0,)
    peer: Callable[[Engine, Peer, int], None] | None = None
    timed: tuple[Timed, ...] = ()


def tiles_of_teams(config: Settings, tiles: int) -> list[tuple[Any, Any]]:
    """What CTAs compute that form teams (lang/team.py): the n-th tile of each, as (CTAs, tiles), for all n."""
    team = np.arange(config.ctas) // config.team_ctas
    teams = config.ctas // config.team_ctas
    steps = [(team + first, team + first < tiles) for first in range(0, tiles, teams)]
    return [(np.flatnonzero(valid), tile[valid]) for tile, valid in steps]
