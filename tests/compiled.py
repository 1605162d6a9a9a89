"""Kernels compiled for a GPU that is not there, with the arguments of a real launch."""

import re
import subprocess
import tempfile
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import torch
import triton
from helpers import run
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.runtime import driver

from mkernel.ops import all_gather_matmul
from mkernel.runtime.world import Links

SHARED_MEMORY = 227 * 1024  # of a CTA on Hopper
REGISTERS = 65536  # of an SM
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
# what Triton gives its assembler, too
OPTIONS = [] if triton.__version__.startswith("3.6.") else ["--regAllocOptLevel=2"]
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
        program = get_ptxas(self._capability).path  # each version of Triton has an assembler that knows its PTX
        command = [program, "-v", *OPTIONS, f"--gpu-name={architecture}", source, "-o", cubin]
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
    for name, value in launch.arguments.items():
        assert not _holds_descriptor(value), f"a descriptor inside of the structure {name}"
    with pretending(capability):
        launch.kernel.device_caches.clear()
        compiled = launch.kernel.warmup(**launch.arguments, **launch.options, grid=(launch.grid,))
        launch.kernel.device_caches.clear()
    return Compiled(compiled, capability)


def launched(prepare, cluster, capability=90, paced=False):
    """What rank 0 of a cluster of such GPUs would launch: prepare(group)."""

    def work(group):
        with pretending(capability):
            group.device = torch.device("cuda")
            group.world.links = Links(nvlink=100.0 if paced else None)
            group.world.options = group.world.options.__class__(ctas=132)
            return prepare(group)

    # nothing is launched, so nobody needs to know what happens to memory, which would take half as much again
    return run(work, cluster=cluster, races=False)[0]


def gathers(
    cluster, capability=90, config=None, dtype=torch.bfloat16, m=256, n=2048, k=2048,
    paced=False, gathered=False, strided=False, transposed=True, heap=False, described=True, module=all_gather_matmul,
):  # fmt: skip
    """The launch of a call of all_gather_matmul. strided: TMA can not read a; described: it can read b and out."""

    def prepare(group):
        a = group.heap.tensor((m, k), dtype) if heap else torch.empty(m, k + 3 * strided, dtype=dtype)[:, :k]
        b = torch.empty(n, k + 3 * (not described), dtype=dtype)[:, :k].t()
        if not transposed:
            b = torch.empty(k, n, dtype=dtype)
        out = torch.empty(m * group.size, n + 3 * (not described), dtype=dtype)[:, :n]
        everyone = torch.empty(m * group.size, k, dtype=dtype) if gathered else None
        return module.prepare(group, a, b, out, everyone, config)

    return launched(prepare, cluster, capability, paced)


def _holds_descriptor(value):
    """Is a tensor descriptor inside of a structure? Triton 3.6 compiles that, but can not launch it."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    parts = value if isinstance(value, tuple) else ()
    return any(
        hasattr(part, "block_shape") or isinstance(part, TensorDescriptor) or _holds_descriptor(part) for part in parts
    )
