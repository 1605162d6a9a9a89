"""Initial values: the same on every rank, also if the ranks are threads of one process.

Every rank draws the values of the whole module and keeps its shard. In a process of its own, a rank draws from torch's
default generator, as the modules of torch do. Ranks that are threads share that generator: one would draw what another
was about to draw, and their shards would be of different wholes. So they first agree on its state, and each draws from
a copy of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from mkernel.runtime.group import Group


@contextlib.contextmanager
def agreed_generator(
    group: Group | None, device: torch.device, given: torch.Generator | None
) -> Iterator[torch.Generator | None]:
    """The generator to draw initial values from; None is the default one. Collective if the ranks are threads of one
    process and no generator is given. What is drawn also advances the default generator."""
    shared = group is not None and group.size > 1 and len(group.world.devices) > 1
    if group is None or not shared or given is not None or device.type not in ("cpu", "cuda"):
        yield given
        return
    default = _default_generator(device)
    group.exchange("initial values", None)  # every rank has drawn what it draws before this
    state = group.exchange("state of the generator", default.get_state() if group.rank == 0 else None)[0]
    generator = torch.Generator(device)
    generator.set_state(state)
    yield generator
    default.set_state(generator.get_state())


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    torch.cuda.init()  # there are no generators before
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]
