"""The RDMA transports from Python: `verbs` for InfiniBand and RoCE, `efa` for AWS.

They do not find their peers by themselves. Every rank describes itself to each of its peers, and each
of its segments to all of them; descriptions are bytes that the caller carries, see `mkernel.runtime.connect`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

from mkernel.net.library import RdmaPortEntry, Transport, library, milliseconds

DESCRIPTION_BYTES = 1 << 16


class RdmaTransport(Transport):
    """The common part of both.

    Args:
        rank: of this process in the job.
        ports: device, port and GID index of each rail. The first rail of a rank talks to the first of
            its peers, and so on.
        queues: queue pairs to each peer on each rail. All ranks must agree on it.
        traffic_class: of the packets; RoCE networks without losses tell their classes apart by it.
        peer_timeout: seconds after which a peer that does not answer is taken for lost.
        verbs_library, efa_library: other files than libibverbs.so.1 and libefa.so.1.
    """

    kind = ""

    def __init__(
        self,
        rank: int,
        ports: Sequence[tuple[str, int, int]],
        *,
        queues: int = 2,
        traffic_class: int = 0,
        peer_timeout: float = 30.0,
        verbs_library: str | None = None,
        efa_library: str | None = None,
    ):
        table = (RdmaPortEntry * max(len(ports), 1))()
        for entry, (device, port, gid_index) in zip(table, ports):
            entry.device, entry.port, entry.gid_index = device.encode(), port, gid_index
        files = [None if path is None else path.encode() for path in (verbs_library, efa_library)]
        create = library().rdma_create
        handle = create(
            self.kind.encode(), rank, table, len(ports), queues, traffic_class, milliseconds(peer_timeout), *files
        )
        super().__init__(library().check(handle), rank)
        self.ports = list(ports)

    def describe(self, peer: int) -> bytes:
        """What `peer` needs for its `connect`."""
        return self._description(lambda out: library().describe(self._open, peer, out, DESCRIPTION_BYTES))

    def connect(self, peer: int, description: bytes) -> None:
        """Connect to a peer by what it told of itself to this rank. Call `describe(peer)` before."""
        library().check(library().connect(self._open, peer, description, len(description)))

    def describe_segment(self, segment: int) -> bytes:
        """What peers need to write to this rank's segment."""
        return self._description(lambda out: library().describe_segment(self._open, segment, out, DESCRIPTION_BYTES))

    def learn_segment(self, peer: int, segment: int, description: bytes) -> None:
        """A peer's segment, as it described it; requests may now name it as their target."""
        library().check(library().learn_segment(self._open, peer, segment, description, len(description)))

    def _description(self, describe: Callable[[ctypes.Array[ctypes.c_char]], int]) -> bytes:
        out = ctypes.create_string_buffer(DESCRIPTION_BYTES)
        length = library().check(describe(out))
        assert length <= DESCRIPTION_BYTES
        return out.raw[:length]


class VerbsTransport(RdmaTransport):
    """Over InfiniBand or RoCE: reliable connections, signals written by the device itself."""

    kind = "verbs"


class EfaTransport(RdmaTransport):
    """Over AWS's Elastic Fabric Adapter: no order, so the receiving proxy counts and sets the signals."""

    kind = "efa"
