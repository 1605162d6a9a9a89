"""A package for each operator or family of operators.

The docstring of a package is its design record. Its `entry` registers it: what the tools know of an operator is named
there, and is in modules that only the tools import (demo.py, workload.py, tuning.py, bench.py, baselines.py).
"""

# in the order in which the tools list them
from mkernel.ops.all_gather_matmul import entry as _all_gather_matmul  # noqa: F401, I001
from mkernel.ops.reduce import entry as _reduce  # noqa: F401
from mkernel.ops.attention import entry as _attention  # noqa: F401
from mkernel.ops.moe import entry as _moe  # noqa: F401
