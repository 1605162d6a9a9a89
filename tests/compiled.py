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
        self._capability = capability
        with tempfile.TemporaryDirectory() as folder:
            said, _ = self._assemble(Path(folder))
        self.registers = int(re.search(r"Used (\d+) registers", said)[1])
        self.spilled = sum(map(int, re.findall(r"(\d+) bytes spill stores", said)))
        self.warnings = [line for line in said.splitlines() if "warning" in line or "Potential Performance" in line]

    def _assemble(self, folder: Path) -> tuple[str, Path]:
        """(what the assembler says, the machine code's file)"""
        source, cubin = folder / "kernel.ptx", folder / "kernel.cubin"
        source.write_text(self.ptx)
        architecture = f"sm_{self._capability}" + ("a" if self._capability >= 90 else "")
        program = PROGRAMS / ("ptxas-blackwell" if self._capability >= 100 else "ptxas")
        command = [program, "-v", f"--gpu-name={architecture}", source, "-o", cubin]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return done.stdout + done.stderr, cubin

    def loops(self) -> list[list[str]]:
        """The machine instructions of every loop, those of loops inside of it included."""
        with tempfile.TemporaryDirectory() as folder:
            _, cubin = self._assemble(Path(folder))
            command = [PROGRAMS / "cuobjdump", "-sass", cubin]
            text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        code = {int(at, 16): what.strip() for at, what in re.findall(r"/\*([0-9a-f]{4,6})\*/\s+(.*?);", text)}
        jumps = [(at, re.search(r"\bBRA\b.*?(0x[0-9a-f]+)", what)) for at, what in code.items()]
        ranges = {(int(to[1], 16), at) for at, to in jumps if to and int(to[1], 16) < at}
        return [[what for at, what in code.items() if begin <= at <= end] for begin, end in sorted(ranges)]


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
