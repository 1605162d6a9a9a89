"""The verbs transport on real RDMA devices: soft-RoCE, in a machine of its own (see machine.py).

The machine boots once and runs everything; each test looks at its own part. All that sends over a
cable that loses, repeats, reorders or cuts must arrive nevertheless, byte by byte, and what cannot arrive must
be told.
"""

import re
import sys
from pathlib import Path

import pytest
from support.patience import HANG

from mkernel.net.build import build

from . import machine

HERE = Path(__file__).parent
NATIVE_STAGES = [
    "refusals", "sizes", "writes", "growth", "loss", "duplication", "reordering", "cut", "silence", "detached"
]  # fmt: skip

STAGE = """
echo "=== {name}"
begun=$(date +%s%N)
timeout {hang} {command}
echo "=== {name} ended with $? after $((($(date +%s%N) - begun) / 1000000)) ms"
for end in v0 v1; do tc qdisc del dev $end root 2>/dev/null; done
"""


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """What each stage printed, and how it ended."""
    reason = machine.why_not()
    if reason is not None:
        pytest.skip(f"there can be no machine with soft-RoCE here: {reason}")
    shared = HERE.parent / "net" / "native"
    program = build("rdmatest", ("-O1", "-g1", "-Werror", f"-I{shared}"), [HERE / "native" / "rdmatest.cc"])
    commands = {name: f"{program} {name}" for name in NATIVE_STAGES}
    ranks = HERE / "ranks.py"
    paths = f"{HERE.parents[1] / 'src'}:{HERE.parent}"
    commands["ranks"] = f"env PYTHONPATH={paths} OMP_NUM_THREADS=1 {sys.executable} {ranks}"
    script = "".join(STAGE.format(name=name, command=command, hang=HANG) for name, command in commands.items())
    result = machine.run(script, tmp_path_factory.mktemp("machine"), 3 * HANG)
    found = {}
    for name in commands:
        pattern = rf"^=== {name}\n(.*?)^=== {name} ended with (\d+) after (\d+) ms"
        match = re.search(pattern, result.output, re.DOTALL | re.MULTILINE)
        if match is None:
            found[name] = (None, f"it did not end within {result.seconds:.0f} s\n{result.output[-3000:]}"
                           f"\nconsole:\n{result.console[-3000:]}")  # fmt: skip
        else:
            print(f"{name}: {match[3]} ms")
            found[name] = (int(match[2]), match[1])
    print(f"the machine ran for {result.seconds:.0f} s")
    return found


@pytest.mark.parametrize("name", NATIVE_STAGES)
def test_native(parts, name):
    code, output = parts[name]
    assert code == 0, output
    assert f"{name}: well" in output


def test_ranks(parts):
    """Two processes, mk.init() and an operator: see ranks.py."""
    code, output = parts["ranks"]
    assert code == 0, output
    assert output.count("right over verbs") == 2, output
    assert "calibrated over verbs" in output
