"""What the built library shows to others: its C interface, and nothing of the C++ library.

Some compilers link the C++ library statically. Its symbols would then be found by what torch has loaded, and
the other way round, above all the unique ones (ids of locales): a number in an error's words has crashed so.
"""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from support.forked_processes import run_python
from support.patience import HANG

from mkernel.net.build import LIBRARY_FLAGS, NATIVE, build, compiler

pytestmark = pytest.mark.skipif(shutil.which("nm") is None, reason="nm (binutils) is not installed")
STREAMS_AND_LOCALES = re.compile(r"stream|std::(locale|ctype|codecvt|num_put|num_get|ios_base|basic_ios)")

PROVOKE = """
import sys
import torch  # and with it its C++ library, before ours
from mkernel.net import library as native

library = native._Library(sys.argv[1])
rank = library.check(library.loopback_create(b"exports", 3, 0, 0.0, -1))
try:
    library.check(library.detach(rank, 77))
except native.TransportError as error:
    print(error)
library.transport_destroy(rank)
"""


def has_static_library() -> bool:
    """Whether the compiler finds the C++ library as an archive; it answers with a path if it does."""
    command = [*compiler(), "-print-file-name=libstdc++.a"]
    return "/" in subprocess.run(command, capture_output=True, text=True, timeout=HANG).stdout


@pytest.fixture(params=["shared", pytest.param("static", marks=pytest.mark.thorough)])
def library(request) -> Path:
    """The library as it is built, and with the C++ library in it."""
    if request.param == "shared":
        return build("net.so")
    if not has_static_library():
        pytest.skip("the compiler has no static C++ library")
    return build("net-static.so", (*LIBRARY_FLAGS, "-O0", "-static-libstdc++"))


def symbols(library: Path, *options: str) -> list[tuple[str, str]]:
    """Kind and name of each, as nm gives them."""
    done = subprocess.run(["nm", *options, library], capture_output=True, text=True, timeout=HANG, check=True)
    return [tuple(line[17:].split(" ", 1)) for line in done.stdout.splitlines()]


def test_only_the_c_interface_is_exported(library):
    interface = set(re.findall(r"MKERNEL_NET_API [^;]*?\b(mkernel_net_\w+)\(", (NATIVE / "mkernel_net.h").read_text()))
    exported = symbols(library, "-D", "--defined-only")
    assert {name for _, name in exported} == interface
    assert {kind for kind, _ in exported} == {"T"}  # functions, none of them weak or unique


def test_no_symbol_is_unique(library):
    assert not [name for kind, name in symbols(library) if kind == "u"]


def test_neither_streams_nor_locales(library):
    """Not of its own, and not those of another."""
    ours = re.compile(r"mkernel::|mkernel_net_")
    found = [name for _, name in symbols(library, "-C") if STREAMS_AND_LOCALES.search(name) and not ours.search(name)]
    assert not found


def test_words_with_numbers_beside_torch(library):
    assert run_python(["-c", PROVOKE, str(library)]) == "rank 3: segment 77 is not attached\n"
