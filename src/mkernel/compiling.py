"""Compile kernels for a GPU that is not present, with the arguments of a real launch: `mkernel compile`, and tests.

A simulated cluster prepares the call as a cluster of such GPUs would. Nothing is launched: Triton compiles the kernel
for the arguments that it would get, and ptxas reports the resources that the machine code needs.
"""

from __future__ import annotations

import hashlib
import io
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.runtime import driver
from triton.runtime.cache import get_cache_manager
from triton.tools.tensor_descriptor import TensorDescriptor

from mkernel.runtime.errors import ArgumentError, MKernelError
from mkernel.runtime.group import Group
from mkernel.runtime.spawn import require_simulator, spawn
from mkernel.runtime.world import Launch, Links

PROGRAMS = Path(triton.__file__).parent / "backends/nvidia/bin"
# as Triton passes them to ptxas
OPTIONS = [] if triton.__version__.startswith("3.6.") else ["--regAllocOptLevel=2"]
SHARED_MEMORY = 227 * 1024  # bytes per CTA on Hopper
REGISTERS = 65536  # per SM
MULTIPROCESSORS = {80: 108, 90: 132, 100: 148}  # A100, H100 and B200
# too much shared memory, or a failure in one of Triton's passes (a RuntimeError)
DOES_NOT_COMPILE = (triton.errors.TritonError, RuntimeError)
REPORT = "ptxas.log"  # name of a file in Triton's cache
OLDEST = 80  # oldest supported compute capability


def capability_of(architecture: str) -> int:
    """The compute capability of an architecture in NVIDIA's notation: 90 for sm_90a."""
    match = re.fullmatch(r"sm_(\d{2,3})[af]?", architecture)
    if match is None or int(match[1]) < OLDEST:
        raise ArgumentError(
            f"{architecture!r} is not an architecture from sm_{OLDEST} on; use sm_80 (A100), sm_90a (H100, H200) or "
            f"sm_100a (B200)"
        )
    return int(match[1])


class Compiled:
    """The PTX of a kernel, the resources that its machine code needs, and the warnings of ptxas.

    kernel: what Triton returned. registers: per thread. spilled: bytes per thread that are spilled to local memory.
    shared: bytes of shared memory per CTA.
    """

    def __init__(self, compiled: Any, capability: int):
        self.kernel = compiled
        self.ptx: str = compiled.asm["ptx"]
        self.shared: int = compiled.metadata.shared
        output = _report(self.ptx, capability)
        used = re.search(r"Used (\d+) registers", output)
        assert used is not None, output
        self.registers = int(used[1])
        self.spilled = sum(map(int, re.findall(r"(\d+) bytes spill stores", output)))
        self.warnings = [line for line in output.splitlines() if "warning" in line or "Potential Performance" in line]

    def _machine_code(self) -> str:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(self.kernel.asm["cubin"])
            file.flush()
            command = [str(PROGRAMS / "cuobjdump"), "-sass", file.name]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    def instructions(self, name: str) -> int:
        """How often an instruction occurs in the machine code."""
        return len(re.findall(rf"\s{name}\b", self._machine_code()))

    def loops(self) -> list[list[str]]:
        """The machine instructions of every loop, including those of inner loops."""
        text = self._machine_code()
        code = {int(at, 16): what.strip() for at, what in re.findall(r"/\*([0-9a-f]{4,6})\*/\s+(.*?);", text)}
        jumps = [(at, re.search(r"\bBRA\b.*?(0x[0-9a-f]+)", what)) for at, what in code.items()]
        ranges = {(int(to[1], 16), at) for at, to in jumps if to and int(to[1], 16) < at}
        return [[what for at, what in code.items() if begin <= at <= end] for begin, end in sorted(ranges)]


def _report(ptx: str, capability: int, output: str = "") -> str:
    """What ptxas says about a kernel. Triton's cache keeps it, beside the machine code.

    output: what it has said, when Triton called it; else ptxas is called, unless the cache has its output.
    """
    architecture = f"sm_{capability}" + ("a" if capability >= 90 else "")
    ptxas = get_ptxas(capability)  # each version of Triton has a ptxas that knows its PTX
    key = "\n".join(["ptxas -v", ptxas.version, *OPTIONS, architecture, ptx])
    cache = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
    kept = cache.get_file(REPORT)
    if kept is not None:
        return Path(kept).read_text()
    if "Used " not in output:
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "kernel.ptx"
            source.write_text(ptx)
            command = [ptxas.path, "-v", *OPTIONS, f"--gpu-name={architecture}", str(source), "-o", f"{source}.cubin"]
            done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise MKernelError(f"{Path(ptxas.path).name} cannot assemble it for {architecture}: {done.stderr.strip()}")
        output = done.stdout + done.stderr
    cache.put(output, REPORT, binary=False)
    return output


class PretendedGpu:
    """The device of a rank whose GPU does not exist. It compares equal to every device, so all tensors are on it."""

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
    """Inside the block, Triton and torch see a GPU of this compute capability."""
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
    """Call `prepare(group)` on every rank of a simulated cluster, (nodes, ranks per node), of such GPUs. Returns rank
    0's value, usually a launch. Tensors are in CPU memory. `options` are those of the simulator; by default, a rank has
    all SMs of its GPU."""
    with require_simulator():
        from mkernel.sim.scheduler import Options

    # nothing is launched, so the race detector is not needed; it would take half as much memory again
    simulator = {"ctas": MULTIPROCESSORS.get(capability, 132), "races": False} | options

    def on_rank(group: Group) -> tuple[Any, MKernelError | None]:
        group.device = group.target = PretendedGpu(capability)  # type: ignore[assignment]
        group.world.links = links or Links()
        try:
            return prepare(group), None
        except MKernelError as refusal:  # of the call: no schedule of the simulator, whose seed would be printed
            return None, refusal

    with pretending(capability):
        nodes, ranks = cluster
        results = spawn(on_rank, nodes=nodes, gpus_per_node=ranks, device="cpu", sim=Options(**simulator))
    for _, refusal in results:
        if refusal is not None:
            raise refusal
    return results[0][0]


def compile_launch(launch: Launch, capability: int = 90) -> Compiled:
    """Compile the kernel of a launch for the launch's arguments."""
    for name, value in launch.arguments.items():
        if _holds_descriptor(value):
            raise MKernelError(
                f"{launch.op}: its argument {name} is a structure with a tensor descriptor in it, which Triton "
                f"compiles, but cannot launch: pass the descriptor as a separate argument"
            )
    with pretending(capability):
        launch.kernel.device_caches.clear()
        try:
            with triton.knobs.nvidia.scope(), redirect_stdout(io.StringIO()) as printed:
                triton.knobs.nvidia.dump_ptxas_log = True
                compiled = launch.kernel.warmup(**launch.arguments, **launch.options, grid=(launch.grid,))
        except DOES_NOT_COMPILE as problem:
            raise MKernelError(
                f"{launch.op}: Triton cannot compile {launch.kernel.fn.__name__} for sm_{capability}: {problem}"
            ) from problem
        finally:
            launch.kernel.device_caches.clear()
    _report(compiled.asm["ptx"], capability, printed.getvalue())
    return Compiled(compiled, capability)


def _holds_descriptor(value: Any) -> bool:
    """Is there a tensor descriptor inside a structure?"""
    parts = value if isinstance(value, tuple) else ()
    return any(
        hasattr(part, "block_shape") or isinstance(part, TensorDescriptor) or _holds_descriptor(part) for part in parts
    )
