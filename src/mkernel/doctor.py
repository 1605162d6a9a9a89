"""`mkernel doctor` and `mk.diagnose()`: what this machine has, what will be used, and how to fix what is missing.

Every probe examines one thing and never raises; what it cannot determine becomes a finding. The status of a finding is

- "ok": it is present;
- "note": it is absent, and nothing is wrong; the advice says what it would add;
- "problem": something that is present cannot be used as it is; the advice says how to fix it.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import os
import platform
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mkernel.net import devices
from mkernel.runtime.errors import MKernelError
from mkernel.version import __version__

OLDEST_PYTHON = (3, 10)
PACKAGES = (  # name, oldest version, newest tested version if newer ones may not work, purpose ("": always required)
    ("torch", "2.11", "2.15", ""),
    ("triton", "3.6", "3.9", ""),
    ("numpy", "2.0", "", ""),
    ("greenlet", "3.0", "", "the simulator: pip install 'mkernel-gpu[sim]'"),
    ("plotly", "6.0", "", "reports in HTML: pip install 'mkernel-gpu[cli]'"),
)
NVIDIA = "0x10de"  # PCI vendor id
HOPPER = (9, 0)
MULTICAST, DMA_BUF = 132, 124  # CUdevice_attribute
LOCKED_BYTES = 64 << 30  # a lower limit may be too small to register heaps with a network card
SECONDS = 20  # time limit for other programs
PROBE = """
#include <sys/socket.h>
#include <atomic>
#include <optional>
#include <string>
extern "C" int probe() { std::optional<std::string> word("probe"); std::atomic<int> count(word->size()); return count; }
"""  # C++17 and Linux headers, as the native library needs


@dataclass(frozen=True)
class Finding:
    """The result for one thing that a probe examined."""

    section: str
    name: str
    found: str
    status: str = "ok"  # "ok", "note" or "problem"
    advice: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """What `mk.diagnose()` found; print it to read it."""

    findings: tuple[Finding, ...]

    @property
    def problems(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.status == "problem")

    def to_dict(self) -> dict[str, Any]:
        return {"mkernel": __version__, "findings": [asdict(finding) for finding in self.findings]}

    def __str__(self) -> str:
        lines: list[str] = []
        section = ""
        for finding in self.findings:
            if finding.section != section:
                section = finding.section
                lines.append(f"{section}")
            mark = {"ok": " ", "note": "-", "problem": "!"}[finding.status]
            lines.append(f" {mark} {finding.name}: {finding.found}")
            if finding.advice:
                lines.append(f"     {finding.advice}")
        return "\n".join(lines)


@dataclass
class Machine:
    """What the probes examine; tests pass a fake."""

    sysfs: Path = Path("/sys")
    proc: Path = Path("/proc")
    environment: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    python: tuple[int, ...] = tuple(sys.version_info[:3])
    system: str = platform.system()

    def version(self, package: str) -> str | None:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return None

    def module(self, name: str) -> Any:
        return importlib.import_module(name)

    def library(self, name: str) -> Any:
        """Load a shared library; raises OSError if there is none with that name."""
        return ctypes.CDLL(name)

    def output(self, *command: str) -> str | None:
        """The output of a program; None if the program does not exist or fails."""
        found = shutil.which(command[0])
        if found is None:
            return None
        try:
            code, output = _run([found, *command[1:]])
        except (OSError, subprocess.TimeoutExpired):
            return None
        return output if code == 0 else None

    def try_compiler(self, command: Sequence[str]) -> str:
        """Compile a few lines with a C++ compiler and load the result. Returns what went wrong, or ""."""
        from mkernel.net import build

        with tempfile.TemporaryDirectory(prefix="mkernel-doctor-") as folder:
            source, library = Path(folder) / "probe.cc", Path(folder) / "probe.so"
            source.write_text(PROBE)
            full = [*command, *build.FLAGS, "-fPIC", "-shared", str(source), "-ldl", "-o", str(library)]
            try:
                code, output = _run(full, errors=True)
            except OSError as problem:
                return f"it cannot be started: {problem}"
            except subprocess.TimeoutExpired:
                return f"it was still compiling ten lines after {SECONDS} s"
            if code != 0:
                said = next((line.strip() for line in output.splitlines() if "error" in line), output.strip()[:200])
                return f"it fails with exit code {code}{f': {said}' if said else ' and says nothing'}"
            try:
                answer = ctypes.CDLL(str(library)).probe()
            except (OSError, AttributeError) as problem:
                return f"its output cannot be loaded: {problem}"
            return "" if answer == 5 else f"its output is wrong: a function returned {answer} instead of 5"

    def locked_bytes(self) -> int:
        """How many bytes a process may lock; -1 if there is no limit."""
        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        return -1 if limit == resource.RLIM_INFINITY else limit

    def text(self, path: Path) -> str:
        """The contents of a file; "" if it cannot be read."""
        try:
            return path.read_text(errors="replace").strip()
        except OSError:
            return ""


def _run(command: Sequence[str], errors: bool = False) -> tuple[int, str]:
    """The exit code of a program, and its stdout, or its stderr if `errors`. After SECONDS, kills it with all its
    children and raises TimeoutExpired."""
    with tempfile.TemporaryFile() as file:  # a pipe would stay open as long as any grandchild holds it
        printed = subprocess.DEVNULL if errors else file
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=printed, stderr=file if errors else subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
        file.seek(0)
        return code, file.read().decode(errors="replace")


def diagnose(machine: Machine | None = None) -> Diagnosis:
    """Examine this machine: GPUs and the links between them, the network, programs and versions. Not collective;
    changes nothing."""
    machine = machine or Machine()
    findings: list[Finding] = []

    def examine(section: str, probe: Callable[..., list[Found]], *given: Any) -> None:
        try:
            findings.extend(Finding(section, *found) for found in probe(*given))
        except Exception as problem:
            what = f"could not be examined ({type(problem).__name__}: {problem})"
            findings.append(Finding(section, probe.__name__.strip("_").replace("_", " "), what, "note"))

    for section, probe in PROBES:
        examine(section, probe, machine)
    for section, conclude in CONCLUSIONS:
        examine(section, conclude, machine, tuple(findings))
    return Diagnosis(tuple(findings))


Found = tuple[str, ...]  # name, what was found, status, advice


# -- programs


def _python(machine: Machine) -> list[Found]:
    text = ".".join(map(str, machine.python))
    found: list[Found] = [("mkernel", __version__)]
    if machine.python < OLDEST_PYTHON:
        needed = ".".join(map(str, OLDEST_PYTHON))
        found.append(("Python", text, "problem", f"mkernel needs Python {needed} or newer"))
    else:
        found.append(("Python", text))
    if machine.system != "Linux":
        found.append(("system", machine.system, "problem", "mkernel runs on Linux only"))
    return found


def _packages(machine: Machine) -> list[Found]:
    found: list[Found] = []
    for name, oldest, newest, purpose in PACKAGES:
        version = machine.version(name)
        if version is None:
            advice = f"for {purpose}" if purpose else f"pip install '{name}>={oldest}'"
            found.append((name, "not installed", "note" if purpose else "problem", advice))
        elif _numbers(version) < _numbers(oldest):
            found.append((name, version, "problem", f"{oldest} or newer is needed: pip install -U '{name}>={oldest}'"))
        elif newest and _numbers(version)[:2] > _numbers(newest)[:2]:
            advice = f"newer than what mkernel is tested with: if something fails, pip install '{name}=={newest}.*'"
            found.append((name, f"{version} (tested: {oldest} to {newest})", "note", advice))
        else:
            found.append((name, f"{version} (tested: {oldest} to {newest})" if newest else version))
    return found


def _numbers(version: str) -> list[int]:
    match = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(number) for number in match.group().split(".")] if match else []
    return (numbers + [0, 0])[:3]


def _compiler(machine: Machine) -> list[Found]:
    from mkernel.net import build
    from mkernel.runtime.errors import TransportError

    if (packaged := build.packaged()) is not None:
        return [("native library", f"{packaged}, shipped with the package")]
    try:
        command = build.compiler()
    except TransportError as problem:
        return [("C++ compiler", "none", "problem", f"several nodes need one: {problem}")]
    version = (machine.output(command[0], "--version") or "").partition("\n")[0]
    name = f"{shlex.join(command)} ({version or 'version unknown'})"
    found: list[Found] = [("C++ compiler", name)]
    if wrong := machine.try_compiler(command):
        advice = (
            f"{wrong}. Several nodes need a compiler that knows C++17: install g++ or clang++, and "
            f"{'unset CXX, or set it to its path' if machine.environment.get('CXX') else 'set CXX to its path'}"
        )
        found = [("C++ compiler", f"{name} does not work", "problem", advice)]
    try:
        directory = build.cache_directory()
        if not os.access(directory, os.W_OK):
            raise TransportError(f"{directory} is not writable; set XDG_CACHE_HOME to a directory that is")
    except TransportError as problem:
        found.append(("cache", "not usable", "problem", str(problem)))
    else:
        found.append(("cache", str(directory)))
    return found


# -- GPUs


def _gpus(machine: Machine) -> list[Found]:
    from mkernel.runtime.gpus import OLDEST, SUPPORTED

    torch = machine.module("torch")
    on_the_bus = sum(
        machine.text(device / "vendor") == NVIDIA and machine.text(device / "class").startswith("0x03")
        for device in (machine.sysfs / "bus/pci/devices").glob("*")
    )
    if not torch.cuda.is_available():
        if not on_the_bus:
            return [("GPU", "none", "note", "without a GPU, everything runs in the simulator: correct, but slow")]
        if torch.version.cuda is None:
            advice = "torch was built without CUDA: install a build of torch with CUDA"
        elif machine.environment.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
            advice = "CUDA_VISIBLE_DEVICES hides it: unset it"
        elif not (machine.proc / "driver/nvidia/version").exists():
            advice = "NVIDIA's driver is not loaded: install it, or `modprobe nvidia`; in a container, pass the GPUs in"
        else:
            advice = f"torch is built for CUDA {torch.version.cuda}: is the driver new enough for it? See nvidia-smi"
        return [("GPU", f"{on_the_bus} on the PCI bus, torch sees none", "problem", advice)]
    found: list[Found] = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = (properties.major, properties.minor)
        text = (
            f"{properties.name}, compute capability {capability[0]}.{capability[1]}, "
            f"{properties.multi_processor_count} SMs, {properties.total_memory / 2**30:.0f} GiB"
        )
        if getattr(torch.version, "hip", None) or capability < OLDEST:
            found.append((f"GPU {index}", text, "problem", f"this GPU cannot be used: {SUPPORTED}"))
        elif capability[0] == HOPPER[0]:
            found.append((f"GPU {index}", text))
        else:
            advice = "kernels for Hopper (9.0) are not used here; mkernel has not been tried on this kind of GPU"
            if capability < HOPPER:
                advice += ", and some operators need Hopper or newer: their calls say so"
            found.append((f"GPU {index}", text, "note", advice))
    return found


def _driver_attribute(machine: Machine, attribute: int, index: int) -> bool | None:
    """An attribute of a GPU, according to the driver; None if the driver cannot be queried."""
    try:
        driver = machine.library("libcuda.so.1")
        device, value = ctypes.c_int(), ctypes.c_int()
        ok = (
            driver.cuInit(0) == 0
            and driver.cuDeviceGet(ctypes.byref(device), index) == 0
            and driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device) == 0
        )
    except (OSError, AttributeError):
        return None
    return bool(value.value) if ok else None


def _between_gpus(machine: Machine) -> list[Found]:
    torch = machine.module("torch")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count < 2:
        return []
    apart = [
        f"{one}-{other}"
        for one in range(count)
        for other in range(count)
        if one != other and not torch.cuda.can_device_access_peer(one, other)
    ]
    found: list[Found] = []
    if apart:
        advice = "these GPUs cannot access each other's memory: use others, or check whether PCIe ACS is on"
        found.append(("peer access", f"missing between {', '.join(apart[:8])}", "problem", advice))
    else:
        found.append(("peer access", f"between all {count} GPUs"))
    links = _nvlinks(machine.output("nvidia-smi", "topo", "-m") or "", count)
    if links is None:
        found.append(("NVLink", "unknown: nvidia-smi topo -m gives no answer", "note", ""))
    elif links:
        found.append(("NVLink", f"{min(links.values())} to {max(links.values())} links between each two GPUs"))
    else:
        advice = "GPUs communicate over PCIe, which is ten times slower: results are correct, but operators are slow"
        found.append(("NVLink", "none", "note", advice))
    return found


def _nvlinks(table: str, count: int) -> dict[tuple[int, int], int] | None:
    """The number of links between each two GPUs, {} if a pair has none; None if the table cannot be parsed."""
    links = {}
    rows = [re.sub(r"\x1b\[[0-9;]*m", "", line).split() for line in table.splitlines()]
    for row in rows:
        match = re.fullmatch(r"GPU(\d+)", row[0]) if row else None
        if match is None or len(row) < count + 1 or row[1].startswith("GPU"):
            continue
        for other, cell in enumerate(row[1 : count + 1]):
            if cell != "X":
                links[int(match.group(1)), other] = int(cell[2:]) if re.fullmatch(r"NV\d+", cell) else 0
    if len(links) != count * (count - 1):
        return None
    return links if all(links.values()) else {}


def _multicast(machine: Machine) -> list[Found]:
    torch = machine.module("torch")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count < 2:
        return []
    answers = {index: _driver_attribute(machine, MULTICAST, index) for index in range(count)}
    if all(answers.values()):
        return [("multicast", "on all GPUs")]
    if any(answer is None for answer in answers.values()):
        return [("multicast", "unknown: the driver (libcuda.so.1) could not be queried", "note", "")]
    without = [str(index) for index, answer in answers.items() if not answer]
    return [("multicast", f"not on GPU {', '.join(without)}", "note", "it needs NVSwitch and the fabric manager")]


def _symmetric_memory(machine: Machine) -> list[Found]:
    torch = machine.module("torch")
    if not torch.distributed.is_available():
        return [("torch.distributed", "not in this build of torch", "problem", "several processes need it")]
    try:
        module = machine.module("torch.distributed._symmetric_memory")
    except ImportError as problem:
        advice = "GPUs in several processes need it: install a newer torch"
        return [("symmetric memory", f"not in this torch ({problem})", "problem", advice)]
    if not all(hasattr(module, name) for name in ("empty", "rendezvous")):
        return [("symmetric memory", "has an unknown interface", "problem", "use torch 2.11 or newer")]
    return [("symmetric memory", "torch.distributed._symmetric_memory")]


# -- the network


def _rdma_devices(machine: Machine) -> list[Found]:
    ports = devices.find_ports(machine.sysfs)
    if not ports:
        return [("RDMA devices", "none", "note", "nodes communicate over TCP, which is slow")]
    found: list[Found] = []
    for port in ports:
        words = [port.link_layer or "unknown link layer", f"{port.rate:g} Gb/s", port.driver or "unknown driver"]
        if not port.active:
            advice = (
                "plug it in, or bring its interface up (ip link set ... up); on InfiniBand check the subnet manager"
            )
            found.append((port.name, ", ".join([*words, "not active"]), "note", advice))
        elif port.link_layer == "Ethernet" and not port.gids and not port.is_efa:
            advice = "RoCE needs an address: give its network interface one (ip addr add ...)"
            found.append((port.name, ", ".join([*words, "active, no GID"]), "note", advice))
        else:
            found.append((port.name, ", ".join([*words, "active"])))
    if not any(port.active for port in ports):
        found.append(("RDMA devices", "none is active", "problem", "nodes communicate over TCP until one is"))
    limit = machine.locked_bytes()
    if 0 <= limit < LOCKED_BYTES:
        advice = "registering memory with the network card locks it: set `ulimit -l unlimited`"
        found.append(("memory that may be locked", f"{limit / 2**20:.0f} MiB", "problem", advice))
    return found


def _libraries(machine: Machine) -> list[Found]:
    ports = devices.find_ports(machine.sysfs)
    efa = any(port.is_efa for port in ports)
    found: list[Found] = []
    for name, file, needed, package in (
        ("libibverbs", "libibverbs.so.1", bool(ports), "libibverbs1 and ibverbs-providers, or rdma-core"),
        ("libefa", "libefa.so.1", efa, "ibverbs-providers, rdma-core, or AWS's EFA installer"),
    ):
        try:
            machine.library(file)
        except OSError as problem:
            if needed:
                found.append((name, f"cannot be opened ({problem})", "problem", f"install {package}"))
            else:
                found.append((name, "not installed, and not needed", "note", ""))
        else:
            found.append((name, file))
    return found


def _gpudirect(machine: Machine) -> list[Found]:
    torch = machine.module("torch")
    if not torch.cuda.is_available():
        return []
    needed = bool(devices.find_ports(machine.sysfs))
    dma_buf = _driver_attribute(machine, DMA_BUF, 0)
    peermem = any((machine.sysfs / "module" / name).exists() for name in ("nvidia_peermem", "nv_peer_mem"))
    found: list[Found] = [
        ("dma-buf", "supported")
        if dma_buf
        else ("dma-buf", "unknown: the driver could not be queried" if dma_buf is None else "not supported", "note"),
        ("nvidia_peermem", "loaded") if peermem else ("nvidia_peermem", "not loaded", "note"),
    ]
    if needed and dma_buf is False and not peermem:
        advice = (
            "network cards cannot access GPU memory: use NVIDIA's open kernel modules on Linux 5.12 or newer "
            "(dma-buf), or `modprobe nvidia-peermem`"
        )
        found.append(("GPUDirect RDMA", "neither dma-buf nor peermem", "problem", advice))
    return found


PROBES: Sequence[tuple[str, Callable[[Machine], list[Found]]]] = (
    ("Programs", _python),
    ("Programs", _packages),
    ("Programs", _compiler),
    ("GPUs", _gpus),
    ("GPUs", _between_gpus),
    ("GPUs", _multicast),
    ("GPUs", _symmetric_memory),
    ("Network", _rdma_devices),
    ("Network", _libraries),
    ("Network", _gpudirect),
)


def _conclusions(machine: Machine, findings: Sequence[Finding]) -> list[Found]:
    """What a program gets by default."""
    by_name = {finding.name: finding for finding in findings}
    gpus = [name for name in by_name if re.fullmatch(r"GPU \d+", name)]
    simulator = "greenlet" in by_name and by_name["greenlet"].found != "not installed"
    result: list[Found] = []
    if gpus:
        result.append(("mk.spawn, mkernel demo", f"ranks as threads on {len(gpus)} GPU{'s' if len(gpus) > 1 else ''}"))
        result.append(("mk.init under torchrun", "a process uses the GPU with the number of its local rank"))
        inside = by_name.get("symmetric memory")
        result.append(
            ("inside a node", "torch symmetric memory" if inside and inside.status == "ok" else "nothing yet")
        )
    elif simulator:
        result.append(("mk.spawn, mkernel demo", "the simulator"))
        result.append(("mk.init under torchrun", "processes on CPUs, kernels in the interpreter"))
        result.append(("inside a node", "shared memory"))
    else:
        advice = "install greenlet for the simulator: pip install 'mkernel-gpu[sim]'"
        result.append(("mk.spawn, mkernel demo", "nothing: no GPU, no simulator", "problem", advice))
    return result


def _between_nodes(machine: Machine, findings: Sequence[Finding]) -> list[Found]:
    """Which devices each rank would use, given the location of its GPU; see mkernel.runtime.connect."""
    torch = machine.module("torch")
    ports = devices.find_ports(machine.sysfs)
    if any(finding.name in ("C++ compiler", "cache") and finding.status == "problem" for finding in findings):
        return [("between nodes", "nothing: the native proxy cannot be compiled", "note")]
    ranks: list[tuple[str, devices.Location | None]] = [("between nodes", None)]
    if torch.cuda.is_available() and ports:
        count = range(torch.cuda.device_count())
        ranks = [(f"between nodes, GPU {index}", _location_of(machine, torch, index)) for index in count]
    found: list[Found] = []
    for name, location in ranks:
        try:
            machine.library("libibverbs.so.1")
            chosen = devices.choose_ports(ports, gpu=location)
            rails = ", ".join(f"{port.name} (GID {devices.choose_gid(port)})" for port in chosen)
            found.append((name, f"verbs over {rails}, if every rank has such a device; else TCP"))
        except (OSError, MKernelError):
            efa = [port.name for port in ports if port.is_efa and port.active]
            advice = f"mk.init(transport='efa') uses {', '.join(efa)}" if efa else ""
            found.append((name, "TCP, through the native proxy", "ok", advice))
    return found


def _location_of(machine: Machine, torch: Any, index: int) -> devices.Location | None:
    properties = torch.cuda.get_device_properties(index)
    try:
        address = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    except AttributeError:
        return None
    return devices.gpu_location(address, machine.sysfs)


CONCLUSIONS: Sequence[tuple[str, Callable[[Machine, Sequence[Finding]], list[Found]]]] = (
    ("What will be used", _conclusions),
    ("What will be used", _between_nodes),
)
