"""The kernel that carries out a batch of copies and signals: native/batch.h."""

import random
import re
import struct
import subprocess

import pytest

from mkernel.compiling import PROGRAMS
from mkernel.net.build import NATIVE

from .ptx import Kernel, Run

SOURCE = (NATIVE / "batch.h").read_text()
PTX = re.search(r'R"ptx\((.*?)\)ptx"', SOURCE, re.S).group(1)
THREADS, CHUNK, MOST = (
    int(re.search(rf"{name} = (\d+);", SOURCE).group(1)) for name in ("kThreads", "kChunk", "kMostEntries")
)
BASE, COUNTER, DONE, SIGNALS, DATA = 1 << 33, 0, 8, 64, 1024


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_it_assembles(capability, tmp_path):
    (tmp_path / "batch.ptx").write_text(PTX)
    command = [
        PROGRAMS / "ptxas",
        "-v",
        f"--gpu-name=sm_{capability}",
        tmp_path / "batch.ptx",
        "-o",
        tmp_path / "batch",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    said = done.stdout + done.stderr
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in said
    assert int(re.search(r"Used (\d+) registers", said).group(1)) <= 48  # five CTAs fit on an SM


def carry_out(copies, signals, size, ctas, number=7):
    """Launch it; memory before and after, and what was stored."""
    rng = random.Random(3)
    memory = bytearray(bytes(DATA) + rng.randbytes(size))
    before = bytes(memory)
    entries = [(BASE + DATA + target, BASE + DATA + source, bytes_) for target, source, bytes_ in copies]
    entries += [(BASE + SIGNALS + 8 * word, value, 0) for word, value in signals]
    entries += [(0, 0, 0)] * (MOST - len(entries))
    parameter = struct.pack("<QQQII", BASE + COUNTER, BASE + DONE, number, len(copies), len(signals))
    parameter += b"".join(struct.pack("<QQQ", *entry) for entry in entries)
    run = Run(Kernel(PTX), parameter, memory, BASE, ctas, THREADS)
    return before, bytes(memory), run.stores


def expected(before, copies, signals, number=7):
    after = bytearray(before)
    for target, source, size in copies:
        after[DATA + target : DATA + target + size] = before[DATA + source : DATA + source + size]
    for word, value in signals:
        after[SIGNALS + 8 * word : SIGNALS + 8 * word + 8] = value.to_bytes(8, "little")
    after[DONE : DONE + 8] = number.to_bytes(8, "little")
    return bytes(after)


@pytest.mark.parametrize("ctas", [1, 2, 5])
@pytest.mark.parametrize(
    "copies",
    [
        [(0, 100_000, 1)],
        [(16, 100_000, 16), (1024, 100_016, 4097), (8192, 100_000, 255)],
        [(0, 100_000, CHUNK)],
        [(0, 100_000, 2 * CHUNK + 23), (65536, 200_000, CHUNK - 1)],
        [(3, 100_001, CHUNK + 300), (40_000, 150_008, 2000)],
        [(i * 700, 100_000 + i * 640, 640 - i) for i in range(20)],
    ],
)
@pytest.mark.thorough
def test_it_copies(copies, ctas):
    """Any sizes at any places, not a byte more, shared by any number of CTAs."""
    signals = [(0, 5), (9, 1 << 40)]
    before, after, stores = carry_out(copies, signals, 1 << 18, ctas)
    assert after == expected(before, copies, signals)
    data = [size for address, size, _ in stores if address >= BASE + DATA]
    assert sum(data) == sum(size for *_, size in copies)  # each byte once
    if all(source % 16 == target % 16 == 0 for target, source, _ in copies):
        assert len(data) == sum(size // 16 + size % 16 for *_, size in copies)


@pytest.mark.parametrize("ctas", [1, 3])
def test_data_before_signals_before_the_number(ctas):
    signals = [(word, word + 100) for word in range(MOST - 1)]
    before, after, stores = carry_out([(0, 100_000, 3 * CHUNK)], signals, 1 << 18, ctas)
    assert after == expected(before, [(0, 100_000, 3 * CHUNK)], signals)
    stores = [(address - BASE, release) for address, _, release in stores if address != BASE + COUNTER]
    order = [0 if place >= DATA else 1 if place >= SIGNALS else 2 for place, _ in stores]
    assert order == sorted(order)
    assert [release for place, release in stores if place < DATA] == [True] * MOST
