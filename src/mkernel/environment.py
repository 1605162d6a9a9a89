"""Environment variables: how this process was started, and what must be set before CUDA starts. Imported first of all.

CUDA_DEVICE_MAX_CONNECTIONS: streams share so many hardware queues, 8 if nobody says otherwise. What is
queued behind something that waits, waits too, also on another stream of the same queue: a copy that a
spinning kernel needs must not stand behind a launch that waits for this kernel. Where several ranks are
threads of one process (mk.spawn) their streams are more than 8, so there are 32 queues.

A process that is one rank of several has the streams of that rank only, and keeps the driver's 8. So does every
process under MPS: four on one GPU with 32 each got "out of memory" when they chose their device, with 8 they
did not (measured on an H200). A value that the user has set is left alone.
"""

import os
from pathlib import Path


def one_of_several_processes() -> bool:
    """Whether torchrun, or what does as torchrun does, has started this process and others with it."""
    size = os.environ.get("WORLD_SIZE", "")
    return size.isdigit() and int(size) > 1


def under_mps() -> bool:
    """Whether CUDA will find an MPS daemon: its pipe is where CUDA looks for it."""
    return Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"), "control").exists()


if not one_of_several_processes() and not under_mps():
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
