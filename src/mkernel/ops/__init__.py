"""A package for each operator or family of operators.

The docstring of a package is its design record. Its `entry` registers it: what the tools know of an operator is named
there, and is in modules that only the tools import (demo.py, workload.py, tuning.py, bench.py, baselines.py, model.py,
peer.py).
"""

import runpy as _runpy
from pathlib import Path as _Path

# In the order in which the tools list them. Entries are executed as files: to import them would import their packages,
# and with these torch, which the command line does without where it can.
for _package in ("all_gather_matmul", "reduce", "attention", "moe"):
    _runpy.run_path(str(_Path(__file__).parent / _package / "entry.py"))
