"""Groups of torch process groups, each made once and kept.

Whatever takes a `group` takes, besides a Group, what PyTorch programs have at hand: a ProcessGroup, a one-dimensional
DeviceMesh, or a name, which is how graphs and PyTorch's functional collectives refer to a process group. The group of a
process group is the one that `mk.init` made of it last. If there is none, the first use makes one, as
`mk.init(process_group)` does, but leaves the current group as it is. That is collective: all ranks of the process group
use it at the same point of their program, as they do with its first collective.

Groups are kept here, and not only referenced, because all ranks must find the same one: if garbage collection decided,
one rank could make a new group while another one still uses the old. A group is kept until its process group is
destroyed or the group is closed.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from mkernel.runtime import group_names
from mkernel.runtime.errors import ArgumentError, MKernelError
from mkernel.runtime.gpus import take_device
from mkernel.runtime.group import Group
from mkernel.runtime.spawn import require_simulator

if dist.is_available():
    from torch.distributed.device_mesh import DeviceMesh

if TYPE_CHECKING:
    from mkernel.net.config import TransportConfig

ALONE_SECONDS = 1800.0  # the timeout of a group of one rank, which waits for no other
ACCEPTED = "a mk.Group, a torch ProcessGroup, a one-dimensional DeviceMesh, or the name of a group"
NOT_A_RANK = "this process is not one of its ranks; only its ranks may use it"

# process group -> its group, and what releases the group when the process group is gone
_kept: weakref.WeakKeyDictionary[Any, tuple[Group, weakref.finalize[Any, Any]]] = weakref.WeakKeyDictionary()
_making = threading.RLock()


def make(
    process_group: dist.ProcessGroup | None,
    *,
    transport: str | TransportConfig = "auto",
    timeout: float | None = None,
    gpus_per_node: int | None = None,
) -> Group:
    """A new group of the ranks of a process group, which `resolve` finds from now on. None is the default process
    group, or this process alone if there is no process group. Collective."""
    together = dist.is_available() and dist.is_initialized()
    if together and dist.get_world_size(process_group) > 1:
        from mkernel.runtime import processes

        group = processes.init(process_group, gpus_per_node, transport, timeout)
    elif transport != "auto" or gpus_per_node not in (None, 1):
        raise ArgumentError("transport and gpus_per_node are for groups of several processes")
    elif torch.cuda.is_available():
        from mkernel.runtime.cuda_threads import CudaThreads
        from mkernel.runtime.world import Links

        world = CudaThreads(1, 1, Links(), take_device())
        group = Group(world, [0], 0, timeout=timeout or ALONE_SECONDS, name="world")
    else:
        with require_simulator():
            from mkernel.sim.world import single_rank
        group = single_rank(timeout or ALONE_SECONDS)
    if together:
        _keep(process_group if process_group is not None else dist.group.WORLD, group)
    return group


def _keep(process_group: Any, group: Group) -> None:
    with _making:
        if process_group in _kept:
            _kept[process_group][1].detach()
        end = weakref.finalize(process_group, _release, group)
        end.atexit = False
        _kept[process_group] = group, end


def _release(group: Group) -> None:
    """The process group is gone, and with it, unless somebody else has it, the group and its memory, which this rank's
    kernels may still use."""
    if not group.closed and not group.broken:
        with contextlib.suppress(MKernelError, RuntimeError):  # a device error, which others report
            group.quiet()


def forget(group: Group) -> None:
    """The group was closed: its process group gets another one when it is used again."""
    with _making:
        for process_group in [each for each, (kept, _) in _kept.items() if kept is group]:
            _kept.pop(process_group)[1].detach()


def resolve(given: Any, current: Group | None) -> Group:
    """The Group that the argument of an operator stands for. `current`: the current group of the caller."""
    found = group_names.find(given, current) if isinstance(given, str) else None
    if found is not None:
        return found
    process_group = process_group_of(given, "group")
    if process_group is not None:
        return _group_of(process_group, current)
    unknown = ""
    if isinstance(given, str):
        unknown = (
            f": this process has no group named {given!r} (any more), and no process group. Groups: "
            f"{', '.join(group_names.known()) or 'none'}"
        )
    raise ArgumentError(f"group must be {ACCEPTED}; got {type(given).__name__}{unknown}")


def process_group_of(given: Any, argument: str) -> Any:
    """The process group that an argument stands for: a ProcessGroup, the one of a DeviceMesh, or the one with a name.
    None if it is nothing of the kind."""
    if not dist.is_available():
        return None
    if isinstance(given, dist.ProcessGroup):
        return given
    if isinstance(given, str):
        return _named(given)
    if isinstance(given, DeviceMesh):
        return _process_group_of_mesh(given, argument)
    if given is dist.GroupMember.NON_GROUP_MEMBER:
        raise ArgumentError(f"{argument} is what new_group returns to ranks that are not in the group: {NOT_A_RANK}")
    return None


def _named(name: str) -> Any:
    if not dist.is_initialized():
        return None
    try:
        return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]
    except RuntimeError:  # there is none
        return None


def _process_group_of_mesh(mesh: Any, argument: str) -> Any:
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names
        one = f"mesh[{names[-1]!r}]" if names else "mesh['tp'] of a mesh with mesh_dim_names"
        raise ArgumentError(
            f"{argument} is a DeviceMesh of {mesh.ndim} dimensions{f' {tuple(names)}' if names else ''}, but a group "
            f"has one: pass a one-dimensional mesh, such as {one}"
        )
    if mesh.get_coordinate() is None:
        raise ArgumentError(f"{argument}: the DeviceMesh {mesh.mesh.tolist()} does not contain rank {dist.get_rank()}")
    try:
        return mesh.get_group()
    except (RuntimeError, KeyError, AssertionError) as problem:
        raise ArgumentError(
            f"{argument}: the DeviceMesh {mesh.mesh.tolist()} has no process group, or it was destroyed: {problem}"
        ) from problem


def _group_of(process_group: Any, current: Group | None) -> Group:
    if process_group not in dist.distributed_c10d._world.pg_map:
        if process_group in _kept:
            _kept.pop(process_group)[1]()
        raise ArgumentError(
            "group is a ProcessGroup that was destroyed, or that init_process_group or new_group did not make"
        )
    kept = _kept.get(process_group)
    if kept is not None:
        return kept[0]
    with _making:
        kept = _kept.get(process_group)
        if kept is not None:
            return kept[0]
        _check_caller(process_group, current)
        return make(process_group)


def _check_caller(process_group: Any, current: Group | None) -> None:
    if current is not None and len(current.world.devices) > 1:
        raise ArgumentError(
            "group is a ProcessGroup, whose ranks are processes; here, under mk.spawn, ranks are parts of one process. "
            "Pass a mk.Group or its group_name, such as those that group.split(...) makes"
        )
    if dist.get_rank(process_group) < 0:
        raise ArgumentError(f"group is a ProcessGroup, and {NOT_A_RANK}")
