"""The native code under the sanitizers: threads that race, memory that is not ours, damaged bytes."""

import subprocess
from pathlib import Path

import pytest
from support.patience import HANG

from mkernel.net.build import NATIVE, build, compiler

from .test_rdma import FAKE as FAKE_VERBS
from .test_rdma import has_headers

FAKE_CUDA = Path(__file__).parent / "fake_cuda" / "libcuda.cc"
SOURCES = sorted((Path(__file__).parent / "native").glob("*.cc"))
SANITIZERS = {
    # -O1 takes three times as long to compile
    "memory": ("-O0", "-g1", "-Werror", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
    "threads": ("-O1", "-g1", "-Werror", "-fsanitize=thread"),
}


def run(sanitizer: str, *arguments: str, libraries: Path | None = None) -> None:
    flags = (*SANITIZERS[sanitizer], f"-I{SOURCES[0].parent}")
    program = build(f"selftest-{sanitizer}", flags, SOURCES)
    environment = {"TSAN_OPTIONS": "halt_on_error=1", "ASAN_OPTIONS": "detect_leaks=1"}
    if libraries is not None:
        environment["LD_LIBRARY_PATH"] = str(libraries)
    done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=HANG, env=environment)
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("the thread sanitizer does not run on this kernel")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-8000:]
    assert f"{arguments[0]}: well" in done.stdout


@pytest.mark.parametrize("what", ["ring", "frames", "counting", "loopback", "tcp", "lifecycle"])
@pytest.mark.parametrize("sanitizer", SANITIZERS)
@pytest.mark.thorough
def test_stress(sanitizer, what):
    run(sanitizer, what)


def compile_library(source: Path, sanitizer: str, target: Path) -> None:
    flags = ["-std=c++17", "-pthread", "-fPIC", "-shared", f"-I{NATIVE}", *SANITIZERS[sanitizer]]
    subprocess.run([*compiler(), *flags, source, "-o", target], check=True, timeout=HANG)


@pytest.fixture(scope="module", params=SANITIZERS)
def stand_ins(request, tmp_path_factory) -> tuple[str, Path]:
    """A sanitizer, and a folder with libcuda and libibverbs that are stand-ins, built with it."""
    folder = tmp_path_factory.mktemp("libraries")
    compile_library(FAKE_CUDA, request.param, folder / "libcuda.so.1")
    if has_headers():
        compile_library(FAKE_VERBS, request.param, folder / "libibverbs.so.1")
        (folder / "libefa.so.1").symlink_to("libibverbs.so.1")
    return request.param, folder


@pytest.mark.thorough
def test_memory_on_a_device(stand_ins):
    """With a driver that is a fake one, so that this runs without a GPU."""
    sanitizer, folder = stand_ins
    run(sanitizer, "cuda", libraries=folder)


@pytest.mark.thorough
@pytest.mark.skipif(not has_headers(), reason="libibverbs-dev is not installed")
def test_rdma(stand_ins):
    """With libraries that are a stand-in, so that this runs without a device."""
    sanitizer, folder = stand_ins
    for what in ("verbs", "efa", "rdma-on-device"):
        run(sanitizer, what, libraries=folder)


@pytest.mark.thorough
def test_damaged_bytes_are_refused_or_harmless():
    run("memory", "fuzz", "4")
