"""The package's public functions other than operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from mkernel import operators
from mkernel.environment import one_of_several_processes
from mkernel.runtime import process_groups
from mkernel.runtime.collective import collective
from mkernel.runtime.errors import ArgumentError, MKernelError
from mkernel.runtime.group import Group, GroupLike, resolve, set_current
from mkernel.runtime.planning import check_timeout

if TYPE_CHECKING:
    from mkernel.net.config import TransportConfig


def init(
    process_group: Any = None,
    *,
    transport: str | TransportConfig = "auto",
    timeout: float | None = None,
    gpus_per_node: int | None = None,
) -> Group:
    """Create the group of this process and make it the current one.

    Under torchrun, or with a process group, this is the group of all its ranks. Ranks of a node share memory (on GPUs
    through torch symmetric memory); nodes communicate by RDMA or TCP. A process uses its current GPU. If that is GPU 0,
    which is also the default, it uses GPU number LOCAL_RANK instead and makes it the current one. There may be fewer
    GPUs than processes: processes on one GPU share its SMs. Without a GPU, the processes run on CPUs.

    Otherwise, this is a group of one rank: on the current GPU, or in the simulator if there is none. For several ranks
    in one process, use `mk.spawn`.

    From now on, operators that are passed the process group, a mesh of it, or its name use this group, too.

    Args:
        process_group: any torch.distributed process group, a one-dimensional DeviceMesh, or the name of a process
            group; None is the default one. If torchrun started this process and there is no default process group yet,
            it is created, with gloo.
        transport: how nodes communicate: "verbs" (InfiniBand, RoCE), "efa" (AWS) or "tcp", or one of
            `mkernel.net.Verbs`, `Efa` and `Tcp` with details such as the device's name. "auto" is verbs if every rank
            has a working device for it, else tcp.
        timeout: seconds that a rank waits for another one before the whole group gives up. None takes the timeout of
            the process group, 10 to 30 minutes unless `init_process_group(timeout=...)` sets it: long enough for a rank
            that writes a checkpoint. A rank that has waited for 30 seconds logs which ranks it is waiting for. A rank
            whose process has ended is not waited for.
        gpus_per_node: treat every group of this many ranks as a node; by default, the ranks of a host are a node.
    """
    if timeout is not None:
        check_timeout(timeout)
    _refuse_init_under_spawn()
    distributed = torch.distributed.is_available()
    if distributed and not torch.distributed.is_initialized() and one_of_several_processes():
        torch.distributed.init_process_group("gloo")
    together = distributed and torch.distributed.is_initialized()
    if process_group is not None and not together:
        raise ArgumentError("process_group was passed, but torch.distributed.init_process_group has not been called")
    if process_group is not None:
        given, process_group = process_group, process_groups.process_group_of(process_group, "process_group")
        if process_group is None:
            raise ArgumentError(
                f"process_group must be a ProcessGroup, a one-dimensional DeviceMesh, or the name of a process group; "
                f"got {given!r}"
            )
    if together and torch.distributed.get_rank(process_group) < 0:
        raise ArgumentError("process_group: this process is not one of its ranks; only its ranks may call mk.init")
    group = process_groups.make(process_group, transport=transport, timeout=timeout, gpus_per_node=gpus_per_node)
    set_current(group)
    return group


def _refuse_init_under_spawn() -> None:
    """A function that was written for torchrun would silently continue in a group of one rank."""
    try:
        here = resolve(None)
    except MKernelError:  # there is no group yet
        return
    if len(here.world.devices) > 1:
        raise MKernelError(
            f"mk.init() makes the group of a process, but this is rank {here.rank} of {here.size} under mk.spawn, all "
            f"of whose ranks are in one process: use the group that mk.spawn passes to the function. It is the current "
            f"group already"
        )


@collective
def empty(
    *size: int | Sequence[int], dtype: torch.dtype = torch.bfloat16, group: GroupLike | None = None
) -> torch.Tensor:
    """An uninitialized tensor in the symmetric heap of the group; operators send it without a copy.

    Collective: every rank of the group calls it, in the same order and with the same number of bytes. The memory is
    released once all ranks have dropped the tensor.
    """
    shape = size[0] if len(size) == 1 and isinstance(size[0], (tuple, list, torch.Size)) else size
    if not all(isinstance(number, int) and number >= 0 for number in shape):
        raise ArgumentError(f"size must be integers of at least 0, got {size}")
    if not isinstance(dtype, torch.dtype):
        raise ArgumentError(f"dtype must be a torch.dtype such as torch.bfloat16, got {dtype!r}")
    assert isinstance(group, Group)
    return group.empty(*shape, dtype=dtype)


def explain(op: str, *args: Any, **kwargs: Any) -> Any:
    """The plan of a call `mk.<op>(*args, **kwargs)`, with reasons; print it to read it.

    Nothing is launched. `op` is the operator's name, such as "all_gather_matmul". This is not collective, unless
    `group` is a process group that has not been used before. Tensors may require gradients.
    """
    with torch.no_grad():  # whether there is a backward pass is the call's business
        return operators.find(op).load("explain")(*args, **kwargs)
