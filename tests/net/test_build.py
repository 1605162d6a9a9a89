"""Compiling on first use: once, whole, and with words that help when it cannot be done."""

import ctypes
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import pytest
from support import other_users
from support.other_users import as_root
from support.patience import HANG

from mkernel import cache
from mkernel.net import build as builder
from mkernel.runtime.errors import TransportError

EXPORTED = 'extern "C" __attribute__((visibility("default")))'


@pytest.fixture
def small(monkeypatch, tmp_path):
    """A small library in place of the real one, and a cache of its own."""
    sources = tmp_path / "native"
    sources.mkdir()
    (sources / "small.h").write_text("int answer();\n")
    (sources / "small.cc").write_text(f'#include "small.h"\n{EXPORTED} int mkernel_net_answer() {{ return 42; }}\n')
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
    paths = {answers.get(timeout=HANG) for _ in builders}
    for process in builders:
        process.join(HANG)
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
    with pytest.raises(TransportError, match=r"cannot be compiled[\s\S]*small.cc:1"):
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


# -- a cache that others could put a library of theirs into

PLANTED = "not a library of this user"


def plant(folder, names):
    """Put something else under the names that the library and its lock will have."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_text(PLANTED)


def others_folder(cache_home, names):
    plant(cache_home / "mkernel", names)
    other_users.give_away(cache_home / "mkernel")
    return cache_home / "mkernel"


def others_folder_below_a_sticky_one(cache_home, names):
    plant(cache_home / "mkernel", names)
    cache_home.chmod(0o1777)
    other_users.give_away(cache_home / "mkernel")
    return cache_home / "mkernel"


def others_cache_home(cache_home, names):
    plant(cache_home / "mkernel", names)
    other_users.give_away(cache_home)
    return cache_home


def empty_cache_home_of_another(cache_home, names):
    cache_home.mkdir()
    other_users.give_away(cache_home)
    return cache_home


def folder_with_mode(mode):
    def arrange(cache_home, names):
        plant(cache_home / "mkernel", names)
        (cache_home / "mkernel").chmod(mode)
        return cache_home / "mkernel"

    return arrange


def cache_home_with_mode(mode):
    def arrange(cache_home, names):
        plant(cache_home / "mkernel", names)
        cache_home.chmod(mode)
        return cache_home

    return arrange


def missing_below_a_folder_for_all(cache_home, names):
    cache_home.mkdir()
    cache_home.chmod(0o777)
    return cache_home


def others_file(cache_home, names):
    plant(cache_home / "mkernel", names)
    other_users.give_away(cache_home / "mkernel" / names[0])
    return cache_home / "mkernel" / names[0]


def others_unreadable_file(cache_home, names):
    plant(cache_home / "mkernel", names)
    (cache_home / "mkernel" / names[0]).chmod(0)
    other_users.give_away(cache_home / "mkernel" / names[0])
    return cache_home / "mkernel" / names[0]


def others_lock(cache_home, names):
    plant(cache_home / "mkernel", names[1:])
    other_users.give_away(cache_home / "mkernel" / names[1])
    return cache_home / "mkernel" / names[1]


def file_with_mode(mode):
    def arrange(cache_home, names):
        plant(cache_home / "mkernel", names)
        (cache_home / "mkernel" / names[0]).chmod(mode)
        return cache_home / "mkernel" / names[0]

    return arrange


def linked_folder(cache_home, names):
    plant(cache_home.parent / "elsewhere", names)
    cache_home.mkdir()
    cache_home.chmod(0o1777)
    (cache_home / "mkernel").symlink_to(cache_home.parent / "elsewhere")
    other_users.give_away(cache_home / "mkernel")
    return cache_home / "mkernel"


def linked_cache_home(cache_home, names):
    plant(cache_home.parent / "elsewhere" / "mkernel", names)
    cache_home.symlink_to(cache_home.parent / "elsewhere")
    other_users.give_away(cache_home)
    return cache_home


def own_link_to_a_folder_of_others(cache_home, names):
    plant(cache_home.parent / "elsewhere" / "mkernel", names)
    other_users.give_away(cache_home.parent / "elsewhere")
    cache_home.symlink_to(cache_home.parent / "elsewhere")
    return cache_home.parent / "elsewhere"


def linked_file(number):
    def arrange(cache_home, names):
        plant(cache_home.parent / "elsewhere", ["precious"])
        (cache_home / "mkernel").mkdir(parents=True)
        (cache_home / "mkernel" / names[number]).symlink_to(cache_home.parent / "elsewhere" / "precious")
        return cache_home / "mkernel" / names[number]

    return arrange


def a_pipe(cache_home, names):
    (cache_home / "mkernel").mkdir(parents=True)
    os.mkfifo(cache_home / "mkernel" / names[0])
    return cache_home / "mkernel" / names[0]


def a_folder_for_the_library(cache_home, names):
    (cache_home / "mkernel" / names[0]).mkdir(parents=True)
    return cache_home / "mkernel" / names[0]


ARRANGEMENTS = {
    "folder of another user": (others_folder, "belongs to"),
    "folder of another user below a sticky one": (others_folder_below_a_sticky_one, "belongs to"),
    "cache home of another user": (others_cache_home, "belongs to"),
    "empty cache home of another user": (empty_cache_home_of_another, "belongs to"),
    "folder for the group": (folder_with_mode(0o770), "mode 0770.*chmod go-w"),
    "folder for others": (folder_with_mode(0o702), "mode 0702.*chmod go-w"),
    "sticky folder for others": (folder_with_mode(0o1777), "mode 1777.*chmod go-w"),
    "cache home for the group": (cache_home_with_mode(0o775), "mode 0775.*chmod go-w"),
    "cache home for others": (cache_home_with_mode(0o777), "mode 0777.*chmod go-w"),
    "missing below a folder for all": (missing_below_a_folder_for_all, "mode 0777.*chmod go-w"),
    "file of another user": (others_file, "belongs to.*Remove it"),
    "unreadable file of another user": (others_unreadable_file, "belongs to.*Remove it"),
    "lock of another user": (others_lock, "belongs to.*Remove it"),
    "file for the group": (file_with_mode(0o664), "mode 0664.*Remove it"),
    "file for others": (file_with_mode(0o602), "mode 0602.*Remove it"),
    "folder that is another user's link": (linked_folder, "belongs to"),
    "cache home that is another user's link": (linked_cache_home, "belongs to"),
    "own link to another user's folder": (own_link_to_a_folder_of_others, "belongs to"),
    "file that is a link": (linked_file(0), "symbolic link.*Remove it"),
    "lock that is a link": (linked_file(1), "symbolic link.*Remove it"),
    "pipe": (a_pipe, "not a regular file.*Remove it"),
    "folder in the place of the library": (a_folder_for_the_library, "not a regular file.*Remove it"),
}


@pytest.fixture
def clean_private_folder(monkeypatch, tmp_path):
    """Private folders of a test go with the test."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    cache._private_of.cache_clear()
    yield tmp_path / "temporary"
    cache._private_of.cache_clear()


def everything_in(folder):
    """What is in a folder, to see that nothing has changed."""
    found = {}
    for path in sorted(folder.rglob("*")):
        info = path.lstat()
        content = path.read_text() if path.is_file() and not path.is_symlink() else None
        found[path] = (info.st_uid, info.st_mode, content)
    return found


def answer_of(library):
    return ctypes.CDLL(str(library)).mkernel_net_answer()


@as_root
@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
@pytest.mark.thorough
def test_a_cache_that_others_could_change_is_not_used(small, tmp_path, clean_private_folder, arrangement):
    name = builder.build("small.so").name
    shutil.rmtree(tmp_path / "cache")
    arrange, wrong = ARRANGEMENTS[arrangement]
    bad = arrange(tmp_path / "cache", [name, name + ".lock"])
    before = {folder: everything_in(tmp_path / folder) for folder in ("cache", "elsewhere")}
    with pytest.warns(UserWarning, match=rf"{bad} .*{wrong}.*XDG_CACHE_HOME") as warned:
        library = builder.build("small.so")
    assert len(warned) == 1
    assert answer_of(library) == 42
    assert library.parent.parent == clean_private_folder
    assert library.parent.stat().st_mode & 0o777 == 0o700
    assert str(library.parent) in str(warned[0].message)
    assert {folder: everything_in(tmp_path / folder) for folder in ("cache", "elsewhere")} == before
    with pytest.warns(UserWarning, match=wrong):
        assert builder.build("small.so") == library  # one folder for each process, and compiled once


@as_root
def test_the_doctor_is_told(small, tmp_path):
    folder = others_folder(tmp_path / "cache", ["something"])
    with pytest.raises(TransportError, match=f"{folder} belongs to .*XDG_CACHE_HOME"):
        builder.cache_directory()


def test_folders_are_this_users_alone_whatever_the_umask(small, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a" / "b"))
    before = os.umask(0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            library = builder.build("small.so")
            assert builder.build("small.so") == library  # and it is found again
    finally:
        os.umask(before)
    for folder in (tmp_path / "a", tmp_path / "a" / "b", tmp_path / "a" / "b" / "mkernel"):
        assert folder.stat().st_mode & 0o7777 == 0o700
    for file in library.parent.iterdir():
        assert file.stat().st_mode & 0o022 == 0


def test_links_of_this_user_are_followed(small, tmp_path):
    (tmp_path / "scratch").mkdir()
    (tmp_path / "cache").symlink_to("scratch/../scratch")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        library = builder.build("small.so")
    assert library.parent == tmp_path / "scratch" / "mkernel"


def test_links_in_a_circle_end_in_an_error(small, tmp_path):
    (tmp_path / "cache").symlink_to("other")
    (tmp_path / "other").symlink_to("cache")
    with pytest.raises(TransportError, match="Set XDG_CACHE_HOME"):
        builder.build("small.so")


@as_root
def test_a_cache_of_root_that_can_only_be_read(small, monkeypatch):
    """As an administrator would set one up for all users of a machine."""
    with other_users.open_folder() as shared:
        shutil.copytree(small, shared / "native")
        monkeypatch.setattr(builder, "NATIVE", shared / "native")
        monkeypatch.setenv("XDG_CACHE_HOME", str(shared / "cache"))
        library = builder.build("small.so")
        for folder in (shared / "cache", shared / "cache" / "mkernel"):
            folder.chmod(0o755)

        def use():
            warnings.simplefilter("error")
            return builder.build("small.so"), answer_of(library)

        assert other_users.run_as(other_users.VICTIM, use) == (library, 42)

        def miss():
            with pytest.raises(TransportError, match=r"cannot be written.*Set XDG_CACHE_HOME"):
                builder.build("other.so")

        other_users.run_as(other_users.VICTIM, miss)


@as_root
def test_a_user_is_not_given_what_another_user_built(small, monkeypatch):
    """Both have the same XDG_CACHE_HOME, below a folder for all users such as /tmp."""
    with other_users.open_folder() as shared:
        shutil.copytree(small, shared / "native")
        monkeypatch.setattr(builder, "NATIVE", shared / "native")
        (shared / "tmp").mkdir()
        (shared / "tmp").chmod(0o1777)
        monkeypatch.setenv("XDG_CACHE_HOME", str(shared / "tmp" / "cache"))
        flags = ("-fPIC", "-shared")  # the default ones name a file of this checkout, which may be in a private folder

        def attack():
            library = builder.build("small.so", flags)
            library.write_text(PLANTED)
            for path in (library.parent.parent, library.parent, library):
                path.chmod(0o755)
            return library

        planted = other_users.run_as(other_users.SOMEBODY, attack)

        def use():
            with pytest.warns(UserWarning, match="belongs to"):
                library = builder.build("small.so", flags)
            found = answer_of(library)
            shutil.rmtree(library.parent)
            return library, found

        library, found = other_users.run_as(other_users.VICTIM, use)
        assert library != planted
        assert found == 42


@as_root
@pytest.mark.parametrize("mode", [0o777, 0o1777])
def test_a_temporary_folder_that_others_could_change(small, tmp_path, clean_private_folder, mode):
    """The private folder is not made below one in which others could rename it."""
    clean_private_folder.chmod(mode)
    others_folder(tmp_path / "cache", ["something"])
    with pytest.warns(UserWarning, match="belongs to"):
        library = builder.build("small.so")
    assert (library.parent.parent == clean_private_folder) == (mode == 0o1777)
    shutil.rmtree(library.parent)


@as_root
@pytest.mark.thorough
def test_the_private_folder_goes_with_the_process(tmp_path):
    others_folder(tmp_path / "cache", ["something"])
    program = """if True:
        import os, sys
        from pathlib import Path
        from mkernel.net import build
        build.NATIVE = Path(sys.argv[1])
        library = build.build("small.so")
        assert library.exists()
        if os.fork() == 0:
            sys.exit(0)  # a child does not remove what its parent uses
        os.wait()
        assert library.exists()
        print(library)
    """
    native = tmp_path / "native"
    native.mkdir()
    (native / "small.cc").write_text("int answer() { return 42; }\n")
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", program, native], capture_output=True, text=True, timeout=HANG, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert "belongs to" in done.stderr
    library = Path(done.stdout.strip())
    assert library.name.startswith("small.so-")
    assert not library.parent.exists()


@as_root
def test_root_that_a_container_does_not_know(tmp_path, monkeypatch):
    """Its files show the number of unknown users: that will do on the way, but not where anybody could have put it."""
    monkeypatch.setattr(cache, "_roots", lambda: {0, other_users.SOMEBODY})
    home = tmp_path / "of root" / "home"
    home.mkdir(parents=True)
    other_users.give_away(home.parent)
    assert cache.usable_folder(home / "mkernel") == home / "mkernel"
    other_users.give_away(home / "mkernel")
    with pytest.raises(cache.UnsafePath, match="mkernel belongs to"):
        cache.usable_folder(home / "mkernel")
    home.chmod(0o1777)
    with pytest.raises(cache.UnsafePath, match="mkernel belongs to"):
        cache.resolve(home / "mkernel", on_the_way=True)
