"""Operators for programs that call PyTorch's: they need no change to run the fused kernels.

- `symm_mem`: what Inductor's async tensor parallelism, TorchTitan and vLLM call, `torch.ops.symm_mem.fused_*`.

`report()` says how many calls were fused, how many went to PyTorch's own implementation, and why.
"""

from mkernel.integrations import symm_mem
from mkernel.integrations.calls import Calls, Report, report, reset

__all__ = ["Calls", "Report", "report", "reset", "symm_mem"]
