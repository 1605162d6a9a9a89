"""The package's build: a wheel has the native library in it, and needs no compiler where it is installed."""

import os
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from support.patience import HANG

from mkernel.net import build as builder
from mkernel.runtime.errors import TransportError

ROOT = Path(__file__).parents[2]
# The sources are compiled already, with the same flags: a compiler that notes what it is asked for and gives that.
COMPILER = """#!/bin/sh
case "$*" in
*" -o "*)
    printf '%s\\n' "$@" > "$0.asked"
    cat > "$0.source"
    for output; do :; done
    exec cp {library} "$output" ;;
*) exec {real} "$@" ;;
esac
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The folder of a package that was built from these sources."""
    folder = tmp_path_factory.mktemp("package")
    tree = folder / "tree"
    tree.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    shutil.copytree(ROOT / "src" / "mkernel", tree / "src" / "mkernel", ignore=shutil.ignore_patterns("__pycache__"))
    compiler = folder / "compiler"
    compiler.write_text(COMPILER.format(library=builder.build(builder.PACKAGED), real=shlex.join(builder.compiler())))
    compiler.chmod(0o755)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", folder, tree]
    environment = os.environ | {"CXX": str(compiler)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    *asked, _, _, output = (folder / "compiler.asked").read_text().replace(str(tree), str(ROOT)).splitlines()
    assert asked == builder._command(builder.LIBRARY_FLAGS)[len(builder.compiler()) :]
    assert Path(output).name in (builder.PACKAGED, builder.PACKAGED_WITHOUT_RDMA)
    source = (folder / "compiler.source").read_text().replace(str(tree), str(ROOT))
    assert source.splitlines() == [f'#include "{each}"' for each in builder._sources()]
    (wheel,) = folder.glob("*.whl")
    assert "-py3-none-" in wheel.name, "one for every Python of a platform"
    assert not wheel.name.endswith("-any.whl")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(folder / "installed")
    return folder / "installed"


@pytest.mark.thorough
def test_no_compiler_is_needed(installed, tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "CXX"}
    environment |= {"PYTHONPATH": str(installed), "PATH": "/nowhere", "XDG_CACHE_HOME": str(tmp_path)}
    program = "import mkernel.net.library as native; native.library(); print(native.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=HANG, env=environment, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(installed))
    assert not list(tmp_path.rglob("*.so*")), "something was compiled"


@pytest.fixture
def native(monkeypatch, tmp_path):
    monkeypatch.setattr(builder, "NATIVE", tmp_path)
    monkeypatch.setattr(builder, "_rdma_headers", lambda command: "")
    return tmp_path


def test_a_source_tree_has_none(native):
    assert builder.packaged() is None


def test_the_whole_one_is_taken(native):
    for name in (builder.PACKAGED, builder.PACKAGED_WITHOUT_RDMA):
        (native / name).touch()
    assert builder.packaged() == native / builder.PACKAGED


def test_one_without_rdma_is_taken_where_no_better_can_be_built(native, monkeypatch):
    (native / builder.PACKAGED_WITHOUT_RDMA).touch()
    assert builder.packaged() == native / builder.PACKAGED_WITHOUT_RDMA
    monkeypatch.setattr(builder, "_rdma_headers", lambda command: "/usr/include/infiniband/verbs.h 1 1\n")
    assert builder.packaged() is None

    def none():
        raise TransportError("no C++ compiler was found")

    monkeypatch.setattr(builder, "compiler", none)
    assert builder.packaged() == native / builder.PACKAGED_WITHOUT_RDMA
