"""Distributed GPU operators for PyTorch, each of them one persistent kernel per rank.

    import mkernel as mk
    y = mk.all_gather_matmul(a, b)

See `mk.spawn` for a cluster inside this process, and the documentation for everything else.

Importing the package imports neither torch nor Triton: each name imports its module when it is first used.
"""

import importlib as _importlib
from typing import TYPE_CHECKING
from typing import Any as _Any

from mkernel import environment as _environment  # noqa: F401  # before CUDA starts
from mkernel.version import __version__

if TYPE_CHECKING:
    from mkernel.api import empty, explain, init
    from mkernel.doctor import diagnose
    from mkernel.operators import Operator, register
    from mkernel.ops.all_gather_matmul import all_gather_matmul
    from mkernel.ops.all_gather_matmul.scaled import all_gather_scaled_matmul
    from mkernel.ops.all_gather_matmul.weight_grad import all_gather_matmul_weight_grad
    from mkernel.ops.attention import ring_attention
    from mkernel.ops.attention.backward import ring_attention_backward
    from mkernel.ops.attention.sequences import from_zigzag, to_zigzag
    from mkernel.ops.moe import (
        moe_combine,
        moe_dispatch,
        moe_dispatch_matmul,
        moe_dispatch_scaled_matmul,
        moe_ffn,
        scaled_moe_ffn,
    )
    from mkernel.ops.reduce import (
        matmul_all_reduce,
        matmul_reduce_scatter,
        scaled_matmul_all_reduce,
        scaled_matmul_reduce_scatter,
    )
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
    from mkernel.runtime.quantization import dequantize, quantize
    from mkernel.runtime.records import WaitRecord
    from mkernel.runtime.spawn import spawn
    from mkernel.runtime.world import Links
    from mkernel.tracing import Trace, trace

# which module of the package has which name: as above, which type checkers and editors read
_MODULES = {
    "empty": "api",
    "explain": "api",
    "init": "api",
    "diagnose": "doctor",
    "Operator": "operators",
    "register": "operators",
    "all_gather_matmul": "ops.all_gather_matmul",
    "all_gather_matmul_weight_grad": "ops.all_gather_matmul.weight_grad",
    "all_gather_scaled_matmul": "ops.all_gather_matmul.scaled",
    "ring_attention": "ops.attention",
    "ring_attention_backward": "ops.attention.backward",
    "from_zigzag": "ops.attention.sequences",
    "to_zigzag": "ops.attention.sequences",
    "moe_combine": "ops.moe",
    "moe_dispatch": "ops.moe",
    "moe_dispatch_matmul": "ops.moe",
    "moe_dispatch_scaled_matmul": "ops.moe",
    "moe_ffn": "ops.moe",
    "scaled_moe_ffn": "ops.moe",
    "matmul_all_reduce": "ops.reduce",
    "matmul_reduce_scatter": "ops.reduce",
    "scaled_matmul_all_reduce": "ops.reduce",
    "scaled_matmul_reduce_scatter": "ops.reduce",
    "Config": "runtime.config",
    "ArgumentError": "runtime.errors",
    "CapacityError": "runtime.errors",
    "CommTimeout": "runtime.errors",
    "Deadlock": "runtime.errors",
    "MKernelError": "runtime.errors",
    "RaceError": "runtime.errors",
    "RankLost": "runtime.errors",
    "RoutingError": "runtime.errors",
    "SimulatorError": "runtime.errors",
    "TransportError": "runtime.errors",
    "Group": "runtime.group",
    "dequantize": "runtime.quantization",
    "quantize": "runtime.quantization",
    "WaitRecord": "runtime.records",
    "spawn": "runtime.spawn",
    "Links": "runtime.world",
    "Trace": "tracing",
    "trace": "tracing",
}
_SUBMODULES = ("api", "doctor", "integrations", "lang", "net", "nn", "ops", "runtime", "tracing")

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
    "all_gather_matmul_weight_grad",
    "all_gather_scaled_matmul",
    "dequantize",
    "diagnose",
    "empty",
    "explain",
    "from_zigzag",
    "init",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "moe_combine",
    "moe_dispatch",
    "moe_dispatch_matmul",
    "moe_dispatch_scaled_matmul",
    "moe_ffn",
    "quantize",
    "register",
    "ring_attention",
    "ring_attention_backward",
    "scaled_matmul_all_reduce",
    "scaled_matmul_reduce_scatter",
    "scaled_moe_ffn",
    "spawn",
    "to_zigzag",
    "trace",
]


def __getattr__(name: str) -> _Any:
    if name in _MODULES:
        value = getattr(_importlib.import_module(f"mkernel.{_MODULES[name]}"), name)
        globals()[name] = value
        return value
    if name in _SUBMODULES:
        _importlib.import_module(
            "mkernel.api"
        )  # so that their modules are attributes, too, such as mkernel.runtime.group
        return _importlib.import_module(f"mkernel.{name}")
    raise AttributeError(f"module 'mkernel' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
