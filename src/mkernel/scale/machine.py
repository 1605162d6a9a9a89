"""Machines: the rates and latencies that the model takes, each with where it comes from.

A file in `machines/` describes one kind of machine. `sources` says of every figure whether it was measured (and where
that is written down), published by somebody, or estimated. `mkernel plan --calibrate` measures what it can on the
machine where it runs, and writes such a file.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields, replace
from importlib import resources
from pathlib import Path
from typing import Any

from mkernel.runtime.errors import ArgumentError


@dataclass(frozen=True)
class Machine:
    """A GPU, its share of its node and its network. Rates are per second, times in seconds, for one GPU, with
    16-bit floats.

    sms, capability: SMs, and the compute capability as a number: 90 for Hopper.
    sm_flops: of an SM while it works on a tile, by kind of work. tile_seconds: what a tile of a GEMM takes besides,
        mostly to store it.
    pushed_seconds: how much more a tile takes that is stored in a peer's memory. partial_seconds: to add a peer's tile.
    grouped, gated: how much longer a tile of a grouped GEMM takes, and one of two with an activation in between.
    library_flops: of the GPU with the library, by kind of work; the floor.
    memory: bytes read from memory. copy: bytes that one copying CTA writes. warp_copy: that one copying warp writes.
    place: bytes that a CTA of a mixture-of-experts operator places.
    nvlink: bytes sent to the node. nvlink_seconds: from a store until a peer that polls sees its signal.
    network: bytes sent to other nodes. network_share: which part of that transfers reach.
    network_seconds: from the last byte to the signal. request_seconds: of the proxy for a request.
    fence_seconds: for which the network idles behind each signal; 0 if signals follow the data without a fence.
    post_seconds: of a CTA to post a request. in_flight: requests that are posted and not yet sent, at most.
    pod_nodes, oversubscription: nodes under one switch, and what is left of the rate beyond it (a divisor).
    launch_seconds: from one launch to the next, besides the kernel's work. collective_seconds: a step of a collective.
    gpus_per_node: what a node has. paced: ranks share a GPU, and links are paced.
    """

    name: str
    about: str
    sms: int
    capability: int
    sm_flops: dict[str, float]
    tile_seconds: float
    pushed_seconds: float
    partial_seconds: float
    grouped: float
    gated: float
    library_flops: dict[str, float]
    memory: float
    copy: float
    warp_copy: float
    place: float
    nvlink: float
    nvlink_seconds: float
    network: float
    network_share: float
    network_seconds: float
    request_seconds: float
    fence_seconds: float
    post_seconds: float
    in_flight: int
    launch_seconds: float
    collective_seconds: float
    gpus_per_node: int = 8
    pod_nodes: int = 0  # 0: all nodes
    oversubscription: float = 1.0
    paced: bool = False
    # by kind of work and number of ranks on the GPU: how much longer a tile takes than the ranks' share of SMs explains
    sharing: dict[str, dict[str, float]] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)

    def tile(self, rows: int, columns: int, depth: int) -> float:
        """Seconds of an SM for a tile of a GEMM."""
        return 2 * rows * columns * depth / self.sm_flops["gemm"] + self.tile_seconds


def names() -> list[str]:
    """The machines that come with the package."""
    folder = resources.files("mkernel.scale").joinpath("machines")
    return sorted(entry.name.removesuffix(".json") for entry in folder.iterdir() if entry.name.endswith(".json"))


def load(name: str) -> Machine:
    """A machine by name, or from a file that ends in .json."""
    if name.endswith(".json"):
        try:
            text = Path(name).read_text()
        except (OSError, UnicodeDecodeError) as problem:
            raise ArgumentError(f"the machine {name} cannot be read: {problem}") from problem
    elif name in names():
        text = resources.files("mkernel.scale").joinpath(f"machines/{name}.json").read_text()
    else:
        raise ArgumentError(f"there is no machine {name!r}; there are {', '.join(names())}, or a file ending in .json")
    try:
        given = json.loads(text)
        based_on = given.pop("based_on", None)
        values = asdict(load(based_on)) | given if based_on else given
        if based_on:
            values["sources"] = load(based_on).sources | given.get("sources", {})
        return Machine(**values)
    except (ValueError, TypeError) as problem:
        known = ", ".join(part.name for part in fields(Machine))
        raise ArgumentError(f"the machine {name} is not valid: {problem}; its fields are {known}") from problem


def shared(machine: Machine, ranks: int, nodes: int) -> Machine:
    """The part of one GPU that each of `ranks` ranks has which share it, with links paced to the same part: how
    emulated figures are measured."""
    if ranks == 1:
        return replace(machine, paced=True, sharing={})
    return replace(
        machine,
        name=f"{machine.name}, shared by {ranks}",
        # the transport copies on 4 SMs, which the ranks of several nodes leave to it
        sms=(machine.sms - (4 if nodes > 1 else 0)) // ranks,
        sm_flops={
            kind: rate / _factor(machine.sharing.get(kind, {}), ranks) for kind, rate in machine.sm_flops.items()
        },
        library_flops={kind: rate / ranks for kind, rate in machine.library_flops.items()},
        memory=machine.memory / ranks,
        nvlink=machine.nvlink / ranks,
        network=machine.network / ranks,
        network_share=1.0,
        network_seconds=5e-6,
        request_seconds=3.5e-6,  # measured: docs/experiments.md, two nodes: cost per request
        fence_seconds=0.0,
        paced=True,
    )


def _factor(table: dict[str, float], ranks: int) -> float:
    """The value for this many ranks, or for the nearest number below; 1 if there is none."""
    below = [number for number in map(int, table) if number <= ranks]
    return table[str(max(below))] if below else 1.0


def with_network(machine: Machine, name: str) -> Machine:
    """The machine with another network: what the machine of that name has."""
    other = load(name)
    parts = ("network", "network_share", "network_seconds", "request_seconds", "fence_seconds", "in_flight",
             "pod_nodes", "oversubscription")  # fmt: skip
    return replace(machine, name=f"{machine.name} with the network of {name}", **{p: getattr(other, p) for p in parts})


def save(machine: Machine, path: Path) -> None:
    """Write a machine to a file that `load` reads."""
    values: dict[str, Any] = asdict(machine)
    path.write_text(json.dumps(values, indent=2) + "\n")
