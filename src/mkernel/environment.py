"""Environment variables: how this process was started, and what must be set before CUDA starts. Imported first of all.

CUDA_DEVICE_MAX_CONNECTIONS: streams share so many hardware queues, 8 if nobody says otherwise. What is
queued behind something that waits, waits too, also on another stream of the same queue: a copy that a
spinning kernel needs must not stand behind a launch that waits for this kernel. Where several ranks are
threads of one process (mk.spawn) their streams are more than 8, so there are 32 queues.

A process that is one rank of several has the streams of that rank only, and keeps the driver's 8. More would
harm under MPS: four processes on one H200 with 32 each got "out of memory" when they chose their device, with 8 they
did not. A value that the user has set is left alone; one that mkernel has set in a program that then starts
torchrun, which would hand it down, is recognised by the variable CHOSEN beside it, and taken back.
"""

import os


def one_of_several_processes() -> bool:
    """Whether torchrun, or what does as torchrun does, has started this process and others with it."""
    size = os.environ.get("WORLD_SIZE", "")
    return size.isdigit() and int(size) > 1


CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
CHOSEN = "MKERNEL_CHOSE_CONNECTIONS"

if not one_of_several_processes():
    if CONNECTIONS not in os.environ:
        os.environ[CONNECTIONS] = os.environ[CHOSEN] = "32"
elif CONNECTIONS in os.environ and os.environ.get(CHOSEN) == os.environ[CONNECTIONS]:
    del os.environ[CONNECTIONS], os.environ[CHOSEN]
