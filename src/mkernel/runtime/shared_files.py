"""Memory that processes of one machine share: files in memory, which have no name in the file system. Another process
opens one through its owner's /proc entry, so nothing is left behind, however a process ends.

A mapping keeps no file descriptor: Python's mmap keeps one each, and with many groups, or many tensors in symmetric
memory, the usual limit of 1024 was reached. (Python 3.13 has an option against that.)
"""

from __future__ import annotations

import ctypes
import errno
import os
from typing import Any, TypeAlias

import torch

Page: TypeAlias = Any  # an array of c_char, whose slices are bytes; typeshed takes them for lists
_NAME = "mkernel"


def create(purpose: str, nbytes: int) -> int:
    """The file descriptor of a new file of zeroed bytes."""
    handle = -1
    try:
        handle = os.memfd_create(f"{_NAME} {purpose}")
        os.ftruncate(handle, nbytes)
    except OSError as problem:
        if handle >= 0:
            os.close(handle)
        what = f"memory for processes of this machine to share (memfd_create, {nbytes} bytes)"
        raise OSError(problem.errno, f"{what}: {problem.strerror}") from problem
    return handle


def map_bytes(process: int, handle: int, nbytes: int) -> torch.Tensor:
    """The first bytes of a file that `create` has made in a process. They stay mapped as long as their storage lives.
    Raises OSError if that is impossible, or if the numbers lead to something else, as those of another PID namespace
    do."""
    path = f"/proc/{process}/fd/{handle}"
    if not os.readlink(path).startswith(f"/memfd:{_NAME} ") or os.stat(path).st_size < nbytes:
        raise OSError(errno.EBADF, f"{path} is not shared memory of mkernel")  # which torch would enlarge
    try:
        return torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)
    except RuntimeError as problem:
        raise OSError(errno.ENOMEM, f"{path} cannot be mapped: {problem}") from problem


def map_page(process: int, handle: int, nbytes: int) -> Page:
    """`map_bytes`, for use in Python."""
    memory: Any = map_bytes(process, handle, nbytes).numpy()
    return (ctypes.c_char * nbytes).from_buffer(memory)
