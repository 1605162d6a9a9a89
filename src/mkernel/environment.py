"""Environment variables that must be set before CUDA starts; imported first of all.

CUDA_DEVICE_MAX_CONNECTIONS: streams share so many hardware queues, 8 if nobody says otherwise. What is
queued behind something that waits, waits too, also on another stream of the same queue: a copy that a
spinning kernel needs must not stand behind a launch that waits for this kernel. A value that the user has
set is left alone.
"""

import os

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
