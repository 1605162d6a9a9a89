"""Machines: the rates and latencies that the model takes, each with where it comes from.

A file in `machines/` describes one kind of machine. `sources` says of every figure whether it was measured (and where
that is written down), published by somebody, or estimated. `mkernel plan --calibrate` measures what it can on the
machine where it runs, and writes such a file.
"""

from __future__ import annotations

import json
import math
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
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
        mostly to store it. tile_rates: by rows x columns of a tile, its part of that rate; 1 for shapes that are not
        there.
    pushed_seconds: how much more a tile of 128 x 256 takes that is stored in a peer's memory. partial_seconds: to add
    a peer's.
    grouped, gated: how much longer a tile of a grouped GEMM takes, and one of two with an activation in between.
    library_flops: of the GPU with the library, by kind of work; the floor. beyond_library: how much faster than that a
        call can be at most.
    capacity: bytes of memory; 0: unknown. memory: bytes read from it. grouped_memory: by the library's grouped GEMM.
    copy: bytes that one copying CTA writes. warp_copy: that one copying warp writes.
    place: bytes that a CTA of a mixture-of-experts operator places. count: ids of experts that it counts.
    routing_seconds: the steps of routing besides, one after the other.
    nvlink: bytes sent to the node. nvlink_switches: what its switches carry for all GPUs of the node together;
        0: as much as these send. nvlink_seconds: from a store until a peer that polls sees its signal.
    network: bytes sent to other nodes. network_share: which part of that transfers reach.
    pcie: bytes from the GPU to its network cards. rails: how many of these it has, which share `network` evenly.
        split_bytes: a request of more is divided, into pieces for as many rails; 0: each takes one rail, in turn.
    network_seconds: from the last byte to the signal. request_seconds: of the proxy for a request.
    fence_seconds: for which the network idles behind each signal; 0 if signals follow the data without a fence.
    post_seconds: of a CTA to post a request. in_flight: requests that are posted and not yet sent, at most.
    pod_nodes, oversubscription: nodes under one switch, and what is left of the rate beyond it (a divisor).
    launch_seconds: from one launch to the next, besides the kernel's work. collective_seconds: a step of a collective.
    about, network_about: which GPUs and nodes, and which network. gpus_per_node: what a node has. paced: ranks share a
        GPU, and links are paced.
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
    beyond_library: float
    memory: float
    grouped_memory: float
    copy: float
    warp_copy: float
    place: float
    count: float
    routing_seconds: float
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
    pcie: float
    network_about: str = ""
    gpus_per_node: int = 8
    nvlink_switches: float = 0.0
    rails: int = 1
    split_bytes: int = 0
    pod_nodes: int = 0  # 0: all nodes
    oversubscription: float = 1.0
    paced: bool = False
    tile_rates: dict[str, float] = field(default_factory=dict)
    # by kind of work and number of ranks on the GPU: how much longer a tile takes than the ranks' share of SMs explains
    sharing: dict[str, dict[str, float]] = field(default_factory=dict)
    capacity: float = 0.0
    sources: dict[str, str] = field(default_factory=dict)

    @property
    def summary(self) -> str:
        """What it is, in words."""
        return f"{self.about} Network: {self.network_about}." if self.network_about else self.about

    def nvlink_of(self, gpus: int) -> float:
        """Bytes per second that a GPU sends to its node while all of `gpus` do."""
        return min(self.nvlink, self.nvlink_switches / gpus) if self.nvlink_switches else self.nvlink

    @property
    def network_rate(self) -> float:
        """Bytes per second that a GPU sends to other nodes."""
        return min(self.network * self.network_share, self.pcie)

    def tile(self, rows: int, columns: int, depth: int) -> float:
        """Seconds of an SM for a tile of a GEMM."""
        rate = self.sm_flops["gemm"] * self.tile_rates.get(f"{rows}x{columns}", 1.0)
        return 2 * rows * columns * depth / rate + self.tile_seconds


def names() -> list[str]:
    """The machines that come with the package."""
    folder = resources.files("mkernel.scale").joinpath("machines")
    return sorted(entry.name.removesuffix(".json") for entry in folder.iterdir() if entry.name.endswith(".json"))


TILE_ELEMENTS = 128 * 256  # of 16 bits, of the tile that `pushed_seconds` and `partial_seconds` are for
MEASURED = "h200-cx7"  # the machine with the GPU that our figures come from
RATES_BY_KIND = ("sm_flops", "library_flops")
RANGES = {"network_share": (0.0, 1.0), "oversubscription": (1.0, math.inf)}  # of what is above 0 besides
MAY_BE_ZERO = ("capacity", "pod_nodes", "nvlink_switches", "split_bytes")  # and times


def _text(name: str) -> str:
    """The file of a machine that comes with the package."""
    return resources.files("mkernel.scale").joinpath(f"machines/{name}.json").read_text()


def _kinds(key: str) -> list[str]:
    """The kinds of work that a machine must have a rate for: those that `MEASURED` has."""
    return list(json.loads(_text(MEASURED))[key]) if key in RATES_BY_KIND else []


def load(name: str) -> Machine:
    """A machine by name, or from a file that ends in .json."""
    return _load(name, ())


def _load(name: str, above: tuple[Path | str, ...]) -> Machine:
    """above: the files that are based on this one."""
    if name.endswith(".json"):
        place: Path | str = Path(name).resolve()
        if place in above:
            raise ArgumentError(f"the machine {name} is not valid: based_on leads back to the file itself")
        try:
            text = Path(name).read_text()
        except (OSError, UnicodeDecodeError) as problem:
            raise ArgumentError(f"the machine {name} cannot be read: {problem}") from problem
    elif name in names():
        place = name
        text = _text(name)
    else:
        raise ArgumentError(f"there is no machine {name!r}; there are {', '.join(names())}, or a file ending in .json")
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise ArgumentError(f"the machine {name} is not valid: it is not JSON: {problem}") from problem
    if not isinstance(given, dict):
        raise ArgumentError(f"the machine {name} is not valid: it must be a JSON object")
    based_on = given.pop("based_on", None)
    if not isinstance(based_on, str | None):
        raise ArgumentError(
            f"the machine {name} is not valid: based_on must be the name of a machine, got {based_on!r}"
        )
    base = asdict(_load(based_on, (*above, place))) if based_on else {}
    values = base | given
    for part in fields(Machine):
        if part.name in values:
            _check(name, part.name, str(part.type), values[part.name])
        elif part.default is MISSING and part.default_factory is MISSING:
            raise ArgumentError(
                f"the machine {name} is not valid: it has no {part.name}, and no based_on to take it from"
            )
    known = [part.name for part in fields(Machine)]
    if unknown := sorted(set(values) - set(known)):
        raise ArgumentError(
            f"the machine {name} is not valid: there is no {unknown[0]}; its fields are {', '.join(known)}"
        )
    return Machine(**values | {"sources": base.get("sources", {}) | values.get("sources", {})})


def _check(machine: str, key: str, kind: str, value: Any) -> None:
    """Refuse a value that a machine cannot have. kind: the type of its field."""
    rule = _rule_broken(key, kind, value)
    if rule:
        raise ArgumentError(f"the machine {machine} is not valid: {key} must be {rule}, got {value!r}")


def _rule_broken(key: str, kind: str, value: Any) -> str:
    """What a value must be and is not; "" if all is well."""
    if kind.startswith("dict"):
        if not isinstance(value, dict):
            return "an object"
        if missing := [name for name in _kinds(key) if name not in value]:
            return f"an object with {missing[0]!r}"
        inner = kind.removeprefix("dict[str, ").removesuffix("]")
        for name, part in value.items():
            if inner.startswith("dict") and isinstance(part, dict) and not all(each.isdigit() for each in part):
                return f"an object in which {name} has numbers of ranks"
            if rule := _rule_broken(key, inner, part):
                return f"an object in which {name} is {rule}"
        return ""
    if kind in ("str", "bool"):
        return "" if type(value).__name__ == kind else {"str": "a text", "bool": "true or false"}[kind]
    if isinstance(value, bool) or not isinstance(value, int if kind == "int" else int | float):
        return "a whole number" if kind == "int" else "a number"
    least, most = RANGES.get(key, (0.0, math.inf))
    if not math.isfinite(value) or not least <= value <= most:
        return f"from {least:g} to {most:g}" if key in RANGES else "a number, 0 or more"
    return "above 0" if value == 0 and not key.endswith("_seconds") and key not in MAY_BE_ZERO else ""


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
        grouped_memory=machine.grouped_memory / ranks,
        nvlink=machine.nvlink / ranks,
        network=machine.network / ranks,
        network_share=1.0,
        pcie=machine.pcie / ranks,
        nvlink_switches=0.0,
        rails=1,
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
    parts = ("network", "network_share", "network_seconds", "request_seconds", "fence_seconds", "in_flight", "rails",
             "split_bytes", "pod_nodes", "oversubscription")  # fmt: skip
    sources = machine.sources | {part: other.sources[part] for part in parts if part in other.sources}
    taken = {part: getattr(other, part) for part in (*parts, "network_about")}
    return replace(machine, name=f"{machine.name} with the network of {name}", sources=sources, **taken)


def save(machine: Machine, path: Path) -> None:
    """Write a machine to a file that `load` reads."""
    values: dict[str, Any] = asdict(machine)
    path.write_text(json.dumps(values, indent=2) + "\n")
