"""A machine with soft-RoCE, in QEMU: a stock Debian kernel over this machine's own files.

RDMA needs a device and kernel modules, and a container has neither. The guest has both: two rdma_rxe
devices, rxe0 and rxe1, one at each end of a virtual cable (v0, v1). Its file system is this machine's,
read-only with a layer of memory over it, so it runs the same Python and the same compiled library. It
boots in five to ten seconds without hardware support.

rxe knows routes of the first network namespace only, so both ends are in it; `accept_local` makes each end
take packets whose sender is an address of the same machine, and fixed neighbours send them over the cable.
"""

from __future__ import annotations

import gzip
import lzma
import os
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from support.patience import HANG

PACKAGES = Path(__file__).with_name("packages.txt")
PROGRAMS = ("qemu-system-x86_64", "busybox", "cpio", "modprobe", "depmod", "tc", "rdma", "xz", "apt-get", "dpkg")
MODULES = ("virtio_pci", "9pnet_virtio", "9p", "overlay", "veth", "crc32_generic", "crc32_pclmul", "rdma_rxe")
MODULES += ("rdma_ucm", "sch_netem", "virtio_net")
MEMORY_MIB = 2048

INIT = """#!/bin/busybox sh
B=/bin/busybox
$B mount -t proc p /proc; $B mount -t sysfs s /sys; $B mount -t devtmpfs d /dev
for module in $($B cat /modules/order); do $B insmod /modules/$module || echo "insmod $module failed"; done
options=trans=virtio,version=9p2000.L,msize=512000
$B mount -t 9p -o $options,cache=loose,ro root /low || echo "the root file system cannot be mounted"
$B mount -t tmpfs t /run; $B mkdir /run/upper /run/work
$B mount -t overlay -o lowerdir=/low,upperdir=/run/upper,workdir=/run/work o /new
$B mkdir -p /new/exchange
for place in proc sys dev; do $B mount --move /$place /new/$place; done
$B mount -t tmpfs t /new/run; $B mkdir -p /new/dev/shm
$B mount -t tmpfs t /new/dev/shm
$B mount -t 9p -o $options,cache=none exchange /new/exchange
exec $B switch_root /new /bin/bash /exchange/guest.sh
"""

GUEST = """
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root
ulimit -l unlimited; echo localhost > /proc/sys/kernel/hostname
ip link set lo up
ip link add v0 type veth peer name v1
echo 1 > /proc/sys/net/ipv4/conf/all/accept_local
for i in 0 1; do
  echo 0 > /proc/sys/net/ipv4/conf/v$i/rp_filter; echo 1 > /proc/sys/net/ipv4/conf/v$i/accept_local
  echo 1 > /proc/sys/net/ipv4/conf/v$i/arp_ignore
  ip link set v$i mtu 4200 up; ip addr add 10.9.$i.$((i+1))/16 dev v$i
done
for i in 0 1; do
  ip neigh replace 10.9.$((1-i)).$((2-i)) dev v$i lladdr "$(cat /sys/class/net/v$((1-i))/address)" nud permanent
  rdma link add rxe$i type rxe netdev v$i
done
echo ready > /exchange/state
bash /exchange/command > /exchange/log 2>&1 </dev/null
echo $? > /exchange/code
echo o > /proc/sysrq-trigger; sleep 5
"""


@dataclass(frozen=True)
class Result:
    """How a command in the machine ended."""

    code: int | None  # None: it did not end
    output: str
    console: str
    seconds: float


def why_not() -> str | None:
    """Why there can be no such machine here; None: there can."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"no {', '.join(missing)}: apt-get install --no-install-recommends $(cat {PACKAGES})"
    try:
        _kernel_package()
    except (OSError, subprocess.SubprocessError, StopIteration) as error:
        return f"no Debian kernel package: {error}"
    return None


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    directory = Path(base) / "mkernel" / "rdma-machine"
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def _call(*command: str | Path, directory: Path | None = None, data: bytes | None = None) -> bytes:
    done = subprocess.run(command, cwd=directory, input=data, capture_output=True, timeout=HANG)
    if done.returncode != 0:
        raise OSError(f"{shlex.join(map(str, command))}: {done.stderr.decode(errors='replace')[-500:]}")
    return done.stdout


def _kernel_package() -> Path:
    """Debian's kernel, downloaded once."""
    have = sorted(_cache().glob("linux-image-*.deb"))
    if not have:
        depends = _call("apt-cache", "depends", "linux-image-amd64").decode()
        name = next(line.split()[1] for line in depends.splitlines() if "Depends: linux-image" in line)
        with tempfile.TemporaryDirectory(dir=_cache()) as scratch:
            # its own directory, and apt's user may not write there: that is only a warning
            _call("apt-get", "download", name, directory=Path(scratch))
            (package,) = Path(scratch).glob("*.deb")
            package.rename(_cache() / package.name)
        have = sorted(_cache().glob("linux-image-*.deb"))
    return have[-1]


def _uncompressed(image: bytes) -> bytes:
    """The ELF file in a vmlinuz: emulated, unpacking it would take longer than all the rest of the boot."""
    ways = [(b"\xfd7zXZ\0", lambda data: lzma.LZMADecompressor().decompress(data)), (b"\x1f\x8b\x08", gzip.decompress)]
    for magic, unpack in ways:
        at = image.find(magic)
        while at >= 0:
            try:
                kernel = unpack(image[at:])
                if kernel[:4] == b"\x7fELF":
                    return kernel
            except (lzma.LZMAError, OSError, EOFError):
                pass
            at = image.find(magic, at + 1)
    raise OSError("there is no kernel in the package that can be unpacked")


def _prepare() -> tuple[Path, Path]:
    """The kernel and the first file system: busybox and the modules. Made once."""
    kernel, initrd = _cache() / "vmlinux", _cache() / "initrd"
    if kernel.exists() and initrd.exists() and initrd.stat().st_mtime > Path(__file__).stat().st_mtime:
        return kernel, initrd
    with tempfile.TemporaryDirectory(dir=_cache()) as name:
        scratch = Path(name)
        _call("dpkg", "-x", _kernel_package(), scratch / "kernel")
        (image,) = (scratch / "kernel/boot").glob("vmlinuz-*")
        (scratch / "vmlinux").write_bytes(_uncompressed(image.read_bytes()))
        (modules,) = (scratch / "kernel/lib/modules").iterdir()
        _call("depmod", "-b", scratch / "kernel", modules.name)
        root = scratch / "root"
        for directory in ("bin", "modules", "proc", "sys", "dev", "run", "low", "new"):
            (root / directory).mkdir(parents=True)
        busybox = shutil.which("busybox")
        assert busybox is not None
        shutil.copy(busybox, root / "bin/busybox")
        (root / "bin/sh").symlink_to("busybox")
        order: list[str] = []
        for module in MODULES:
            listed = _call("modprobe", "-d", scratch / "kernel", "-S", modules.name, "--show-depends", module).decode()
            for path in (Path(line.split()[1]) for line in listed.splitlines() if line.startswith("insmod")):
                target = path.name.removesuffix(".xz")
                if target not in order:
                    data = path.read_bytes()
                    (root / "modules" / target).write_bytes(lzma.decompress(data) if path.suffix == ".xz" else data)
                    order.append(target)
        (root / "modules/order").write_text("\n".join(order) + "\n")
        (root / "init").write_text(INIT)
        (root / "init").chmod(0o755)
        names = "\n".join(str(path.relative_to(root)) for path in sorted(root.rglob("*")))
        archive = _call("cpio", "-o", "-H", "newc", "--quiet", directory=root, data=names.encode())
        (scratch / "initrd").write_bytes(archive)
        (scratch / "vmlinux").replace(kernel)
        (scratch / "initrd").replace(initrd)
    return kernel, initrd


def _accelerator() -> list[str]:
    # /dev/kvm alone proves nothing: it may be there and not be able to run a stock kernel
    with open("/proc/cpuinfo") as file:
        flags = set(file.read().split())
    if flags & {"vmx", "svm"} and os.access("/dev/kvm", os.W_OK):
        return ["-accel", "kvm", "-cpu", "host"]
    return ["-accel", "tcg,thread=multi,tb-size=512", "-cpu", "max"]


def run(script: str, directory: Path, seconds: float, more: Sequence[str] = ()) -> Result:
    """Boot the machine, run a bash script in it as root, and end it. `directory` is /exchange in there."""
    kernel, initrd = _prepare()
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "guest.sh").write_text(GUEST)
    (directory / "command").write_text(script)
    console, log, code = directory / "console", directory / "log", directory / "code"
    for path in (console, log, code):
        path.unlink(missing_ok=True)
    words = "console=ttyS0 quiet panic=-1 tsc=reliable mitigations=off nokaslr random.trust_cpu=on audit=0"
    command = [
        "qemu-system-x86_64", "-M", "q35", *_accelerator(), "-smp", "2", "-m", str(MEMORY_MIB),
        "-nodefaults", "-no-reboot", "-display", "none",
        "-kernel", str(kernel), "-initrd", str(initrd), "-append", f"{words} selinux=0 apparmor=0",
        "-serial", f"file:{console}",
        "-virtfs", "local,path=/,mount_tag=root,security_model=none,readonly=on,multidevs=remap",
        "-virtfs", f"local,path={directory},mount_tag=exchange,security_model=none,multidevs=remap",
        *more,
    ]  # fmt: skip
    begun = time.monotonic()
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        words_of_qemu, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        words_of_qemu, _ = process.communicate()

    def read(path: Path) -> str:
        return path.read_text(errors="replace") if path.exists() else ""

    return Result(
        code=int(read(code)) if read(code).strip() else None,
        output=read(log),
        console=read(console) + words_of_qemu.decode(errors="replace"),
        seconds=time.monotonic() - begun,
    )
