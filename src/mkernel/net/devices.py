"""RDMA devices of this machine, and which of them a rank should use.

Everything is read from sysfs, so no library is needed, and a test can provide a tree of its own.

Ports: of the active ones those closest to the GPU, of these the fastest, and all of them if several are alike; each is
a rail. The closest port shares the longest path down the PCIe tree with the GPU (the same switch before the same host
bridge); then a port on the GPU's NUMA node is preferred.

GID, for RoCE: the address that packets carry. Version 2, which is routable and what networks are set up for, is
preferred over version 1; an IPv4 address over a global IPv6 address, and that over link-local addresses. InfiniBand has
one GID that matters, the first.
"""

from __future__ import annotations

import contextlib
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mkernel.runtime.errors import TransportError

SYSFS = Path("/sys")
MOST_RAILS = 4


@dataclass(frozen=True)
class Gid:
    """One entry of a port's table."""

    index: int
    address: ipaddress.IPv6Address
    kind: str  # "RoCE v2" or "IB/RoCE v1"


@dataclass(frozen=True)
class Location:
    """The location of a PCIe device."""

    path: tuple[str, ...] = ()  # from the host bridge down to the device
    numa_node: int = -1


@dataclass(frozen=True)
class Port:
    """A port of an RDMA device."""

    device: str
    number: int
    active: bool
    link_layer: str  # "InfiniBand", "Ethernet" or something else
    node_type: str
    driver: str
    rate: float  # Gb/s
    gids: tuple[Gid, ...]
    location: Location

    @property
    def name(self) -> str:
        return f"{self.device}:{self.number}"

    @property
    def speaks_verbs(self) -> bool:
        """Does it support reliable connections, over InfiniBand or RoCE?"""
        return self.node_type.startswith("1:") and self.link_layer in ("InfiniBand", "Ethernet") and not self.is_efa

    @property
    def is_efa(self) -> bool:
        return self.driver == "efa"


def _text(path: Path) -> str:
    with contextlib.suppress(OSError):  # an empty entry of the GID table cannot be read
        return path.read_text().strip()
    return ""


def _number(text: str, otherwise: float) -> float:
    with contextlib.suppress(ValueError, IndexError):
        return float(text.split()[0])
    return otherwise


def _location(device: Path, sysfs: Path) -> Location:
    real = device.resolve()
    root = (sysfs / "devices").resolve()
    if not real.is_relative_to(root) or not real.exists():
        return Location()
    path = real.relative_to(root).parts
    on_pci = path[:1] and path[0].startswith("pci")
    return Location(path if on_pci else (), int(_number(_text(real / "numa_node"), -1)))


def gpu_location(address: str, sysfs: Path = SYSFS) -> Location:
    """The location of the GPU with this PCI address, such as 0000:41:00.0."""
    return _location(sysfs / "bus/pci/devices" / address.lower(), sysfs)


def _gids(port: Path) -> tuple[Gid, ...]:
    found = []
    for entry in sorted((port / "gids").glob("*"), key=lambda path: int(path.name)):
        text = _text(entry)
        if text and set(text) - set("0:"):
            kind = _text(port / "gid_attrs/types" / entry.name)
            found.append(Gid(int(entry.name), ipaddress.IPv6Address(text), kind))
    return tuple(found)


def find_ports(sysfs: Path = SYSFS) -> list[Port]:
    """All ports of all RDMA devices, sorted by name."""
    found = []
    for device in sorted((sysfs / "class/infiniband").glob("*")):
        for port in sorted((device / "ports").glob("*"), key=lambda path: int(path.name)):
            found.append(
                Port(
                    device=device.name,
                    number=int(port.name),
                    active=_text(port / "state").startswith("4"),
                    link_layer=_text(port / "link_layer"),
                    node_type=_text(device / "node_type"),
                    driver=(device / "device/driver").resolve().name if (device / "device/driver").exists() else "",
                    rate=_number(_text(port / "rate"), 0.0),
                    gids=_gids(port),
                    location=_location(device / "device", sysfs),
                )
            )
    return found


def choose_gid(port: Port) -> int:
    """The index of the GID that this port should use; TransportError if it has none."""
    if not port.gids:
        raise TransportError(
            f"RDMA port {port.name} has no GID"
            + ("; its network interface needs an address" if port.link_layer == "Ethernet" else "")
        )
    if port.link_layer != "Ethernet":
        return port.gids[0].index

    def preference(gid: Gid) -> tuple[bool, int, int]:
        four = gid.address.ipv4_mapped
        if four is not None:
            scope = 1 if four.is_link_local else 3
        else:
            scope = 0 if gid.address.is_link_local else 2
        return gid.kind == "RoCE v2", scope, -gid.index

    return max(port.gids, key=preference).index


def proximity(port: Port, gpu: Location | None) -> tuple[int, bool]:
    """Larger is nearer."""
    if gpu is None:
        return 0, False
    common = 0
    for ours, theirs in zip(port.location.path, gpu.path):
        if ours != theirs:
            break
        common += 1
    return common, gpu.numa_node >= 0 and port.location.numa_node == gpu.numa_node


def choose_ports(
    ports: Sequence[Port], *, efa: bool = False, gpu: Location | None = None, names: Sequence[str] | None = None
) -> list[Port]:
    """The ports that a rank should use, one per rail.

    Args:
        ports: all ports of the machine, see `find_ports`.
        efa: devices of AWS, instead of InfiniBand and RoCE.
        gpu: the location of the rank's GPU; None: unknown.
        names: exactly these, in this order, as "mlx5_0" (its first port) or "mlx5_0:2".
    """
    kind = "EFA" if efa else "InfiniBand or RoCE"
    known = ", ".join(f"{port.name} ({port.link_layer}{'' if port.active else ', not active'})" for port in ports)
    if names is not None:
        by_name = {port.name: port for port in ports}
        chosen = []
        for name in names:
            port = by_name.get(name if ":" in name else f"{name}:1")
            if port is None:
                raise TransportError(f"there is no RDMA device {name!r} here; there are: {known or 'none'}")
            if not port.active:
                raise TransportError(f"RDMA device {name} is not active; there are: {known}")
            chosen.append(port)
        if not chosen:
            raise TransportError("devices is empty: name one, or leave it None")
        return chosen
    usable = [port for port in ports if port.active and (port.is_efa if efa else port.speaks_verbs)]
    # an Ethernet port without an address has not been set up
    usable = [port for port in usable if port.gids or port.link_layer == "InfiniBand"]
    if not usable:
        raise TransportError(
            f"there is no active {kind} device on this machine; RDMA devices: {known or 'none'}. transport='tcp' needs "
            f"none, and 'auto' chooses"
        )
    best = max(usable, key=lambda port: (proximity(port, gpu), port.rate, port.link_layer == "InfiniBand"))
    alike = [
        port
        for port in usable
        if proximity(port, gpu) == proximity(best, gpu)
        and port.rate == best.rate
        and port.link_layer == best.link_layer
    ]
    return alike[:MOST_RAILS]
