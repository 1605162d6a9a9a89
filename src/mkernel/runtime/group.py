"""Groups: sets of ranks that work together, and what they share."""

from __future__ import annotations

import contextlib
import contextvars
import copy
import os
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch

from mkernel.lang import context as words
from mkernel.lang import requests
from mkernel.runtime import group_names, records, tuned
from mkernel.runtime.errors import ArgumentError, CommTimeout, MKernelError, RankLost, TransportError
from mkernel.runtime.gpus import Target
from mkernel.runtime.heap import ALIGNMENT, Heap, Segment, aligned
from mkernel.runtime.prepared import PreparedCalls
from mkernel.runtime.printable import printable
from mkernel.runtime.topology import Topology
from mkernel.runtime.tracer import Tracer
from mkernel.runtime.world import Array, Launch, Part, World

RING_CAPACITY = 256  # requests; a power of two
PLANS_KEPT = 1024
AGREEMENTS_KEPT = 1024

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

GroupLike: TypeAlias = "Group | ProcessGroup | DeviceMesh | str"  # what operators take as a group

Plan = TypeVar("Plan")
REFUSED = "refused"  # what a rank sends the others instead of a call that it refused, with the reason

_current: contextvars.ContextVar[Group | None] = contextvars.ContextVar("mkernel_group", default=None)


@dataclass(eq=False)
class Workspace:
    """The part of the heap that an operator uses on one stream: signals, then two halves of data."""

    segment: Segment
    signal_words: int
    half_bytes: int
    state: torch.Tensor
    context: torch.Tensor

    @property
    def data_start(self) -> int:
        """The offset of the first half, in bytes."""
        return aligned(self.signal_words * 8)

    @property
    def data(self) -> torch.Tensor:
        """Both halves."""
        return self.segment.memory[self.data_start : self.data_start + 2 * self.half_bytes]

    def half(self, parity: int) -> torch.Tensor:
        start = self.data_start + parity * self.half_bytes
        return self.segment.memory[start : start + self.half_bytes]

    def buffers(self, start: int, name: str, item: int, *shape: int) -> list[Array]:
        """An array in each half, `start` bytes from the start of the half."""
        begin = self.data_start + start
        return [Array(f"{name} in half {i}", begin + i * self.half_bytes, shape, item) for i in (0, 1)]


@dataclass(frozen=True)
class Uses:
    """What a launch keeps in a workspace, for the simulator. The kernel and the requests it posts may access these
    arrays and nothing else. `free`: byte ranges of the half it used that nobody may read after the launch; the
    simulator then poisons them, so that a premature read shows. `whole`: the ranges are of both halves, for operators
    that use the two halves as one."""

    workspace: Workspace
    arrays: Sequence[Array]
    free: Sequence[tuple[int, int]] = ()
    whole: bool = False


class Group:
    """A set of ranks that call operators together.

    Calls on a group are collective: every rank makes the same calls in the same order. Before they launch anything, the
    ranks compare their calls: if one calls something else or refuses its arguments, all raise ArgumentError, and the
    group remains usable. `rank`, `size`, `nodes`, `node`, `gpus_per_node` and `local_rank` are numbers within this
    group. `group_name` is a string that stands for the group, as in graphs of PyTorch.
    """

    @torch.inference_mode(False)  # the group will also be used outside of inference mode
    def __init__(
        self, world: World, members: Sequence[int], world_rank: int, *, timeout: float, name: Hashable,
        parent: Group | None = None,
    ):  # fmt: skip
        self.world = world
        self.members = tuple(members)
        self.size = len(self.members)
        self.world_rank = world_rank
        self.name = name
        self.timeout = timeout
        self.rank = self.members.index(world_rank)
        self.topology = Topology.of([world.node_ids[member] for member in self.members])
        self.group_name = group_names.name_of(self, parent, parent._subgroups[self.members] if parent else 0)
        self.device = world.devices[world_rank]
        self.target: Target = world.simulated_gpu or self.device  # what calls are planned for
        self._launcher = world.launcher  # looked up once: every call uses it
        self._process = os.getpid()
        self.abort_flag: torch.Tensor | None = None  # a word in this rank's memory that ends all waits of its kernels
        self._exchanges = 0
        self._call: Any = None  # the call that the ranks have agreed on for the next launch
        self._confirmed = False  # all ranks have confirmed it
        self._in_call = False  # a collective function of this rank is running
        self._different_calls: Sequence[Any] | None = None
        self._subgroups: dict[tuple[int, ...], int] = {}
        self._broken: MKernelError | None = None
        self.fresh = False  # new shapes were agreed on, or a kernel is new: what follows the launch may be new, too
        self._closed = False
        self._agreed: set[Hashable] = set()
        self._workspaces: dict[Hashable, Workspace] = {}
        self._plans: dict[int, dict[Hashable, Any]] = {}
        self._captured: list[Any] = []  # what the replay of captured graphs will use
        self.tracer: Tracer | None = None  # records the events of this rank's launches, see mkernel.trace
        self.heap = Heap(self)
        self.prepared = PreparedCalls(self)
        try:
            self._open()
        except BaseException as failure:
            self.failed("mk.init", failure)
            world.network.abort(self)
            raise
        group_names.add(self)

    def _open(self) -> None:
        world, world_rank, memory = self.world, self.world_rank, self.world.memory
        self._records = memory.host_words(world_rank, records.COUNT * records.WORDS)
        # not as a tensor: every call reads a word of it, also while PyTorch traces what is done with tensors
        self._record_words = self._records.numpy().data
        self._ring: torch.Tensor | None = None
        self._posting: torch.Tensor | None = None
        if self.nodes > 1:
            ring = memory.host_words(
                world_rank, requests.HEADER_WORDS.value + RING_CAPACITY * requests.REQUEST_WORDS.value
            )
            ring[requests.CAPACITY.value] = RING_CAPACITY
            self._ring = ring
            self._posting = memory.upload(world_rank, [0, RING_CAPACITY, RING_CAPACITY])  # see lang/requests.py
        self._control = self.heap.allocate(ALIGNMENT)
        self.abort_flag = self._control.memory[:8].view(torch.int64)
        world.launcher.open(self)
        world.exchange.join(self)
        if self._ring is not None:
            world.network.start_proxy(self, self._ring)
        self.tuned = tuned.table_of(self)

    # -- for users

    @property
    def nodes(self) -> int:
        return self.topology.nodes

    @property
    def gpus_per_node(self) -> int:
        return self.topology.gpus_per_node

    @property
    def node(self) -> int:
        return self.topology.node_of(self.rank)

    @property
    def local_rank(self) -> int:
        return self.topology.local_rank_of(self.rank)

    @property
    def multicast(self) -> bool:
        """Can the ranks, all on one node, access all copies of their memory at once, by multicast?"""
        return self._control.multicast != 0

    def __repr__(self) -> str:
        return (
            f"Group(rank {self.rank} of {self.size}, node {self.node} of {self.nodes} x {self.gpus_per_node}, "
            f"{self.device})"
        )

    def split(self, color: int | None, key: int = 0) -> Group | None:
        """Split the group into groups of equal `color`, ordered by (key, rank). Collective.

        Ranks that pass None get no group.
        """
        votes = self.exchange("split", (color, key))
        if color is None:
            return None
        chosen = sorted((vote[1], rank) for rank, vote in enumerate(votes) if vote[0] == color)
        return self.subset([rank for _, rank in chosen])

    def subset(self, ranks: Sequence[int]) -> Group:
        """A group of some ranks of this one, in the given order. Only they take part, so the remaining ranks can
        continue after one was lost."""
        self._check_process()
        self._check_ranks(ranks)
        members = tuple(self.members[rank] for rank in ranks)
        self._subgroups[members] = self._subgroups.get(members, 0) + 1
        name = (self.name, members, self._subgroups[members])
        return Group(self.world, members, self.world_rank, timeout=self.timeout, name=name, parent=self)

    def _check_ranks(self, ranks: Sequence[int]) -> None:
        if len(set(ranks)) != len(ranks) or not all(0 <= rank < self.size for rank in ranks):
            raise ArgumentError(f"ranks must be distinct numbers from 0 to {self.size - 1}, got {list(ranks)}")
        if self.rank not in ranks:
            raise ArgumentError(
                f"rank {self.rank} is not in {list(ranks)}: only the ranks of the new group may call this"
            )

    def empty(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """A tensor in the symmetric heap. Collective; see `mkernel.empty`."""
        self._check_usable()
        return self.heap.tensor(shape, dtype)

    def barrier(self) -> None:
        """Wait until every rank of the group has called this."""
        self.exchange("barrier", None)

    def synchronize(self) -> None:
        """Wait for everything this rank has queued, and raise if a kernel gave up."""
        self._launcher.synchronize(self.world_rank)
        self.check()

    def capture(
        self, graph: torch.cuda.CUDAGraph, pool: Any = None, stream: torch.cuda.Stream | None = None
    ) -> contextlib.AbstractContextManager[None]:
        """Capture the calls in a `with` block into a graph, as `torch.cuda.graph` does. Collective: all ranks of the
        group begin and end their captures together, which ranks that are threads of one process (`mk.spawn`) need.

        Args:
            graph: becomes a graph of the calls, which `graph.replay()` repeats.
            pool: as in `torch.cuda.graph`: of another graph, to share its memory.
            stream: to capture on; by default, a new one.
        """
        from mkernel.runtime import cuda_capture

        return cuda_capture.capture(self, graph, pool, stream)

    def quiet(self) -> None:
        """Wait for everything this rank has queued, and for the network requests it has posted."""
        self._launcher.synchronize(self.world_rank)
        if self._ring is not None:
            self.world.network.wait_until_drained(self, self._ring)

    def check(self) -> None:
        """Raise if a kernel of this group gave up a wait on this rank: CommTimeout (RankLost if a rank is gone), or
        TransportError if the network has failed. Raise RoutingError if a kernel refused its input."""
        if os.getpid() != self._process:
            self._check_process()
        if self._different_calls is not None:
            self.check_calls()
        if self._record_words[records.RECORDED] and self._broken is None:
            found = records.read(self._records)
            if found:
                self._mark_broken(self._cause(found))
            refusal = records.take_refusal(self._records)
            if self._broken is None and refusal is not None:
                raise refusal
        if self._broken is not None:
            raise copy.copy(self._broken) from self._broken.__cause__

    def check_calls(self) -> None:
        """Raise if this rank has launched something that the others did not call."""
        if self._different_calls is not None:
            called, self._different_calls = self._different_calls, None
            self.check_same_call(called)

    def _cause(self, found: Sequence[records.WaitRecord]) -> MKernelError:
        """The error for waits that were given up."""
        more = f" (and {len(found) - 1} more waits on this rank)" if len(found) > 1 else ""
        unusable = "The group can no longer be used."
        timed_out = any(record.timed_out for record in found)
        rank, why = self.world.exchange.wait_for_lost_rank(self, timed_out) or (-1, "")
        if rank >= 0:
            message = f"rank {rank} is lost: {why}. The wait that was given up: {found[0]}{more}. {unusable}"
            timeout: CommTimeout = RankLost(message, found, rank, why)
        elif why:
            timeout = CommTimeout(f"{why}. The wait that was given up: {found[0]}{more}. {unusable}", found)
        else:
            timeout = CommTimeout(f"{found[0]}{more}. {unusable}", found)
        timeout.group = self.name
        error = self.world.network.error(self)
        if error is None:
            return timeout
        failure = TransportError(f"{error}. What waited for it: {timeout}")
        failure.__cause__ = timeout
        return failure

    @property
    def broken(self) -> bool:
        """Has a kernel of this group given up on this rank?"""
        return self._broken is not None

    @property
    def closed(self) -> bool:
        return self._closed

    def check_unseen(self) -> None:
        """`check`, unless it has raised before."""
        if self._broken is None and not self._closed:
            self.check()

    def close(self) -> None:
        """Free the group's memory. Collective. The group cannot be used afterwards."""
        self._check_process()
        if not self._closed:
            if self._broken is None:
                self.heap.close()  # raises, and frees nothing, if the others call something else
                self._workspaces.clear()
            self._closed = True
            from mkernel.runtime import process_groups

            process_groups.forget(self)
            try:
                self.world.network.disconnect(self)
            finally:
                self.world.exchange.leave(self)

    # -- for operators

    def next_exchange(self) -> tuple[Hashable, int]:
        """The key of the next exchange: the same on all ranks that have taken part in the same number of them."""
        self._exchanges += 1
        return self.last_exchange

    @property
    def last_exchange(self) -> tuple[Hashable, int]:
        return self.name, self._exchanges

    def exchange(self, what: str, value: Any, call: Hashable = None, key: Hashable = None) -> list[Any]:
        """All-gather a value from every rank. Blocks; for set-up only. All ranks raise ArgumentError unless they pass
        the same `call` (by default `what`). `key`: of an exchange that has begun, if not the next one."""
        if self._broken is not None:
            self.check()
        self._check_process()
        if call is None and self._call is not None:  # part of a call
            call = (f"{what} of {self._call[0]}", self._call[1])
        message = (call or what, value)
        try:
            given = self.world.exchange.all_gather(
                self.world_rank, self.members, key or self.next_exchange(), what, message, self.timeout
            )
        except (CommTimeout, TransportError) as late:
            self.mark_out_of_sync(late)
            raise
        self.check_same_call([called for called, _ in given])
        return [value for _, value in given]

    def mark_out_of_sync(self, late: CommTimeout | TransportError) -> None:
        """The ranks' counts of exchanges diverged: a late value would be taken for another's. This breaks the group."""
        if isinstance(late, CommTimeout):
            late.group = self.name
        if self._broken is None:
            self._mark_broken(late)

    def _mark_broken(self, failure: MKernelError) -> None:
        self._broken = failure
        self.world.exchange.report_failure(self, failure)

    def check_same_call(self, called: Sequence[Any]) -> None:
        """Raise ArgumentError on all ranks unless all of them made the same call. `called`: the call of every rank."""
        for rank, theirs in enumerate(called):
            if isinstance(theirs, tuple) and theirs[0] == REFUSED:
                raise self._refusal_of(rank, *theirs[1:])
        mine = called[self.rank]
        for rank, theirs in enumerate(called):
            if theirs != mine:
                same = not isinstance(mine, str) and not isinstance(theirs, str) and mine[0] == theirs[0]
                rule = "pass the same values" if same else "make the same calls in the same order"
                problem = ArgumentError(
                    f"all ranks of the group must {rule}; rank {self.rank} has {_format_call(mine)}, rank {rank} has "
                    f"{_format_call(theirs)}. Nothing was launched, and the group can be used again."
                )
                problem.on_every_rank = True
                raise problem

    def _refusal_of(self, rank: int, what: str, why: str) -> MKernelError:
        """The error for a call that another rank has refused."""
        self._launcher.synchronize(self.world_rank)
        refusal: MKernelError | None = records.take_refusal(self._records)  # this rank may have the same reason
        if refusal is None:
            refusal = ArgumentError(
                f"rank {rank} refused its call of {printable(what)}: {printable(why)} Nothing was launched, and the "
                f"group can be used again."
            )
        refusal.on_every_rank = True
        return refusal

    def failed(self, what: str, failure: BaseException) -> None:
        """A call failed on this rank. Tell the others, unless they fail too, so that none of them waits for it."""
        if self._closed or self.broken or os.getpid() != self._process:
            return
        known = isinstance(failure, MKernelError)
        # KeyboardInterrupt and the like can interrupt anything
        if not isinstance(failure, Exception) or (self._confirmed and not known):
            why = f"{what} on {type(failure).__name__}" + (f" ({failure})" if str(failure) else "")
            self._broken = MKernelError(f"this rank left {why}. The group can no longer be used.")
            self.world.exchange.abandon(self, f"it left {why}")
        elif not getattr(failure, "on_every_rank", False):
            reason = str(failure) if known else f"{type(failure).__name__}: {failure}"
            refusal = ((REFUSED, what, reason if reason.endswith(".") else f"{reason}."), None)
            self.world.exchange.publish(self.world_rank, self.members, self.next_exchange(), refusal)
            failure.on_every_rank = True  # type: ignore[attr-defined]  # so it will be
        self._call, self._confirmed = None, False

    def agree(self, what: str, **values: Hashable) -> None:
        """Raise ArgumentError on all ranks unless they pass the same values. Only values that are new to the group are
        exchanged here; known ones are compared at the launch (`confirm`)."""
        key = (what, tuple(values.items()))
        if key in self._agreed:
            self._call = key
        else:
            self.all_gather_checked(what, None, **values)

    def confirm(self) -> None:
        """Raise on all ranks, before anything is launched, unless all of them are ready for the call that they have
        agreed on. This is the last step before a launch; a call that launches nothing takes it, too."""
        try:
            self.world.exchange.confirm(self, self._call)
        except (CommTimeout, TransportError) as late:
            self.mark_out_of_sync(late)
            raise
        self._confirmed = True

    def set_different_calls(self, called: Sequence[Any]) -> None:
        """This rank's launch was rolled back, as ranks called different things (`called`): its next check raises."""
        self._different_calls = called

    def all_gather_checked(self, what: str, value: Any, **values: Hashable) -> list[Any]:
        """All-gather `value`. Raise ArgumentError on all ranks unless they pass the same other values, as `agree`
        does."""
        key = (what, tuple(values.items()))
        values_of_all = self.exchange(what, value, call=key)
        if key not in self._agreed:
            if len(self._agreed) >= AGREEMENTS_KEPT:
                self._agreed.clear()  # in the same call on all ranks, since all have the same agreements
                self.prepared.forget()
            self._agreed.add(key)
            self.fresh = True
        self._call = key
        return values_of_all

    def planned(self, key: Hashable, make: Callable[[], Plan], kept: int = PLANS_KEPT) -> Plan:
        """The cached plan for this key, or a new one. At most `kept` plans of a kind are cached."""
        plans = self._plans.setdefault(kept, {})
        plan = plans.get(key)
        if plan is None:
            if len(plans) >= kept:
                plans.clear()
            plan = plans[key] = make()
        return plan

    def workspace(self, op: str, signal_words: int, half_bytes: int) -> Workspace:
        """The operator's workspace on the current stream, at least this large. Collective if it is new or must grow."""
        key = (op, self._launcher.stream_key(self.world_rank))
        have = self._workspaces.get(key)
        if have is not None and not self.heap.holds(have.segment):
            have = None  # it was freed for a larger one, whose allocation then failed on a rank
        if have is not None and have.signal_words >= signal_words and have.half_bytes >= half_bytes:
            self.keep_if_captured(have)
            return have
        if have is not None:
            signal_words = max(signal_words, have.signal_words)
            half_bytes = max(half_bytes, have.half_bytes)
        half_bytes = aligned(half_bytes)
        replaces = have.segment if have is not None and have not in self._captured else None
        workspace = self._workspaces[key] = self._make_workspace(op, signal_words, half_bytes, replaces)
        self.keep_if_captured(workspace)
        return workspace

    @property
    def capturing(self) -> bool:
        """Is this rank's current stream being captured into a graph?"""
        return self._launcher.capturing(self.world_rank)

    def keep_if_captured(self, used: Any) -> None:
        """If the launch is being captured into a graph, keep what it uses for the lifetime of the group."""
        if self.capturing and used not in self._captured:
            self._captured.append(used)

    @torch.inference_mode(False)
    def _make_workspace(self, op: str, signal_words: int, half_bytes: int, replaces: Segment | None) -> Workspace:
        # Ranks that make different calls may happen to ask for the same number of bytes.
        values = self._call[1] if self._call is not None else ()
        cut = (f"workspace of {op}", (*values, ("signal_words", signal_words), ("half_bytes", half_bytes)))
        start = aligned(signal_words * 8)
        nbytes = start + 2 * half_bytes
        parts = [Part(f"the signals of {op}", 0, signal_words * 8, "signals")]
        for parity, begin in enumerate((start, start + half_bytes)):
            parts.append(Part(f"half {parity} of the workspace of {op}", begin, begin + half_bytes, "buffer"))
        segment = self.heap.allocate(nbytes, cut, replaces, parts)
        state = self.world.memory.upload(self.world_rank, [0] * words.STATE_WORDS.value)
        table = [0] * words.TABLE.value
        table[words.RANK.value] = self.rank
        table[words.SIZE_WORD.value] = self.size
        table[words.TIMEOUT.value] = int(self.timeout * 1e9)
        table[words.STATE.value] = state.data_ptr()
        table[words.CTAS.value] = min(self._launcher.ctas(self.world_rank), words.MAX_CTAS.value)
        table[words.RECORDS.value] = self._records.data_ptr()
        table[words.RING.value] = self._ring.data_ptr() if self._ring is not None else 0
        table[words.POSTING.value] = self._posting.data_ptr() if self._posting is not None else 0
        table[words.SEGMENT.value] = segment.number
        table[words.OP.value] = records.number_of(op)
        table[words.MULTICAST.value] = segment.multicast
        table[words.ABORTED.value] = self._control.addresses[self.rank]
        table += segment.addresses + self._control.addresses
        context = self.world.memory.upload(self.world_rank, table)
        return Workspace(segment, signal_words, half_bytes, state, context)

    def launch(
        self, launch: Launch, key: Hashable | None = None, passed: Sequence[torch.Tensor | None] = (),
        made: Sequence[torch.Tensor] = (),
    ) -> None:  # fmt: skip
        """Queue a kernel once all ranks have confirmed the call. A call with a key is repeated later: see
        `PreparedCalls`."""
        if launch.grid > records.MAX_CTAS:
            raise ArgumentError(f"{launch.op}: a launch can have {records.MAX_CTAS} CTAs at most; got {launch.grid}")
        self._call = self._call or (launch.op, ())
        if self.capturing:
            if self.fresh and self.nodes > 1:  # the network must not be needed while something is loaded
                raise ArgumentError(f"{launch.op}: with several nodes, make a call of this shape before capturing one")
            # a rank that captures would keep one that does not waiting until the graph is replayed
            self._call = (self._call[0], (*self._call[1], ("captured", True)))
        launch.call = self._call
        if self.tracer is not None:
            launch = self.tracer.traced(launch)
        self._confirmed = False
        self._launcher.launch(self.world_rank, launch)
        self._call, self._confirmed = None, False
        self.prepared.keep(key, launch, passed, made)

    def _check_process(self) -> None:
        """A forked child has a copy of the group, but not its threads and connections."""
        if os.getpid() != self._process:
            raise MKernelError(
                f"this group belongs to process {self._process}, which forked this one ({os.getpid()}). A child cannot "
                f"use its parent's group: start workers with the start method 'spawn', or call no operators in them"
            )

    def _check_usable(self) -> None:
        if self._closed:
            self._check_process()
            raise MKernelError("this group was closed: make another one with mk.init(), or split or subset of a group")
        self.check()


def _format_call(call: Any) -> str:
    """A call in readable form."""
    if isinstance(call, str):
        return call
    what, values = call
    return f"{what}(" + ", ".join(f"{name}={value}" for name, value in values) + ")"


def named(name: str) -> Group:
    """The calling rank's group with this `group_name`, or that of the torch process group with this name."""
    return resolve(name)


def set_current(group: Group | None) -> None:
    """Make a group the default of operators, in this thread or task."""
    _current.set(group)
    group_names.current_name = group.group_name if group is not None else ""


def restore_current() -> None:
    """Let graphs use this thread's current group again, after other threads had theirs."""
    set_current(_current.get())


def current(group: GroupLike | None = None) -> Group:
    """The given group, or the current one. Raises if it is broken or closed."""
    found = resolve(group)
    found._check_usable()
    return found


def resolve(group: GroupLike | None) -> Group:
    """The Group that the argument of an operator stands for. Collective over the ranks of a process group that is used
    for the first time."""
    present = _current.get()
    if isinstance(group, Group):
        if present is not None and group is not present:
            group_names.check_rank(group, present)
        return group
    if group is not None:
        from mkernel.runtime import process_groups  # it makes groups, so it imports this module

        return process_groups.resolve(group, present)
    if present is None:
        raise MKernelError("there is no group yet: call mk.init() first, or run under mk.spawn(...)")
    return present
