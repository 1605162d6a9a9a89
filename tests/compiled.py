"""Kernels compiled for a GPU that is not there: their PTX, and what their machine code needs."""

import inspect
import re
import subprocess
import tempfile
from pathlib import Path

import torch
import triton

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
SHARED_MEMORY = 227 * 1024  # of a CTA on Hopper
REGISTERS = 65536  # of an SM


class Compiled:
    """What triton.compile gave."""

    def __init__(self, compiled):
        self.ptx: str = compiled.asm["ptx"]
        self.shared: int = compiled.metadata.shared
        with tempfile.TemporaryDirectory() as folder:
            cubin = Path(folder) / "kernel.cubin"
            cubin.write_bytes(compiled.asm["cubin"])
            done = subprocess.run([CUOBJDUMP, "-res-usage", cubin], capture_output=True, text=True, check=True)
        usage = next(line for line in done.stdout.splitlines() if "REG:" in line)
        self.usage = {name: int(value) for name, value in re.findall(r"(\w+):(\d+)", usage)}

    @property
    def spills(self) -> bool:
        return self.usage["LOCAL"] > 0 or self.usage["STACK"] > 0


def constants_of(kernel) -> list[str]:
    return [name for name, kind in inspect.get_annotations(kernel.fn).items() if "constexpr" in str(kind)]
