"""Groups by name: operators of torch.library take a group as a string, because a graph can hold no Python object.

A name is the same on all ranks of a group, and contains its shape: graphs that were compiled for one number of ranks
are never taken for another. Ranks that are threads of one process share names; the current group then says which of
them is asking.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from mkernel.runtime.errors import ArgumentError, MKernelError

if TYPE_CHECKING:
    from mkernel.runtime.group import Group

_groups: dict[str, list[weakref.ref[Group]]] = {}  # the newest last
current_name = ""  # of the group that was made the current one last; Dynamo recompiles when it changes


def name_in_graph(group: Any) -> str:
    """The name that stands for a group, or for the current group, in a graph that is being traced."""
    if group is None:
        if not current_name:
            raise MKernelError("there is no group yet: call mk.init() before the function is compiled, or pass group=")
        return current_name
    if isinstance(group, str):
        return group
    if dist.is_available() and isinstance(group, dist.device_mesh.DeviceMesh):
        group = group.get_group()
    return group.group_name


def name_of(group: Group, parent: Group | None, count: int) -> str:
    """The name of a group: the `count`-th of these members that `parent` has made, or the group of all ranks."""
    shape = f"{group.nodes}x{group.gpus_per_node}"
    if parent is None:
        return f"{group.world.label}:{shape}"
    members = ".".join(str(parent.members.index(member)) for member in group.members)
    return f"{parent.group_name}/{members}#{count}:{shape}"


def check_rank(group: Group, current: Group) -> None:
    """Refuse a group of another rank of this process, which a function under `mk.spawn` may have from a closure or a
    list. `current`: the current group of the caller."""
    if group.world is current.world and group.world_rank != current.world_rank:
        raise ArgumentError(
            f"group is the mk.Group of rank {group.world_rank}, but this is rank {current.world_rank}: under mk.spawn, "
            f"each rank has its own. Pass the one that the function was given on this rank, or one that this rank made "
            f"of it with split or subset"
        )


def add(group: Group) -> None:
    """Let `find` find a group for as long as it lives."""
    kept = [made for made in _groups.get(group.group_name, []) if made() is not None]
    _groups[group.group_name] = [*kept, weakref.ref(group)]


def find(name: str, current: Group | None) -> Group | None:
    """The group of this name that the calling rank belongs to, or None. `current`: the current group of the caller."""
    found = [group for made in _groups.get(name, []) if (group := made()) is not None]
    if current is not None:
        mine = [group for group in found if group.world is current.world and group.world_rank == current.world_rank]
        found = mine or [group for group in found if group.world is not current.world]
    if not found:
        return None
    ranks = {group.world_rank for group in found if group.world is found[-1].world}
    if len(ranks) > 1:
        raise MKernelError(
            f"the group {name!r} has {len(ranks)} ranks in this process, and this thread is none of them: call "
            f"operators in the thread of a rank, where mk.spawn has set the current group"
        )
    return found[-1]


def constant_in_graphs(function: Any) -> Any:
    """What torch.compiler.assume_constant_result does, without importing Dynamo: the function is called while a graph
    is traced, which takes the result as a constant, with no guard on what it reads, such as this process's groups."""
    function._dynamo_marked_constant = True
    return function


@constant_in_graphs
def size_of(name: str) -> int:
    """How many ranks the group of this name has: one of ours, or a process group of torch.distributed."""
    for made in reversed(_groups.get(name, [])):
        group = made()
        if group is not None:
            return group.size
    if dist.is_available() and dist.is_initialized():
        try:
            return dist.distributed_c10d._get_group_size_by_name(name)  # type: ignore[arg-type]
        except (RuntimeError, ValueError):
            pass
    raise MKernelError(f"this process has no group named {name!r}")


def known() -> list[str]:
    """The names of the groups in this process."""
    return sorted(name for name, made in _groups.items() if any(each() is not None for each in made))
