"""mkernel behind the interfaces of other libraries: programs run the fused kernels with one changed line, or none.

- `symm_mem`: what Inductor's async tensor parallelism, TorchTitan and vLLM call, `torch.ops.symm_mem.fused_*`.
- `context_parallel`: attention in PyTorch's `context_parallel`.
- `huggingface`: attention of Hugging Face transformers, for context parallelism.
- `ring_flash_attn`: the functions of the package ring-flash-attn, under the same names.
- `torchtitan`, `torchtitan_moe`: TorchTitan's fused tensor-parallel layers, and its expert-parallel token dispatcher.
  Import them by name, because they import TorchTitan.
- `token_switch`: PyTorch's interface of expert-parallel dispatch and combine, from 2.15 on. Import it by name.

`report()` says how many calls were fused, how many went to PyTorch's own implementation, and why.
"""

from mkernel.integrations import context_parallel, huggingface, ring_flash_attn, symm_mem
from mkernel.integrations.calls import Calls, Report, report, reset

__all__ = ["Calls", "Report", "context_parallel", "huggingface", "report", "reset", "ring_flash_attn", "symm_mem"]
