"""Compiles the native sources: when the package is built, or else on first use.

A wheel has the library next to its sources (setup.py). For a source tree it is kept in the user's cache directory
($XDG_CACHE_HOME or ~/.cache, below mkernel/), under a name derived from everything that goes into it: sources,
compiler, flags. So it is built once per version, and several processes may need it at the same time. A cache into which
another user could put a library (see cache.py) is not used: each process then compiles its own, and warns.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

from mkernel import cache
from mkernel.runtime.errors import MKernelError, TransportError

NATIVE = Path(__file__).parent / "native"
FLAGS = ("-std=c++17", "-pthread", "-Wall", "-Wextra")
LIBRARY_FLAGS = (
    *("-O2", "-g1", "-fPIC", "-shared", "-fvisibility=hidden"),
    *("-Xlinker", f"--version-script={NATIVE / 'exports.map'}"),
)
BUILD_SECONDS = 300
PACKAGED = "net.so"  # next to the sources, in a built package
PACKAGED_WITHOUT_RDMA = "net-without-rdma.so"  # the same, built without the headers of libibverbs
REPAIR = "or set XDG_CACHE_HOME to a folder that only you can write to"
RDMA_HEADERS = ("infiniband/verbs.h", "infiniband/efadv.h")  # optional


def compiler() -> list[str]:
    """The command of the C++ compiler: $CXX, or the first of c++, g++ and clang++ that is installed."""
    chosen = os.environ.get("CXX")
    command = shlex.split(chosen) if chosen else []
    for candidate in [command] if command else [["c++"], ["g++"], ["clang++"]]:
        found = shutil.which(candidate[0])
        if found:
            return [found, *candidate[1:]]
    raise TransportError(
        (f"CXX={chosen}: there is no such compiler. " if command else "no C++ compiler was found. ")
        + "The network layer is compiled on first use and needs one that supports C++17: install g++ or clang++ "
        "(Debian, Ubuntu: apt install g++; Fedora: dnf install gcc-c++; conda: conda install -c conda-forge gxx), "
        "or set CXX to its path"
    )


def cache_directory() -> Path:
    """The directory of compiled libraries."""
    try:
        return _cache_directory()
    except cache.UnsafePath as problem:
        raise TransportError(f"the network layer is compiled into the user's cache. {problem}, {REPAIR}") from problem


def _cache_directory() -> Path:
    """`cache_directory`, but raises cache.UnsafePath if another user could put a library there."""
    try:
        directory = cache.folder()
    except MKernelError as error:
        raise TransportError(f"the network layer is compiled into the user's cache, and {error}") from error
    try:
        return cache.usable_folder(directory)
    except OSError as error:
        raise TransportError(
            f"{directory} cannot be created ({error}); the network layer is compiled into it. "
            f"Set XDG_CACHE_HOME to a directory that can be written"
        ) from error


def library_file() -> Path:
    """The native library: that of the package, or one that is compiled here."""
    return packaged() or build(PACKAGED)


def packaged() -> Path | None:
    """The library of the package, if it has one. A library without RDMA is ignored on machines that have the headers
    and a compiler."""
    whole, without = NATIVE / PACKAGED, NATIVE / PACKAGED_WITHOUT_RDMA
    if whole.exists() or not without.exists():
        return whole if whole.exists() else None
    try:
        return None if _rdma_headers(_command(LIBRARY_FLAGS)) else without
    except TransportError:  # no compiler
        return without


def compile_for_package(directory: Path) -> None:
    """While the package is being built, put the library where `library_file` looks for it."""
    command = _command(LIBRARY_FLAGS)
    directory.mkdir(parents=True, exist_ok=True)
    _compile(command, _sources(), directory / (PACKAGED if _rdma_headers(command) else PACKAGED_WITHOUT_RDMA))


def _sources() -> list[Path]:
    return sorted(NATIVE.glob("*.cc"))


def _command(flags: Sequence[str]) -> list[str]:
    return [*compiler(), *FLAGS, *flags, f"-I{NATIVE}", "-x", "c++", "-"]


def build(name: str, flags: Sequence[str] = LIBRARY_FLAGS, more_sources: Sequence[Path] = ()) -> Path:
    """A library of the native sources and more, compiled with these flags unless it exists."""
    sources = [*_sources(), *more_sources]
    command = _command(flags)
    directories = {source.parent for source in sources} | {Path(flag[2:]) for flag in flags if flag.startswith("-I")}
    used = {path for directory in directories for kind in ("*.h", "*.map") for path in directory.glob(kind)}
    digest = hashlib.sha256()
    for part in (*command, _version(command[0]), _rdma_headers(command)):
        digest.update(part.encode() + b"\0")
    for path in sorted(used | set(sources)):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    kept_as = f"{name}-{digest.hexdigest()[:24]}"
    try:
        return _built(_cache_directory() / kept_as, command, sources)
    except cache.UnsafePath as problem:
        private = cache.private_folder()
        warnings.warn(
            f"mkernel: the cache {cache.folder()} is not used for compiled libraries, because other users could change "
            f"it: {problem}, {REPAIR}. Until then each process compiles its own library, this one in {private}",
            stacklevel=2,
        )
        return _built(private / kept_as, command, sources)


def _built(target: Path, command: Sequence[str], sources: Sequence[Path]) -> Path:
    """The file, in a folder that has been checked; compiled unless it exists."""
    if not _is_there(target):
        with _alone(target):
            if not _is_there(target):  # another process may have compiled it
                if sys.stderr.isatty():
                    print("mkernel: compiling the network library, which happens once; a few seconds", file=sys.stderr)
                _compile(command, sources, target)
    return target


def _is_there(target: Path) -> bool:
    """Does the file exist? Raises cache.UnsafePath if another user could have written it."""
    try:
        os.close(cache.open_file(target))
    except FileNotFoundError:
        return False
    return True


def _version(program: str) -> str:
    return subprocess.run([program, "--version"], capture_output=True, text=True, timeout=60).stdout


def _rdma_headers(command: Sequence[str]) -> str:
    """The headers of libibverbs that the compiler finds. A library that was built without them is rebuilt once they are
    installed."""
    text = "".join(f"#if __has_include(<{name}>)\n#include <{name}>\n#endif\n" for name in RDMA_HEADERS)
    done = subprocess.run([*command, "-M"], input=text, capture_output=True, text=True, timeout=60)
    paths = [Path(word) for word in done.stdout.split() if word.endswith(RDMA_HEADERS)]
    return "".join(f"{path} {path.stat().st_size} {path.stat().st_mtime_ns}\n" for path in paths)


@contextlib.contextmanager
def _alone(target: Path) -> Iterator[None]:
    """Let one process in at a time. The lock ends with the process, so none is left behind."""
    try:
        lock = cache.open_file(target.with_name(target.name + ".lock"), os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise TransportError(
            f"{target.parent} cannot be written ({error}); the network layer is compiled into it. "
            f"Set XDG_CACHE_HOME to a directory that can be written"
        ) from error
    with os.fdopen(lock):
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _compile(command: Sequence[str], sources: Sequence[Path], target: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="build-", dir=target.parent) as scratch:
        output = Path(scratch) / target.name
        full = [*command, "-ldl", "-o", str(output)]
        # all sources in one compilation: they share most of their headers, which halves the time
        text = "".join(f'#include "{source}"\n' for source in sources)
        try:
            done = subprocess.run(full, input=text, capture_output=True, text=True, timeout=BUILD_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise TransportError(f"compiling took more than {BUILD_SECONDS} s: {shlex.join(full)}") from error
        if done.returncode != 0:
            raise TransportError(
                f"the network layer cannot be compiled: {shlex.join(full)}\n{done.stderr[-4000:]}\n"
                f"It needs a compiler that supports C++17, and the Linux headers; set CXX to use another compiler"
            )
        output.chmod(output.stat().st_mode & ~0o022)  # whatever the umask
        output.replace(target)  # atomically
