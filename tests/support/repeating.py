"""A simulator that repeats launches as a GPU does: the arguments are those of an earlier launch, and only addresses
are new."""

import ctypes
from dataclasses import replace

import torch

from mkernel.runtime.operands import span
from mkernel.sim.backend import SimLauncher


class Ready:
    """A launch of the simulator, for tensors at other addresses."""

    def __init__(self, launch, tensors):
        self._launch = launch
        self._spans = [(t.data_ptr(), span(t)) if t is not None and t.numel() else (0, 0) for t in tensors]

    def at(self, addresses):
        names = {name: self._moved(value, addresses) for name, value in self._launch.arguments.items()}
        return replace(self._launch, arguments=names)

    def _moved(self, value, addresses):
        if isinstance(value, tuple):
            parts = [self._moved(part, addresses) for part in value]
            return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
        if hasattr(value, "block_shape"):
            return replace(value, base=self._moved(value.base, addresses))
        if isinstance(value, torch.Tensor):
            for (start, nbytes), address in zip(self._spans, addresses):
                if start <= value.data_ptr() < start + nbytes:
                    return _tensor_at(address + value.data_ptr() - start, value)
        return value


def _tensor_at(address, like):
    """A tensor of this layout somewhere else."""
    memory = (ctypes.c_uint8 * span(like)).from_address(address)
    return torch.frombuffer(memory, dtype=like.dtype).as_strided(like.shape, like.stride())


class Repeater:
    """Repeats launches of the simulator."""

    def __init__(self, launcher, repeated):
        self._launcher, self._repeated = launcher, repeated

    def stream_key(self, rank):
        return self._launcher.stream_key(rank)

    def prepare(self, rank, launch, tensors):
        return Ready(launch, tensors)

    def launch(self, rank, group, ready, addresses):
        self._repeated.append(group._call)
        launch = ready.at(addresses)
        launch.call = group._call
        self._launcher.launch(rank, launch)


def repeating(monkeypatch):
    """Let the simulator repeat launches. Returns a list that grows with each launch that was repeated."""
    repeated = []
    initialize = SimLauncher.__init__

    def with_repeater(self, *args):
        initialize(self, *args)
        self.repeater = Repeater(self, repeated)

    monkeypatch.setattr(SimLauncher, "__init__", with_repeater)
    return repeated
