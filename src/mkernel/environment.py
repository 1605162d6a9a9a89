"""Environment variables: how this process was started, and what must be set before CUDA starts. Imported first.

CUDA_DEVICE_MAX_CONNECTIONS is the number of hardware queues that streams share, 8 by default. Work that is queued after
a waiting operation waits, too, even on another stream of the same queue. So a copy that a spinning kernel needs must
not be queued after a launch that waits for this kernel. If several ranks are threads of one process (mk.spawn), they
have more than 8 streams, so mkernel asks for 32 queues.

A process that is one rank of several has the streams of that rank only, and keeps the driver's 8. More queues would
harm under MPS: four processes on one H200 with 32 queues each got "out of memory" when they chose their device; with 8,
they did not. A value that the user has set is kept. If mkernel has set the value in a program that then starts
torchrun, the processes inherit it; they recognise it by the variable CHOSEN, and remove it.
"""

import os


def one_of_several_processes() -> bool:
    """Whether torchrun, or a similar launcher, has started this process together with others."""
    size = os.environ.get("WORLD_SIZE", "")
    return size.isdigit() and int(size) > 1


CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
CHOSEN = "MKERNEL_CHOSE_CONNECTIONS"

if not one_of_several_processes():
    if CONNECTIONS not in os.environ:
        os.environ[CONNECTIONS] = os.environ[CHOSEN] = "32"
elif CONNECTIONS in os.environ and os.environ.get(CHOSEN) == os.environ[CONNECTIONS]:
    del os.environ[CONNECTIONS], os.environ[CHOSEN]
