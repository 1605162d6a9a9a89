"""Compiling on first use: once, whole, and with words that help when it can not be done."""

import multiprocessing
from pathlib import Path

import pytest

from mkernel.net import build as builder
from mkernel.runtime.errors import TransportError


@pytest.fixture
def small(monkeypatch, tmp_path):
    """A small library in place of the real one, and a cache of its own."""
    sources = tmp_path / "native"
    sources.mkdir()
    (sources / "small.h").write_text("int answer();\n")
    (sources / "small.cc").write_text('#include "small.h"\nint answer() { return 42; }\n')
    monkeypatch.setattr(builder, "NATIVE", sources)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return sources


def kept(path: Path) -> list[Path]:
    return [entry for entry in path.parent.iterdir() if entry.suffix != ".lock"]


def test_built_once_and_again_when_something_changed(small):
    first = builder.build("small.so")
    stamp = first.stat().st_mtime_ns
    assert builder.build("small.so") == first
    assert first.stat().st_mtime_ns == stamp
    (small / "small.h").write_text("int answer();  // new\n")
    assert builder.build("small.so") != first
    assert builder.build("small.so", (*builder.LIBRARY_FLAGS, "-DNEW")) != first
    (small / "exports.map").write_text("{ global: *; };\n")
    builder.build("small.so")
    assert len(kept(first)) == 4


def test_several_processes_at_once(small):
    processes = multiprocessing.get_context("fork")
    answers = processes.Queue()
    builders = [processes.Process(target=lambda: answers.put(builder.build("small.so"))) for _ in range(4)]
    for process in builders:
        process.start()
    paths = {answers.get(timeout=60) for _ in builders}
    for process in builders:
        process.join(60)
        assert process.exitcode == 0
    (path,) = paths
    assert kept(path) == [path]  # and nothing half done


def test_no_compiler(monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(TransportError, match=r"no C\+\+ compiler.*apt install g\+\+"):
        builder.compiler()
    monkeypatch.setenv("CXX", "my-compiler -m64")
    with pytest.raises(TransportError, match="CXX=my-compiler -m64"):
        builder.compiler()


def test_a_compiler_that_fails(small):
    (small / "small.cc").write_text("this is not C++\n")
    with pytest.raises(TransportError, match=r"can not be compiled[\s\S]*small.cc:1"):
        builder.build("small.so")
    assert not list((small.parent / "cache" / "mkernel").glob("build-*"))


def test_a_cache_that_can_not_be_written(small, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(TransportError, match="Set XDG_CACHE_HOME"):
        builder.build("small.so")


def test_a_user_without_a_home(monkeypatch, tmp_path):
    def home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", home)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TransportError, match="no home folder: set XDG_CACHE_HOME"):
        builder.cache_directory()
    assert not list(tmp_path.iterdir())  # not in a folder that is called ~
