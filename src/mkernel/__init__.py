"""Distributed GPU operators for PyTorch, each of them one persistent kernel per rank.

    import mkernel as mk
    y = mk.all_gather_matmul(a, b)

See `mk.spawn` for a cluster inside this process, and the documentation for everything else.
"""

from mkernel.api import empty, explain, init
from mkernel.ops.all_gather_matmul import all_gather_matmul
from mkernel.ops.matmul_all_reduce import matmul_all_reduce
from mkernel.ops.matmul_reduce_scatter import matmul_reduce_scatter
from mkernel.runtime.config import Config
from mkernel.runtime.errors import ArgumentError, CommTimeout, Deadlock, MKernelError, SimulatorError, TransportError
from mkernel.runtime.group import Group
from mkernel.runtime.records import WaitRecord
from mkernel.runtime.spawn import spawn
from mkernel.runtime.world import Links
from mkernel.tracing import Trace, trace
from mkernel.version import __version__

__all__ = [
    "ArgumentError",
    "CommTimeout",
    "Config",
    "Deadlock",
    "Group",
    "Links",
    "MKernelError",
    "SimulatorError",
    "Trace",
    "TransportError",
    "WaitRecord",
    "__version__",
    "all_gather_matmul",
    "empty",
    "explain",
    "init",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "spawn",
    "trace",
]
