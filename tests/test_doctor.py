"""The doctor, on machines that are not here."""

import contextlib
import ctypes
import json
import re
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.patience import HANG

import mkernel as mk
from mkernel import doctor
from mkernel.doctor import Machine
from mkernel.net import build

ROOT = Path(__file__).parents[1]


class FakeDriver:
    """libcuda.so.1, as far as it is asked; attributes by number."""

    def __init__(self, **attributes):
        self.attributes = {int(key.strip("a")): value for key, value in attributes.items()}

    def cuInit(self, flags):
        return 0

    def cuDeviceGet(self, device, index):
        ctypes.cast(device, ctypes.POINTER(ctypes.c_int))[0] = index
        return 0

    def cuDeviceGetAttribute(self, value, attribute, device):
        if attribute not in self.attributes:
            return 1
        ctypes.cast(value, ctypes.POINTER(ctypes.c_int))[0] = self.attributes[attribute]
        return 0


class FakeMachine(Machine):
    """Nothing is on it but what is said."""

    def __init__(self, root, **changes):
        super().__init__(sysfs=root / "sys", proc=root / "proc", environment={}, python=(3, 12, 1), system="Linux")
        self.root = root
        self.versions = {"torch": "2.11.0+cu130", "triton": "3.6.0", "numpy": "2.2.6", "greenlet": "3.5", "plotly": "6"}
        self.libraries = {}
        self.outputs = {}
        self.locked = -1
        self.compiler_fails = ""
        self.gpus = []
        self.apart = set()
        self.cuda, self.hip = "13.0", None
        self.modules = {"torch.distributed._symmetric_memory": SimpleNamespace(empty=1, rendezvous=1)}
        for name, value in changes.items():
            setattr(self, name, value)

    def version(self, package):
        return self.versions.get(package)

    def module(self, name):
        if name == "torch":
            cuda = SimpleNamespace(
                is_available=lambda: bool(self.gpus),
                device_count=lambda: len(self.gpus),
                get_device_properties=lambda index: self.gpus[index],
                can_device_access_peer=lambda one, other: (one, other) not in self.apart,
            )
            distributed = SimpleNamespace(is_available=lambda: True)
            version = SimpleNamespace(cuda=self.cuda, hip=self.hip)
            return SimpleNamespace(cuda=cuda, version=version, distributed=distributed)
        if name not in self.modules:
            raise ImportError(f"No module named {name}")
        return self.modules[name]

    def library(self, name):
        if name not in self.libraries:
            raise OSError(f"{name}: cannot open shared object file")
        return self.libraries[name]

    def output(self, *command):
        return self.outputs.get(command[0], "g++ 12.2\n" if command[-1] == "--version" else None)

    def try_compiler(self, command):
        return self.compiler_fails

    def locked_bytes(self):
        return self.locked

    def write(self, path, text):
        place = self.root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text + "\n")

    def add_port(
        self, name, state="4: ACTIVE", layer="InfiniBand", driver="mlx5_core", way="pci0000:00", gid="fe80::1"
    ):
        """A device below a host bridge, as sysfs has it."""
        folder = f"sys/devices/{way}/{name}/infiniband/{name}"
        self.write(f"sys/devices/{way}/{name}/numa_node", "0")
        self.write(f"{folder}/node_type", "1: CA")
        if gid:
            self.write(f"{folder}/ports/1/gids/0", gid)
            self.write(f"{folder}/ports/1/gid_attrs/types/0", "RoCE v2")
        self.write(f"{folder}/ports/1/state", state)
        self.write(f"{folder}/ports/1/link_layer", layer)
        self.write(f"{folder}/ports/1/rate", "400 Gb/sec (4X NDR)")
        drivers = self.root / "sys/bus/pci/drivers" / driver
        drivers.mkdir(parents=True, exist_ok=True)
        device = self.root / f"sys/devices/{way}/{name}"
        (device / "driver").symlink_to(drivers)
        (self.root / folder / "device").symlink_to(device)
        listed = self.root / "sys/class/infiniband"
        listed.mkdir(parents=True, exist_ok=True)
        (listed / name).symlink_to(self.root / folder)

    def add_gpu(self, bus, way="pci0000:00"):
        """Its place on the bus."""
        device = self.root / f"sys/devices/{way}/0000:{bus:02x}:00.0"
        device.mkdir(parents=True)
        listed = self.root / "sys/bus/pci/devices"
        listed.mkdir(parents=True, exist_ok=True)
        (listed / device.name).symlink_to(device)
        self.gpus.append(gpu(pci_domain_id=0, pci_bus_id=bus, pci_device_id=0))


def gpu(name="NVIDIA H200", major=9, minor=0, **more):
    memory = 140 * 2**30
    return SimpleNamespace(name=name, major=major, minor=minor, multi_processor_count=132, total_memory=memory, **more)


def found(machine):
    diagnosis = doctor.diagnose(machine)
    assert str(diagnosis)
    assert json.loads(json.dumps(diagnosis.to_dict()))["findings"]
    return {finding.name: finding for finding in diagnosis.findings}


def problems(machine):
    return {finding.name for finding in doctor.diagnose(machine).problems}


@pytest.fixture
def machine(tmp_path):
    return FakeMachine(tmp_path)


@pytest.fixture
def cluster(tmp_path):
    """A node on which all is well."""
    libraries = {"libcuda.so.1": FakeDriver(a132=1, a124=1), "libibverbs.so.1": 1, "libefa.so.1": 1}
    made = FakeMachine(tmp_path, gpus=[gpu(), gpu()], libraries=libraries)
    made.outputs["nvidia-smi"] = "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tNV18\t0-47\nGPU1\tNV18\t X \t0-47\n\nLegend:\n"
    made.add_port("mlx5_0")
    return made


def test_this_machine():
    diagnosis = mk.diagnose()
    assert {"Programs", "GPUs", "Network", "What will be used"} <= {finding.section for finding in diagnosis.findings}
    assert "could not be examined" not in str(diagnosis)


def test_a_laptop_has_no_problems(machine):
    result = found(machine)
    assert problems(machine) == set()
    assert result["GPU"].status == "note"
    assert "simulator" in result["GPU"].advice
    assert result["mk.spawn, mkernel demo"].found == "the simulator"
    assert result["between nodes"].found.startswith("TCP")
    assert "multicast" not in result


def test_a_node_where_all_is_well(cluster):
    result = found(cluster)
    assert problems(cluster) == set()
    assert result["GPU 1"].found == "NVIDIA H200, compute capability 9.0, 132 SMs, 140 GiB"
    assert result["peer access"].found == "between all 2 GPUs"
    assert result["NVLink"].found.startswith("18 to 18 links")
    assert result["multicast"].found == "on all GPUs"
    assert result["mlx5_0:1"].found == "InfiniBand, 400 Gb/s, mlx5_core, active"
    assert result["dma-buf"].status == "ok"
    assert result["mk.spawn, mkernel demo"].found == "ranks as threads on 2 GPUs"
    assert result["inside a node"].found == "torch symmetric memory"
    assert result["between nodes, GPU 0"].found.startswith("verbs over mlx5_0:1 (GID 0), if every rank")


def test_each_gpu_takes_the_card_near_it(tmp_path):
    machine = FakeMachine(tmp_path, libraries={"libibverbs.so.1": 1})
    for bus, way in ((0x41, "pci0000:40"), (0x81, "pci0000:80")):
        machine.add_gpu(bus, way)
    machine.add_port("mlx5_0", way="pci0000:80")
    machine.add_port("mlx5_1", way="pci0000:40")
    result = found(machine)
    assert "mlx5_1:1" in result["between nodes, GPU 0"].found
    assert "mlx5_0:1" in result["between nodes, GPU 1"].found


def test_roce_without_an_address(cluster):
    cluster.add_port("rocep1", layer="Ethernet", gid="")
    assert "ip addr add" in found(cluster)["rocep1:1"].advice


@pytest.mark.parametrize(
    ("versions", "name", "status", "advice"),
    [
        ({"torch": "2.9.1"}, "torch", "problem", "pip install -U 'torch>=2.11'"),
        ({"torch": "2.12.0.dev20260101+cu130"}, "torch", "ok", ""),
        ({"torch": "2.15.1+cu132"}, "torch", "ok", ""),
        ({"torch": "2.16.0"}, "torch", "note", "pip install 'torch==2.15.*'"),
        ({"torch": "3.0"}, "torch", "note", "newer than what mkernel is tested with"),
        ({"triton": "3.9.1"}, "triton", "ok", ""),
        ({"triton": "3.10"}, "triton", "note", "pip install 'triton==3.9.*'"),  # 3.10 is newer than 3.9
        ({"triton": None}, "triton", "problem", "pip install 'triton>=3.6'"),
        ({"numpy": "nonsense"}, "numpy", "problem", "2.0 or newer"),
        ({"greenlet": None}, "greenlet", "note", "simulator"),
        ({"plotly": None}, "plotly", "note", "HTML"),
    ],
)
def test_versions(machine, versions, name, status, advice):
    machine.versions.update(versions)
    finding = found(machine)[name]
    assert finding.status == status
    assert advice in finding.advice


def test_what_is_tested(machine):
    """As `make test-versions` does, and as the documentation says."""
    machine.versions.update(torch="2.13.0", triton="3.7.1")
    result = found(machine)
    assert result["torch"].found == "2.13.0 (tested: 2.11 to 2.15)"
    assert result["triton"].found == "3.7.1 (tested: 3.6 to 3.9)"
    makefile, page = ((ROOT / name).read_text() for name in ("Makefile", "docs/versions.md"))
    for name, oldest, newest, _ in doctor.PACKAGES:
        if newest:
            pinned = re.findall(rf"^\w+_{name.upper()} := {name}==([\d.]+?)\.\d+$", makefile, re.MULTILINE)
            assert pinned == [oldest, newest]
            assert re.search(rf"\| (?:Py)?{name} \| {oldest} to {newest} \|", page, re.IGNORECASE)


@pytest.mark.parametrize(
    ("made", "hip", "status", "advice"),
    [
        (gpu(), None, "ok", ""),
        (gpu("NVIDIA A100", 8, 0), None, "note", "some operators need Hopper"),
        (gpu("NVIDIA B200", 10, 0), None, "note", "not been tried"),
        (gpu("NVIDIA T4", 7, 5), None, "problem", "compute capability 8.0"),
        (gpu("AMD Instinct MI300X", 9, 4), "6.4", "problem", "NVIDIA GPUs"),
    ],
    ids=lambda value: value.name if hasattr(value, "name") else "",
)
def test_kinds_of_gpus(machine, made, hip, status, advice):
    machine.gpus.append(made)
    machine.hip = hip
    finding = found(machine)["GPU 0"]
    assert finding.status == status
    assert advice in finding.advice


def test_no_gpu_and_no_simulator(machine):
    machine.versions["greenlet"] = None
    assert problems(machine) == {"mk.spawn, mkernel demo"}


def test_old_python_and_other_systems(machine):
    machine.python, machine.system = (3, 9, 2), "Darwin"
    assert problems(machine) == {"Python", "system"}


def test_no_compiler(machine, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    result = found(machine)
    assert result["C++ compiler"].status == "problem"
    assert "no-such-compiler" in result["C++ compiler"].advice
    assert result["between nodes"].found.startswith("nothing")


def test_a_compiler_that_does_not_work(machine):
    machine.compiler_fails = "it fails with exit code 1"
    result = found(machine)
    assert result["C++ compiler"].status == "problem"
    assert "it fails with exit code 1. Several nodes need a compiler" in result["C++ compiler"].advice
    assert result["between nodes"].found.startswith("nothing")


def compiler(tmp_path, lines):
    path = tmp_path / "compiler"
    path.write_text(f"#!/bin/sh\n{lines}\n")
    path.chmod(0o700)
    return path


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("exit 3", "it fails with exit code 3 and says nothing"),
        ("echo 'probe.cc:2: error: no such thing' >&2; exit 1", "exit code 1: probe.cc:2: error: no such thing"),
        ("exit 0", "its output cannot be loaded"),  # and makes nothing
        ('for last; do :; done; echo text > "$last"', "its output cannot be loaded"),
    ],
)
def test_a_compiler_is_tried(tmp_path, lines, expected):
    assert expected in Machine().try_compiler([str(compiler(tmp_path, lines))])


def test_a_compiler_that_can_not_be_started(tmp_path):
    assert "cannot be started" in Machine().try_compiler([str(tmp_path)])


def test_a_compiler_that_does_not_end_is_ended_with_its_children(tmp_path, monkeypatch):
    """The time is over as soon as it has a child."""
    child = tmp_path / "child"
    path = compiler(tmp_path, f"sleep {2 * HANG} & echo $! > {child}.new; mv {child}.new {child}; sleep {2 * HANG}")

    class Process(subprocess.Popen):
        def wait(self, timeout=None):
            if timeout is not None:
                assert timeout == doctor.SECONDS
                while not child.exists():
                    assert self.poll() is None
                    time.sleep(0.01)
                timeout = 0.1
            return super().wait(timeout)

    monkeypatch.setattr(subprocess, "Popen", Process)
    for probe, expected in [
        (lambda: "still compiling" in Machine().try_compiler([str(path)]), True),
        (lambda: Machine().output(str(path)), None),
    ]:
        assert probe() is expected
        state = Path(f"/proc/{child.read_text().strip()}/stat")
        with contextlib.suppress(OSError):  # it is gone
            while state.read_text().split()[2] not in "ZX":  # whoever adopts it may take a moment to reap it
                time.sleep(0.01)
        child.unlink()


def test_the_compiler_that_is_here_works():
    assert Machine().try_compiler(build.compiler()) == ""


def test_doctor_says_that_cxx_does_not_work(monkeypatch):
    monkeypatch.setenv("CXX", "/bin/false")
    by_name = {finding.name: finding for finding in doctor.diagnose().findings}
    assert by_name["C++ compiler"].status == "problem"
    assert "unset CXX" in by_name["C++ compiler"].advice
    assert by_name["between nodes"].found.startswith("nothing")


def test_a_cache_that_can_not_be_made(machine, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert found(machine)["cache"].status == "problem"


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        ({"cuda": None}, "built without CUDA"),
        ({"environment": {"CUDA_VISIBLE_DEVICES": ""}}, "unset it"),
        ({}, "modprobe nvidia"),
        ({"driver": True}, "new enough"),
    ],
)
def test_a_gpu_that_torch_does_not_see(tmp_path, changes, advice):
    changes = dict(changes)
    driver = changes.pop("driver", False)
    machine = FakeMachine(tmp_path, **changes)
    machine.write("sys/bus/pci/devices/0000:41:00.0/vendor", "0x10de")
    machine.write("sys/bus/pci/devices/0000:41:00.0/class", "0x030200")
    if driver:
        machine.write("proc/driver/nvidia/version", "NVRM version: 580")
    finding = found(machine)["GPU"]
    assert finding.status == "problem"
    assert "1 on the PCI bus" in finding.found
    assert advice in finding.advice


def test_an_older_gpu(machine):
    machine.gpus = [gpu("NVIDIA A100", 8, 0)]
    finding = found(machine)["GPU 0"]
    assert finding.status == "note"
    assert "Hopper" in finding.advice


def test_gpus_that_can_not_see_each_other(cluster):
    cluster.apart = {(0, 1)}
    assert "0-1" in found(cluster)["peer access"].found
    assert problems(cluster) == {"peer access"}


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ("\tGPU0\tGPU1\nGPU0\t X \tPHB\nGPU1\tPHB\t X \n", "none"),
        ("nonsense\nGPU0\n", "unknown"),
        (None, "unknown"),
        ("\x1b[4m\tGPU0\tGPU1\x1b[0m\nGPU0\t X \tNV4\nGPU1\tNV4\t X \n", "4 to 4 links"),
    ],
)
def test_nvlink(cluster, table, expected):
    cluster.outputs["nvidia-smi"] = table
    assert found(cluster)["NVLink"].found.startswith(expected)


def test_multicast(cluster):
    cluster.libraries["libcuda.so.1"] = FakeDriver(a132=0, a124=1)
    assert found(cluster)["multicast"].found == "not on GPU 0, 1"
    cluster.libraries["libcuda.so.1"] = FakeDriver()
    assert found(cluster)["multicast"].found.startswith("unknown")
    del cluster.libraries["libcuda.so.1"]
    assert found(cluster)["multicast"].found.startswith("unknown")
    cluster.libraries["libcuda.so.1"] = SimpleNamespace()  # a library without the functions
    assert found(cluster)["multicast"].found.startswith("unknown")


def test_symmetric_memory(cluster):
    cluster.modules["torch.distributed._symmetric_memory"] = SimpleNamespace(empty=1)
    assert problems(cluster) == {"symmetric memory"}
    cluster.modules.clear()
    assert problems(cluster) == {"symmetric memory"}
    assert found(cluster)["inside a node"].found.startswith("nothing")


def test_ports_that_are_down(cluster):
    cluster.add_port("mlx5_1", state="1: DOWN")
    assert problems(cluster) == set()  # one is enough
    assert found(cluster)["mlx5_1:1"].status == "note"
    cluster.write("sys/class/infiniband/mlx5_0/ports/1/state", "2: INIT")
    assert problems(cluster) == {"RDMA devices"}
    assert found(cluster)["between nodes, GPU 0"].found.startswith("TCP")


def test_a_port_that_can_not_be_read(cluster):
    (cluster.root / "sys/class/infiniband/odd/ports/1").mkdir(parents=True)
    assert "unknown link layer" in found(cluster)["odd:1"].found


def test_locked_memory(cluster):
    cluster.locked = 8 << 20
    assert found(cluster)["memory that may be locked"].found == "8 MiB"
    assert problems(cluster) == {"memory that may be locked"}


def test_libraries(cluster):
    del cluster.libraries["libibverbs.so.1"], cluster.libraries["libefa.so.1"]
    assert problems(cluster) == {"libibverbs"}  # there is no EFA device
    cluster.add_port("rdmap0", driver="efa", layer="Unspecified")
    assert problems(cluster) == {"libibverbs", "libefa"}
    result = found(cluster)["between nodes, GPU 0"]
    assert result.found.startswith("TCP")
    assert "transport='efa'" in result.advice
    assert "rdmap0:1" in result.advice


def test_libraries_that_nothing_needs(machine):
    assert found(machine)["libibverbs"].status == "note"


def test_gpudirect(cluster):
    cluster.libraries["libcuda.so.1"] = FakeDriver(a132=1, a124=0)
    assert problems(cluster) == {"GPUDirect RDMA"}
    (cluster.root / "sys/module/nvidia_peermem").mkdir(parents=True)
    assert problems(cluster) == set()
    assert found(cluster)["nvidia_peermem"].found == "loaded"


@pytest.mark.parametrize("probe", [*doctor.PROBES, *doctor.CONCLUSIONS], ids=lambda probe: probe[1].__name__)
def test_no_probe_ends_the_examination(machine, monkeypatch, probe):
    """Whatever a probe stumbles over, the others are heard."""

    def stumble(*_):
        raise RuntimeError("out of order")

    stumble.__name__ = probe[1].__name__
    for name in ("PROBES", "CONCLUSIONS"):
        others = [(section, stumble if one is probe[1] else one) for section, one in getattr(doctor, name)]
        monkeypatch.setattr(doctor, name, others)
    diagnosis = doctor.diagnose(machine)
    assert "could not be examined (RuntimeError: out of order)" in str(diagnosis)
    assert len(diagnosis.findings) > 5


def test_a_broken_torch(machine):
    machine.module = lambda name: (_ for _ in ()).throw(ImportError("libcudart.so.13: cannot open"))
    assert "libcudart.so.13" in str(doctor.diagnose(machine))


def test_programs_that_are_not_there_or_fail():
    assert Machine().output("no-such-program") is None
    assert Machine().output("false") is None
    assert Machine().output("echo", "hello") == "hello\n"
    assert Machine().version("no-such-package") is None
    with pytest.raises(OSError, match="no-such-library"):
        Machine().library("no-such-library.so")
