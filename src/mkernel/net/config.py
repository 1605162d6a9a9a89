"""Values of `mk.init(transport=...)`: which transport connects the nodes, and how."""

from __future__ import annotations

from dataclasses import dataclass

from mkernel.runtime.errors import ArgumentError


@dataclass(frozen=True)
class Auto:
    """`Verbs` if every rank has an active device that works, else `Tcp`."""


@dataclass(frozen=True)
class Tcp:
    """Plain sockets. streams: connections to each peer."""

    streams: int = 4


@dataclass(frozen=True)
class Verbs:
    """InfiniBand or RoCE.

    Args:
        devices: the rails of this rank, as "mlx5_0" or "mlx5_0:2" (its second port); None: those nearest to the GPU.
        gid_index: index into the GID table of every device; None: the best one.
        queues: queue pairs to each peer on each rail.
        traffic_class: traffic class of the packets, for networks that distinguish them.
    """

    devices: tuple[str, ...] | None = None
    gid_index: int | None = None
    queues: int = 2
    traffic_class: int = 0


@dataclass(frozen=True)
class Efa:
    """The Elastic Fabric Adapter of AWS. `devices` as in `Verbs`."""

    devices: tuple[str, ...] | None = None


TransportConfig = Auto | Tcp | Verbs | Efa
_BY_NAME: dict[str, TransportConfig] = {"auto": Auto(), "tcp": Tcp(), "verbs": Verbs(), "efa": Efa()}


def transport_config(transport: TransportConfig | str) -> TransportConfig:
    """The configuration that `mk.init(transport=...)` names."""
    if isinstance(transport, str) and transport in _BY_NAME:
        return _BY_NAME[transport]
    if isinstance(transport, (Auto, Tcp, Verbs, Efa)):
        return transport
    names = ", ".join(map(repr, _BY_NAME))
    raise ArgumentError(f"transport must be {names} or a Tcp, Verbs or Efa of mkernel.net, got {transport!r}")
