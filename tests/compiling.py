"""Kernels as machine code, with no GPU: what the tests of compiled operators have in common."""

import inspect
import re
import subprocess
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
SHARED_MEMORY = 227 * 1024  # of a CTA on Hopper
REGISTERS = 65536  # of an SM
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


class Compiled:
    """A kernel's PTX, and what its machine code needs."""

    def __init__(self, compiled, folder: Path):
        self.ptx: str = compiled.asm["ptx"]
        self.shared: int = compiled.metadata.shared
        self._folder = folder
        self._cubin = cubin = folder / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        done = subprocess.run([TOOLS / "cuobjdump", "-res-usage", cubin], capture_output=True, text=True, check=True)
        usage = next(line for line in done.stdout.splitlines() if "REG:" in line)
        self.usage = {name: int(value) for name, value in re.findall(r"(\w+):(\d+)", usage)}

    def instructions(self, name: str) -> int:
        """How often an instruction stands in the machine code."""
        command = [TOOLS / "cuobjdump", "-sass", self._cubin]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return len(re.findall(rf"\s{name}\b", done.stdout))

    @property
    def remarks(self) -> list[str]:
        """What the assembler has to say about multiplications on Hopper's tensor cores: that it had to let
        them wait, because their sum is used, or set, while they are at work on it."""
        source = self._folder / "kernel.ptx"
        source.write_text(self.ptx)
        command = [get_ptxas(90).path, "--gpu-name=sm_90a", source, "-o", self._folder / "again.cubin"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return [line for line in (done.stdout + done.stderr).splitlines() if "(C75" in line]

    @property
    def spills(self) -> bool:
        return self.usage["LOCAL"] > 0 or self.usage["STACK"] > 0


def constants_of(kernel) -> list[str]:
    return [name for name, kind in inspect.get_annotations(kernel.fn).items() if "constexpr" in str(kind)]


def source_with(kernel, types, constants, aligned, kind=ASTSource):
    """A kernel with `types` and `constants` of its arguments by name; those in `aligned` are divisible by 16."""
    place = kernel.arg_names.index
    return kind(
        kernel,
        signature={name: "constexpr" if name in constants else types[name] for name in kernel.arg_names},
        constexprs={(place(name),): value for name, value in constants.items()},
        attrs={(place(name),): [["tt.divisibility", 16]] for name in aligned},
    )


def built(source, folder: Path, capability=90, **options) -> Compiled:
    return Compiled(triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options), folder)


def compiled(kernel, types, constants, *, unaligned=(), capability=90, folder: Path, **options) -> Compiled:
    """A kernel compiled as a launch would: `types` of its arguments (integers that are not named are
    i32), `constants` by name. Triton makes constants of arguments that are None or 1, and knows which
    are divisible by 16: all but those in `unaligned`."""
    assert set(constants_of(kernel)) <= set(constants)
    types = {name: types.get(name, "i32") for name in kernel.arg_names if name not in constants}
    aligned = [name for name, kind in types.items() if name not in unaligned and not kind.startswith("tensordesc")]
    return built(source_with(kernel, types, constants, aligned), folder, capability, **options)
