"""What the host side needs from a place where ranks run.

A world consists of four parts, and each backend picks one implementation of each:

| backend | exchange | memory | launcher | network |
|---|---|---|---|---|
| simulator (`sim.world`) | SimExchange | SimMemory | SimLauncher | SimNetwork |
| threads with CUDA (`runtime.cuda_threads`) | ThreadExchange | DeviceMemory | CudaLauncher | NativeNetwork |
| processes with CUDA (`runtime.cuda_processes`) | StoreExchange | SymmetricMemory | CudaLauncher | NativeNetwork |
| processes on CPUs (`runtime.cpu_processes`) | StoreExchange | SharedMemory | InlineLauncher | NativeNetwork |

A world numbers ranks from 0 to its size - 1. A group is a subset of these ranks and numbers them anew.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from triton import knobs

from mkernel.runtime.errors import ArgumentError, MKernelError

if TYPE_CHECKING:
    from mkernel.net import Statistics
    from mkernel.runtime.gpus import SimulatedGpu
    from mkernel.runtime.group import Group, Uses


def exchange_addresses(
    group: Group, shared: Any, address_of: Callable[[Any], int] = lambda shared: shared
) -> list[int]:
    """All-gather what the other ranks need to address this rank's memory. Return the addresses of all ranks' memory: 0
    for ranks on other nodes."""
    everyone = enumerate(group.exchange("heap", shared))
    return [address_of(theirs) if group.topology.node_of(rank) == group.node else 0 for rank, theirs in everyone]


@dataclass(frozen=True)
class Links:
    """Rates to pace links to, for measurements. None means unpaced.

    nvlink: total GB/s from one rank to the other ranks of its node.
    network: total GB/s from one rank to other nodes.
    network_latency: seconds from the last byte of a transfer to its signal.
    """

    nvlink: float | None = None
    network: float | None = None
    network_latency: float = 0.0

    def __post_init__(self) -> None:
        for name in ("nvlink", "network"):
            rate = getattr(self, name)
            if rate is not None and not rate > 0:
                raise ArgumentError(f"{name} must be more than 0 GB/s, or None for no pacing; got {rate}")
        if not self.network_latency >= 0:
            raise ArgumentError(f"network_latency must be 0 seconds or more; got {self.network_latency}")


# Does the compiler fuse multiplications and additions? Triton has always done so, TRITON_DEFAULT_FP_FUSION=0 turns it
# off, and Triton 3.9 warns about every launch that does not set it.
FP_FUSION: bool = knobs.language.default_fp_fusion


@dataclass(eq=False)
class Launch:
    """One kernel launch on one rank."""

    op: str
    group: Group
    kernel: Any
    grid: int
    arguments: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)
    variant: Hashable = None  # launches with the same kernel and variant run the same binary
    uses: Uses | None = None  # what the launch keeps in a workspace
    call: Hashable = None  # the call that all ranks must make
    # For the simulator: arguments that the kernel only reads, and arguments whose every element it writes.
    inputs: Sequence[str] = ()
    results: Sequence[str] = ()
    scratch: Sequence[torch.Tensor] = ()  # contiguous memory that was allocated for this launch alone

    def __post_init__(self) -> None:
        self.options = {"enable_fp_fusion": FP_FUSION, **self.options}


@dataclass(frozen=True)
class Part:
    """What the bytes [start, end) of a segment are for. kind: "signals"; "buffer", through which kernels pass data to
    each other; or "tensor", which belongs to the user."""

    name: str
    start: int
    end: int
    kind: str


@dataclass(frozen=True)
class Array:
    """An array in a segment, with elements of `item` bytes. start: its offset in the segment, in bytes. strides: in
    elements; None means contiguous."""

    name: str
    start: int
    shape: tuple[int, ...]
    item: int
    strides: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Transfer:
    """One network request in a trace, from when it was posted to when its signal was raised."""

    source: int
    target: int
    nbytes: int
    ticket: int
    start: int
    end: int


class Exchange(Protocol):
    """How the hosts of the ranks find each other and learn of failures."""

    def all_gather(
        self, rank: int, members: Sequence[int], key: Hashable, what: str, value: Any, timeout: float
    ) -> list[Any]:
        """Block until every member has passed a value under this key, and return the values in the order of `members`.
        Raise CommTimeout after `timeout` seconds, or earlier if a missing member is known to be gone. `what` names the
        call in that error."""

    def publish(self, rank: int, members: Sequence[int], key: Hashable, value: Any) -> None:
        """Pass a value under this key without waiting for the other members."""

    def confirm(self, group: Group, call: Hashable) -> None:
        """Raise ArgumentError on every rank unless all ranks of the group make this call now. A rank launches nothing
        before this has returned."""

    def join(self, group: Group) -> None:
        """Start to watch over a group that is being made on this rank."""

    def leave(self, group: Group) -> None:
        """Forget a group that was closed on this rank."""

    def abandon(self, group: Group, why: str) -> None:
        """Abort the group's kernels on this rank, which leaves a call half done, and tell the other ranks why."""

    def report_failure(self, group: Group, failure: MKernelError) -> None:
        """Tell ranks that wait for this one that the group is broken here."""

    def wait_for_lost_rank(self, group: Group, timed_out: bool) -> tuple[int, str] | None:
        """Return the rank of the group whose loss ended this rank's waits (-1 if unknown) and what happened to it; None
        if nothing is known. Unless a wait of this rank timed out by itself, another rank knows the reason: wait a
        moment for its report."""


class Memory(Protocol):
    """Memory that kernels of several ranks, or a kernel and its host, share."""

    def allocate(self, rank: int, nbytes: int) -> torch.Tensor:
        """Zeroed bytes that the other ranks of the node can map."""

    def map(self, group: Group, memory: torch.Tensor) -> list[int]:
        """Map what every rank of the group got from `allocate`, and return the addresses that this rank's kernels use:
        0 for ranks on other nodes. Collective."""

    def unmap(self, memory: torch.Tensor) -> None:
        """No kernel uses the addresses that `map` returned any more. They end with the memory at the latest."""

    def map_multicast(self, group: Group, memory: torch.Tensor, addresses: Sequence[int]) -> int:
        """The multicast address of the copies that `map` returned the addresses of. 0 on all ranks if any of them has
        none: with several nodes, or if ranks share a GPU. Collective."""

    def upload(self, rank: int, words: Sequence[int]) -> torch.Tensor:
        """These 64-bit words in the memory of the rank's device."""

    def host_words(self, rank: int, count: int) -> torch.Tensor:
        """Zeroed 64-bit words that both the host and the rank's kernels can address."""

    def describe(self, group: Group, segment: int, memory: torch.Tensor, parts: Sequence[Part]) -> None:
        """Say which segment of the group's heap this memory is, and what its parts are for. The simulator checks that
        kernels respect this, and uses the names in its errors."""

    def empty(self, rank: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialized output tensor on the rank's device."""

    def maker(self, rank: int, like: torch.Tensor) -> Callable[[], torch.Tensor]:
        """A function that does what `empty` did for a tensor, in less time."""


class Clock(Protocol):
    """The clock that a rank's traced kernels read."""

    @property
    def name(self) -> Hashable:
        """Equal for ranks that read the same clock."""

    def compare(self) -> list[tuple[int, int, int]]:
        """Readings of (host clock before, this clock, host clock after), in nanoseconds."""


class Repeater(Protocol):
    """The part of a Launcher that repeats launches (see prepared.py)."""

    def stream_key(self, rank: int) -> Hashable | None:
        """Identifies the stream of the rank's next launch; None if it is being captured into a graph."""

    def prepare(self, rank: int, launch: Launch, tensors: Sequence[torch.Tensor | None]) -> Any:
        """What `launch` needs to repeat a launch on the current stream with other tensors of the same layout in place
        of these; None if it cannot be repeated."""

    def launch(self, rank: int, group: Group, ready: Any, addresses: Sequence[int]) -> None:
        """Repeat a launch with tensors at these addresses, once all ranks of the group have confirmed the call."""


class Launcher(Protocol):
    """Streams and kernels."""

    @property
    def repeater(self) -> Repeater | None:
        """Repeats launches; None if every launch is prepared again."""

    def ctas(self, rank: int) -> int:
        """How many CTAs of one launch are resident at a time on the rank's share of its GPU."""

    def open(self, group: Group) -> None:
        """Prepare to launch and abort kernels of a new group."""

    def stream_key(self, rank: int) -> Hashable:
        """Identifies the stream of the rank's next launch."""

    def capturing(self, rank: int) -> bool:
        """Is the rank's current stream being captured into a graph?"""

    def launch(self, rank: int, launch: Launch) -> None:
        """Queue a kernel on the rank's current stream once all ranks of the group have confirmed the call."""

    def synchronize(self, rank: int) -> None:
        """Wait for everything that the rank has queued."""

    def poll_idle(self, rank: int) -> bool:
        """Has everything finished that the rank has queued?"""

    def abort(self, group: Group) -> None:
        """End all waits of the group's kernels on this rank. Callable from any thread, also while kernels spin."""

    def clock(self, rank: int) -> Clock:
        """The clock of the rank's traced kernels."""


class Network(Protocol):
    """Transfers between nodes. A group with several nodes has one proxy per rank."""

    def start_proxy(self, group: Group, ring: torch.Tensor) -> None:
        """Serve the requests that the group's kernels on this rank write to the ring. Collective."""

    def register(self, group: Group, segment: int, memory: torch.Tensor | None) -> None:
        """Let transfers access a segment of the group's heap on this rank; with None, no longer. Collective."""

    def wait_until_drained(self, group: Group, ring: torch.Tensor) -> None:
        """Wait until the proxy has completed every request in the group's ring, or has failed, for the group's timeout
        at most."""

    def wait_until_arrived(self, group: Group) -> None:
        """A barrier for ranks whose requests have completed. Afterwards, the requests of the others to this rank have
        arrived, also those that it did not wait for. Collective."""

    def error(self, group: Group) -> str | None:
        """Why the group's network failed on this rank; None if it works."""

    def statistics(self, group: Group) -> Statistics | None:
        """What the group's proxy on this rank has done so far; None if there is no native proxy."""

    def record_transfers(self, group: Group, record: bool) -> list[Transfer]:
        """Start, or stop, to record the transfers of the group's proxy on this rank, and return those recorded so far.
        Only the simulator records any."""

    def disconnect(self, group: Group) -> None:
        """Stop the proxy of a group that is being closed, after it has sent what was posted. Collective, unless the
        group is broken."""

    def abort(self, group: Group) -> None:
        """Stop the proxy at once, so that the ranks on other nodes see the connection close."""


class World(Protocol):
    """A place where ranks run."""

    size: int
    links: Links
    label: str  # begins the names of its groups
    simulated_gpu: SimulatedGpu | None  # what the simulator plans calls for, if it plans them as for a GPU

    @property
    def node_ids(self) -> Sequence[int]:
        """The physical node of every rank."""

    @property
    def gpu_ids(self) -> Sequence[Hashable]:
        """Identifies the GPU of every rank: equal for ranks that share one."""

    @property
    def devices(self) -> Mapping[int, torch.device]:
        """The torch device of every rank of this process."""

    @property
    def exchange(self) -> Exchange: ...

    @property
    def memory(self) -> Memory: ...

    @property
    def launcher(self) -> Launcher: ...

    @property
    def network(self) -> Network: ...
