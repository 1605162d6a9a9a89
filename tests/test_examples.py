"""Every example runs in the simulator, and says what it should."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("[0-9]*.py"))
SAYS = {
    "01_all_gather_matmul": [
        *(f"Group(rank {rank} of 4, node {rank // 2} of 2 x 2, cpu): (256, 96), largest error" for rank in range(4)),
        "the network reads it where it is",  # the plan for rows in the symmetric heap
    ],
    "02_matmul_reduce_scatter": [
        *(f"Group(rank {rank} of 4, node {rank // 2} of 2 x 2, cpu): (32, 96) and (128, 96)" for rank in range(4)),
        "parts travel as bfloat16",
    ],
    "03_ring_attention": [
        *(
            f"Group(rank {rank} of 4, node {rank // 2} of 2 x 2, cpu): (1, 4, 64, 64), largest error"
            for rank in range(4)
        ),
        "ring_attention: triton kernel",
        "the whole sequence again: (1, 4, 256, 64)",
    ],
    "04_moe": [
        *(f"Group(rank {rank} of 4, node {rank // 2} of 2 x 2, cpu): " for rank in range(4)),
        "which has room for 1",
        "room for 72 rows of 2 experts",
    ],
}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(path):
    result = subprocess.run(
        [sys.executable, str(path), "cpu"], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    for expected in SAYS[path.stem]:
        assert expected in result.stdout


def test_every_example_that_is_expected_is_there():
    assert {path.stem for path in EXAMPLES} == set(SAYS)
