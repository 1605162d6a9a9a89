"""Kernels compiled for a GPU that is not there, with the arguments of a real launch: `mkernel compile`, and tests.

A simulated cluster prepares the call, as one of such GPUs would. Nothing is launched: Triton compiles the kernel for
the arguments that it would get, and its own assembler says what the machine code needs.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from mkernel.runtime.errors import ArgumentError, MKernelError
from mkernel.runtime.group import Group
from mkernel.runtime.spawn import require_simulator, spawn
from mkernel.runtime.world import Launch, Links

PROGRAMS = Path(triton.__file__).parent / "backends/nvidia/bin"
# what Triton passes to its assembler, too
OPTIONS = [] if triton.__version__.startswith("3.6.") else ["--regAllocOptLevel=2"]
SHARED_MEMORY = 227 * 1024  # bytes of a CTA on Hopper
REGISTERS = 65536  # of an SM
MULTIPROCESSORS = {80: 108, 90: 132, 100: 148}  # of an A100, H100 and B200
# too much shared memory, or too much for Triton's passes (a RuntimeError)
DOES_NOT_COMPILE = (triton.errors.TritonError, RuntimeError)
OLDEST = 80  # compute capability


def capability_of(architecture: str) -> int:
    """The compute capability of an architecture as NVIDIA writes it: 90 of sm_90a."""
    match = re.fullmatch(r"sm_(\d{2,3})[af]?", architecture)
    if match is None or int(match[1]) < OLDEST:
        raise ArgumentError(
            f"{architecture!r} is no architecture from sm_{OLDEST} on; write sm_80 (A100), sm_90a (H100, H200) or "
            f"sm_100a (B200)"
        )
    return int(match[1])


class Compiled:
    """PTX of a kernel, what its machine code needs, and what the assembler warned of.

    registers: of a thread. spilled: bytes of a thread that do not fit into registers and are stored. shared: bytes of
    shared memory of a CTA.
    """

    def __init__(self, compiled: Any, capability: int):
        self.ptx: str = compiled.asm["ptx"]
        self.shared: int = compiled.metadata.shared
        self._capability = capability
        with tempfile.TemporaryDirectory() as folder:
            said, _ = self._assemble(Path(folder))
        used = re.search(r"Used (\d+) registers", said)
        assert used is not None, said
        self.registers = int(used[1])
        self.spilled = sum(map(int, re.findall(r"(\d+) bytes spill stores", said)))
        self.warnings = [line for line in said.splitlines() if "warning" in line or "Potential Performance" in line]

    def _assemble(self, folder: Path) -> tuple[str, Path]:
        """(what the assembler says, the machine code's file)"""
        source, cubin = folder / "kernel.ptx", folder / "kernel.cubin"
        source.write_text(self.ptx)
        architecture = f"sm_{self._capability}" + ("a" if self._capability >= 90 else "")
        program = get_ptxas(self._capability).path  # each version of Triton has an assembler that knows its PTX
        command = [program, "-v", *OPTIONS, f"--gpu-name={architecture}", str(source), "-o", str(cubin)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise MKernelError(f"{Path(program).name} can not assemble it for {architecture}: {done.stderr.strip()}")
        return done.stdout + done.stderr, cubin

    def _machine_code(self) -> str:
        with tempfile.TemporaryDirectory() as folder:
            _, cubin = self._assemble(Path(folder))
            command = [str(PROGRAMS / "cuobjdump"), "-sass", str(cubin)]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    def instructions(self, name: str) -> int:
        """How often an instruction stands in the machine code."""
        return len(re.findall(rf"\s{name}\b", self._machine_code()))

    def loops(self) -> list[list[str]]:
        """The machine instructions of every loop, those of loops inside of it included."""
        text = self._machine_code()
        code = {int(at, 16): what.strip() for at, what in re.findall(r"/\*([0-9a-f]{4,6})\*/\s+(.*?);", text)}
        jumps = [(at, re.search(r"\bBRA\b.*?(0x[0-9a-f]+)", what)) for at, what in code.items()]
        ranges = {(int(to[1], 16), at) for at, to in jumps if to and int(to[1], 16) < at}
        return [[what for at, what in code.items() if begin <= at <= end] for begin, end in sorted(ranges)]


class PretendedGpu:
    """The device of a rank whose GPU is not there: all tensors count as its own."""

    type = "cuda"

    def __init__(self, capability: int):
        self._capability = capability

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]

    def __str__(self) -> str:
        return f"a GPU of sm_{self._capability}"


@contextmanager
def pretending(capability: int) -> Iterator[None]:
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


def launched(
    prepare: Callable[[Group], Any], cluster: tuple[int, int], capability: int = 90, *,
    links: Links | None = None, **options: Any,
) -> Any:  # fmt: skip
    """What `prepare(group)` gives on rank 0 of a cluster (nodes, ranks of each) of such GPUs: a launch, or more. Memory
    is the CPU's. `options`: of the simulator; by default a rank has all SMs of its GPU."""
    with require_simulator():
        from mkernel.sim.scheduler import Options

    # nothing is launched, so nobody needs to know what happens to memory, which would take half as much again
    told = {"ctas": MULTIPROCESSORS.get(capability, 132), "races": False} | options

    def on_rank(group: Group) -> Any:
        group.device = PretendedGpu(capability)  # type: ignore[assignment]
        group.world.links = links or Links()
        return prepare(group)

    with pretending(capability):
        nodes, ranks = cluster
        return spawn(on_rank, nodes=nodes, gpus_per_node=ranks, device="cpu", sim=Options(**told))[0]


def compile_launch(launch: Launch, capability: int = 90) -> Compiled:
    """Compile what a launch would run, with the arguments that it has."""
    for name, value in launch.arguments.items():
        if _holds_descriptor(value):
            raise MKernelError(
                f"{launch.op}: its argument {name} is a structure with a tensor descriptor in it, which Triton "
                f"compiles, but can not launch: pass the descriptor as an argument of its own"
            )
    with pretending(capability):
        launch.kernel.device_caches.clear()
        try:
            compiled = launch.kernel.warmup(**launch.arguments, **launch.options, grid=(launch.grid,))
        except DOES_NOT_COMPILE as problem:
            raise MKernelError(
                f"{launch.op}: Triton can not compile {launch.kernel.fn.__name__} for sm_{capability}: {problem}"
            ) from problem
        finally:
            launch.kernel.device_caches.clear()
    return Compiled(compiled, capability)


def _holds_descriptor(value: Any) -> bool:
    """Is a tensor descriptor inside of a structure?"""
    parts = value if isinstance(value, tuple) else ()
    return any(
        hasattr(part, "block_shape") or isinstance(part, TensorDescriptor) or _holds_descriptor(part) for part in parts
    )
