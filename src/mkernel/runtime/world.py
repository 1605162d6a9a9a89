"""Where ranks live: what the host side needs from a place to run.

There are four in this package: the simulator (`mkernel.sim.world`), the threads of one process with
CUDA (`mkernel.runtime.cuda`), and processes, with GPUs (`mkernel.runtime.cuda_processes`) or without
(`mkernel.runtime.cpu_processes`). A world knows ranks by their number in the world; groups are subsets
of it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from triton import knobs

if TYPE_CHECKING:
    from mkernel.runtime.errors import CommTimeout, MKernelError
    from mkernel.runtime.group import Group, Uses


def exchange_addresses(
    group: Group, shared: Any, address_of: Callable[[Any], int] = lambda shared: shared
) -> list[int]:
    """Every rank gives what the others need to address its memory, and gets the addresses: 0 for ranks of
    other nodes."""
    everyone = enumerate(group.exchange("heap", shared))
    return [address_of(theirs) if group.topology.node_of(rank) == group.node else 0 for rank, theirs in everyone]


@dataclass(frozen=True)
class Links:
    """Rates that links are paced to, for measurements; None is as fast as the hardware goes.

    nvlink: GB/s that one rank can push to the other ranks of its node, all together.
    network: GB/s that one rank can send to other nodes, all together.
    network_latency: seconds from the last byte of a transfer to its signal.
    """

    nvlink: float | None = None
    network: float | None = None
    network_latency: float = 0.0


# Does the compiler fuse multiplications and additions? Triton has always done so, TRITON_DEFAULT_FP_FUSION=0 turns it
# off, and Triton 3.9 warns wherever nobody has chosen.
FP_FUSION: bool = knobs.language.default_fp_fusion


@dataclass(eq=False)
class Launch:
    """One kernel on one rank, ready to go."""

    op: str
    group: Group
    kernel: Any
    grid: int
    arguments: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)
    # launches of one variant run the same binary
    variant: Hashable = None
    uses: Uses | None = None  # of a workspace
    call: Hashable = None  # what all ranks must have called
    # For the simulator: arguments that the kernel only reads, and arguments of which it writes every element.
    inputs: Sequence[str] = ()
    results: Sequence[str] = ()

    def __post_init__(self) -> None:
        self.options = {"enable_fp_fusion": FP_FUSION, **self.options}


@dataclass(frozen=True)
class Part:
    """What bytes start..end-1 of a segment are. kind: "signals"; "buffer", in which kernels leave things for each
    other; or "tensor", which belongs to the user."""

    name: str
    start: int
    end: int
    kind: str


@dataclass(frozen=True)
class Array:
    """Elements in a segment, of `item` bytes each. start: bytes from the beginning of the segment. strides: in
    elements; None: one behind the other."""

    name: str
    start: int
    shape: tuple[int, ...]
    item: int
    strides: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Transfer:
    """One request to the network, as a trace shows it: from when it was posted to when its signal was raised."""

    source: int
    target: int
    nbytes: int
    ticket: int
    start: int
    end: int


class World(Protocol):
    """A place where ranks run. Those with a native network also have what runtime/network.py gives them."""

    size: int
    links: Links

    def device(self, rank: int) -> torch.device:
        """The device that the tensors of a rank of this process live on."""

    def gpu(self, rank: int) -> Hashable:
        """Names the GPU of any rank: equal for ranks that share one."""

    def node_of(self, rank: int) -> int:
        """The physical node of a rank."""

    def ctas(self, rank: int) -> int:
        """How many CTAs of one launch fit on the rank's share of its GPU at the same time."""

    def exchange(
        self, rank: int, members: Sequence[int], key: Hashable, what: str, value: Any, timeout: float
    ) -> list[Any]:
        """Every member gives a value and gets all, in the order of members. Blocks the caller. `what`
        is the call that needs it, for the error when a member does not come."""

    def publish(self, rank: int, members: Sequence[int], key: Hashable, value: Any) -> None:
        """What the others get of this rank in the exchange of that name. Does not block."""

    def confirm(self, group: Group, call: Hashable) -> None:
        """Raise, on all ranks, unless all of them make the same call now: nothing of it is carried out then."""

    def leave(self, group: Group, why: str) -> None:
        """This rank leaves the group in the middle of a call: tell the others, and let its own kernels end."""

    def broke(self, group: Group, failure: MKernelError) -> None:
        """The group broke on this rank: tell those of the others that wait for it."""

    def lost(self, group: Group, timed_out: bool) -> tuple[int, str] | None:
        """Why waits of the group ended on this rank: the rank that was lost (-1 if that is not known), and how. None if
        nothing is known; `timed_out`: one of them ended by itself."""

    def allocate(self, rank: int, nbytes: int) -> torch.Tensor:
        """Zeroed bytes that other ranks of the node can address."""

    def map(self, group: Group, memory: torch.Tensor) -> list[int]:
        """The addresses, for this rank's kernels, of what `allocate` gave to the ranks of the group, all of
        which call this; 0 for ranks of other nodes."""

    def multicast(self, group: Group, memory: torch.Tensor, addresses: Sequence[int]) -> int:
        """A multicast address, for this rank's kernels, of all copies of what `map` gave the addresses of. 0, on all
        ranks, where there is none for one of them: with several nodes, or ranks that share a GPU. All ranks of the
        group call this."""

    def upload(self, rank: int, words: Sequence[int]) -> torch.Tensor:
        """64-bit words in the memory of the rank's device."""

    def host_words(self, rank: int, count: int) -> torch.Tensor:
        """Zeroed 64-bit words that both the host and the rank's kernels can address."""

    def opened(self, group: Group) -> None:
        """A group was made on this rank."""

    def closed(self, group: Group) -> None:
        """A group was closed on this rank."""

    def register(self, group: Group, segment: int, memory: torch.Tensor | None) -> None:
        """A group has, or no longer has (None), a segment of its heap on this rank."""

    def start_proxy(self, group: Group, ring: torch.Tensor) -> None:
        """Serve the requests that the group's kernels on this rank will write into the ring."""

    def drain(self, rank: int, ring: torch.Tensor, timeout: float) -> None:
        """Wait until the proxy has completed every request in the ring, or the time is over."""

    def cause_of(self, group: Group, timeout: CommTimeout) -> MKernelError:
        """What to raise when a kernel of the group gave up: the timeout, or what was behind it."""

    def watch_transfers(self, group: Group, watch: bool) -> list[Transfer]:
        """Begin, or end, to write down what the group's proxy on this rank does; what was written since it began.
        Only the simulator can."""

    def clock(self, rank: int) -> Hashable:
        """Names the clock that the rank's traced kernels read: equal for ranks that read the same one."""

    def compare_clocks(self, rank: int) -> list[tuple[int, int, int]]:
        """Readings (host's clock before, the rank's clock, host's clock after) in nanoseconds."""

    def stream_key(self, rank: int) -> Hashable:
        """Names the stream that the rank's next launch goes to."""

    def capturing(self, rank: int) -> bool:
        """Is the rank's current stream being captured into a graph?"""

    def launch(self, rank: int, launch: Launch) -> None:
        """Queue a kernel on the rank's current stream, if all ranks of the group are ready to (`Group.confirm`)."""

    def synchronize(self, rank: int) -> None:
        """Wait until everything that the rank has queued is done."""

    def name(self, memory: torch.Tensor, parts: Sequence[Part]) -> None:
        """Say what a segment consists of: the simulator checks that kernels keep to it, and uses the names."""
        ...

    def empty(self, rank: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """An output tensor on the rank's device."""
