"""Files in memory that processes share."""

import os
from pathlib import Path

import pytest
import torch

from mkernel.runtime import shared_files


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def mappings():
    return Path("/proc/self/maps").read_text().count("mkernel test")


def test_mappings_share_bytes_and_keep_no_file_descriptor():
    handle = shared_files.create("test", 100)
    before = descriptors()
    memory = shared_files.map_bytes(os.getpid(), handle, 100)
    page = shared_files.map_page(os.getpid(), handle, 100)
    assert descriptors() == before
    memory[3] = 7
    page[4:6] = b"ab"
    os.close(handle)
    assert page[3:6] == b"\x07ab"
    assert torch.equal(memory[3:6], torch.tensor([7, 97, 98], dtype=torch.uint8))
    assert mappings() == 2
    del memory, page
    assert mappings() == 0


def test_what_is_no_shared_memory_is_refused_and_stays_as_it_is(tmp_path):
    """The numbers of a process in another PID namespace may lead to anything."""
    file = tmp_path / "file"
    file.write_bytes(b"abc")
    with file.open("r+b") as opened, pytest.raises(OSError, match="not shared memory of mkernel"):
        shared_files.map_bytes(os.getpid(), opened.fileno(), 100)
    assert file.read_bytes() == b"abc"
    handle = shared_files.create("test", 10)
    with pytest.raises(OSError, match="not shared memory of mkernel"):
        shared_files.map_bytes(os.getpid(), handle, 11)
    os.close(handle)
    with pytest.raises(OSError, match="No such file"):
        shared_files.map_bytes(os.getpid(), handle, 10)
