"""Distributed GPU operators for PyTorch, each of them one persistent kernel per rank.

    import mkernel as mk
    y = mk.all_gather_matmul(a, b)

See `mk.spawn` for a cluster inside this process, and the documentation for everything else.
"""

from mkernel import environment as _environment  # noqa: F401  # before CUDA starts
from mkernel.api import empty, explain, init
from mkernel.doctor import diagnose
from mkernel.operators import Operator, register
from mkernel.ops.all_gather_matmul import all_gather_matmul
from mkernel.ops.attention import ring_attention
from mkernel.ops.attention.sequences import from_zigzag, to_zigzag
from mkernel.ops.moe import moe_combine, moe_dispatch_matmul, moe_ffn
from mkernel.ops.reduce import matmul_all_reduce, matmul_reduce_scatter
from mkernel.runtime.config import Config
from mkernel.runtime.errors import (
    ArgumentError,
    CapacityError,
    CommTimeout,
    Deadlock,
    MKernelError,
    RaceError,
    RankLost,
    RoutingError,
    SimulatorError,
    TransportError,
)
from mkernel.runtime.group import Group
from mkernel.runtime.records import WaitRecord
from mkernel.runtime.spawn import spawn
from mkernel.runtime.world import Links
from mkernel.tracing import Trace, trace
from mkernel.version import __version__

__all__ = [
    "ArgumentError",
    "CapacityError",
    "CommTimeout",
    "Config",
    "Deadlock",
    "Group",
    "Links",
    "MKernelError",
    "Operator",
    "RaceError",
    "RankLost",
    "RoutingError",
    "SimulatorError",
    "Trace",
    "TransportError",
    "WaitRecord",
    "__version__",
    "all_gather_matmul",
    "diagnose",
    "empty",
    "explain",
    "from_zigzag",
    "init",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "moe_combine",
    "moe_dispatch_matmul",
    "moe_ffn",
    "register",
    "ring_attention",
    "spawn",
    "to_zigzag",
    "trace",
]
