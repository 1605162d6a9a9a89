"""The RDMA transports: `verbs` for InfiniBand and RoCE, `efa` for AWS.

They do not discover their peers. Every rank describes itself to each of its peers, and each of its segments to all of
them; the caller transports these descriptions, which are bytes (see `mkernel.runtime.connect`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

from mkernel.net.library import RdmaPortEntry, Transport, library, milliseconds

DESCRIPTION_BYTES = 1 << 16


class RdmaTransport(Transport):
    """Base class of both.

    Args:
        rank: rank of this process in the job.
        ports: device, port and GID index of each rail. The first rail of a rank talks to the first of
            its peers, and so on.
        queues: queue pairs to each peer on each rail; the same on all ranks.
        traffic_class: traffic class of the packets; lossless RoCE networks distinguish classes by it.
        peer_timeout: seconds after which a peer that does not answer counts as lost.
        verbs_library, efa_library: files to use instead of libibverbs.so.1 and libefa.so.1.
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
        self._note_descriptors()

    def describe(self, peer: int) -> bytes:
        """What `peer` needs for its `connect`."""
        return self._description(lambda out: library().describe(self._open, peer, out, DESCRIPTION_BYTES))

    def connect(self, peer: int, description: bytes) -> None:
        """Connect to a peer by the description it made for this rank. Call `describe(peer)` before."""
        library().check(library().connect(self._open, peer, description, len(description)))

    def describe_segment(self, segment: int) -> bytes:
        """What peers need in order to write to this rank's segment."""
        return self._description(lambda out: library().describe_segment(self._open, segment, out, DESCRIPTION_BYTES))

    def learn_segment(self, peer: int, segment: int, description: bytes) -> None:
        """Let requests target the segment of a peer, by the peer's description of it."""
        library().check(library().learn_segment(self._open, peer, segment, description, len(description)))

    def _description(self, describe: Callable[[ctypes.Array[ctypes.c_char]], int]) -> bytes:
        out = ctypes.create_string_buffer(DESCRIPTION_BYTES)
        length = library().check(describe(out))
        assert length <= DESCRIPTION_BYTES
        return out.raw[:length]


class VerbsTransport(RdmaTransport):
    """InfiniBand or RoCE: reliable connections; the device itself writes signals."""

    kind = "verbs"


class EfaTransport(RdmaTransport):
    """The Elastic Fabric Adapter of AWS: unordered, so the receiving proxy counts arrivals and sets signals."""

    kind = "efa"
