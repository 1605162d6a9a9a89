"""Where this package keeps files of its own: what was compiled, what was tuned.

A library in the cache is code that this user runs, so nobody else may be able to put one there. As ssh does for its
keys, `resolve` checks every component of a path, from the root directory down: it must belong to this user or to root,
and nobody else may be able to write to it. On the way a directory with the sticky bit, such as /tmp, may be
writable, because others cannot rename or remove in it what is not theirs; symbolic links are followed if
they belong to this user or to root. Each component is checked in a directory that was checked before. So nobody else
can change what a checked path leads to, and it stays what it was between its check and its use.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import os
import pwd
import shlex
import shutil
import stat
import tempfile
from collections.abc import Set
from pathlib import Path

from mkernel.runtime.errors import MKernelError
from mkernel.runtime.printable import printable

MOST_LINKS = 40  # on a path, as in Linux
TEMPORARY = ("/tmp", "/var/tmp", "/dev/shm")


class UnsafePath(MKernelError):
    """Another user could change what is at a path; says what is wrong, and what would repair it."""


def folder() -> Path:
    """mkernel/ in $XDG_CACHE_HOME, if that is an absolute path, else in ~/.cache. It may not be there yet."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    try:
        # an empty or a relative path means nothing there
        return (Path(given) if os.path.isabs(given) else Path.home() / ".cache") / "mkernel"
    except RuntimeError as problem:
        raise MKernelError(
            "this user has no home folder: set XDG_CACHE_HOME to a directory that can be written"
        ) from problem


def resolve(path: Path, *, make: bool = False, on_the_way: bool = False) -> Path:
    """The path without symbolic links, if nobody but this user and root can change what it leads to.

    Args:
        make: make directories that are missing, for this user alone.
        on_the_way: the path is on the way to what will be used, so it may be a directory like /tmp, too.

    Raises:
        UnsafePath: somebody else could.
        OSError: it is not there, or cannot be reached.
    """
    left = list(path.absolute().parts[::-1])
    here, links = "", 0
    while left:
        name = left.pop()
        if name == "/":
            here, step = "", "/"
        elif name == "..":
            here = os.path.dirname(here)
            continue
        else:
            step = f"{here}/{name}"
        anybodys = here != "" and bool(os.lstat(here).st_mode & 0o022)  # anybody could have put the next one there
        if make and not os.path.lexists(step):
            with contextlib.suppress(FileExistsError):  # another process was first; the check sees whose it is
                os.mkdir(step, 0o700)
        info = os.lstat(step)
        _check(step, info, {0} if anybodys else _roots(), sticky=True)
        if not stat.S_ISLNK(info.st_mode):
            here = step.rstrip("/")
            continue
        links += 1
        if links > MOST_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
        left += Path(os.readlink(step)).parts[::-1]
    if not on_the_way:
        _check(here or "/", os.lstat(here or "/"), {0}, sticky=False)
    return Path(here or "/")


def usable_folder(path: Path) -> Path:
    """The folder that is at this path, made if it is missing; others cannot write to it, see `resolve`."""
    made = resolve(path, make=True)
    if not made.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
    return made


def open_file(path: Path, flags: int = os.O_RDONLY) -> int:
    """A descriptor of a file in a folder that was checked. The path must be no link, and what was opened must be a
    regular file that only this user and root can write to. With O_CREAT it is made for this user alone."""
    try:
        handle = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except OSError as problem:
        if problem.errno == errno.ELOOP:
            raise UnsafePath(_words(path, "is a symbolic link", "Remove it")) from problem
        if problem.errno == errno.EISDIR:
            raise UnsafePath(_words(path, "is not a regular file", "Remove it")) from problem
        if problem.errno in (errno.EACCES, errno.EPERM):
            _check(path, os.lstat(path), {0}, sticky=False)  # if it is another user's, that says more
        raise
    try:
        info = os.fstat(handle)
        _check(path, info, {0}, sticky=False)
        if not stat.S_ISREG(info.st_mode):
            raise UnsafePath(_words(path, "is not a regular file", "Remove it"))
    except BaseException:
        os.close(handle)
        raise
    return handle


def private_folder() -> Path:
    """A folder of this process alone, which goes when the process ends: for what cannot be kept in the cache."""
    return _private_of(os.getpid())


@functools.cache
def _private_of(process: int) -> Path:
    problems = []
    for place in dict.fromkeys((tempfile.gettempdir(), *TEMPORARY)):
        try:
            made = tempfile.mkdtemp(prefix="mkernel-", dir=resolve(Path(place), on_the_way=True))
        except (OSError, UnsafePath) as problem:
            problems.append(str(problem))
        else:
            atexit.register(_remove, process, made)
            return Path(made)
    raise MKernelError(
        f"there is no folder for temporary files that only this user can change: {'; '.join(problems)}. "
        f"Set TMPDIR to one"
    )


def _remove(process: int, made: str) -> None:
    if os.getpid() == process:  # and not a child of it
        shutil.rmtree(made, ignore_errors=True)


def _check(path: str | Path, info: os.stat_result, roots: Set[int], *, sticky: bool) -> None:
    """Refuse what another user could change."""
    if info.st_uid != os.geteuid() and info.st_uid not in roots:
        wrong = f"belongs to {_user(info.st_uid)}, and only what belongs to you or root is safe"
        raise UnsafePath(_words(path, wrong, "Remove it, or have its owner or root remove it"))
    mode = stat.S_IMODE(info.st_mode)
    shared = sticky and stat.S_ISDIR(info.st_mode) and mode & stat.S_ISVTX
    if mode & 0o022 and not shared and not stat.S_ISLNK(info.st_mode):  # the mode of a link means nothing
        command = f"`chmod go-w {shlex.quote(str(path))}`"
        repair = f"Run {command}"
        if not stat.S_ISDIR(info.st_mode):
            repair = f"Remove it, or run {command} if you know that its contents are yours"
        raise UnsafePath(_words(path, f"has mode {mode:04o}, so other users can write to it", repair))


def _words(path: str | Path, wrong: str, repair: str) -> str:
    return printable(f"{path} {wrong}. {repair}")


def _user(number: int) -> str:
    try:
        return f"user {pwd.getpwuid(number).pw_name}"
    except KeyError:
        return f"user {number}"


@functools.cache
def _roots() -> Set[int]:
    """The users that root's files belong to. In a user namespace that maps only some users (as in containers that are
    run without root) root's files show the number that stands for all the others."""
    with contextlib.suppress(OSError, ValueError):
        if Path("/proc/self/uid_map").read_text().split() != ["0", "0", "4294967295"]:
            return {0, int(Path("/proc/sys/fs/overflowuid").read_text())}
    return {0}
