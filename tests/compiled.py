"""Kernels compiled for a GPU that is not there, with the arguments of a real launch."""

import re
import subprocess
import tempfile
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

PROGRAMS = Path(triton.__file__).parent / "backends/nvidia/bin"


class Compiled:
    """PTX of a kernel, what its machine code needs, and what the assembler warned of."""

    def __init__(self, compiled, capability):
        self.ptx: str = compiled.asm["ptx"]
        self.shared: int = compiled.metadata.shared
        with tempfile.TemporaryDirectory() as folder:
            source, cubin = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
            source.write_text(self.ptx)
            architecture = f"sm_{capability}" + ("a" if capability >= 90 else "")
            program = PROGRAMS / ("ptxas-blackwell" if capability >= 100 else "ptxas")
            command = [program, "-v", f"--gpu-name={architecture}", source, "-o", cubin]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
        said = done.stdout + done.stderr
        self.registers = int(re.search(r"Used (\d+) registers", said)[1])
        self.spilled = sum(map(int, re.findall(r"(\d+) bytes spill stores", said)))
        self.warnings = [line for line in said.splitlines() if "warning" in line or "Potential Performance" in line]


@contextmanager
def pretending(capability):
    """Inside, Triton and torch believe in a GPU of that kind."""
    target = GPUTarget("cuda", capability, 32)
    before = driver._active, torch.cuda.get_device_capability
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: target, get_current_device=lambda: 0, get_current_stream=lambda device: 0
        )
    )
    torch.cuda.get_device_capability = lambda device=None: divmod(capability, 10)
    try:
        yield
    finally:
        driver._active, torch.cuda.get_device_capability = before


def compile_launch(launch, capability=90):
    """Compile what a launch would run, with the arguments that it has."""
    with pretending(capability):
        launch.kernel.device_caches.clear()
        compiled = launch.kernel.warmup(**launch.arguments, **launch.options, grid=(launch.grid,))
        launch.kernel.device_caches.clear()
    return Compiled(compiled, capability)
