"""torch.compile of programs on several ranks, which are processes."""

import pytest
from support.forked_processes import run_ranks

PROGRAM = """
    from support import compiled_checks
    from support.patience import WAIT
    import mkernel as mk

    group = mk.init(timeout=WAIT)
    compiled_checks.{checks}(group)
    print("right on rank", group.rank)
    group.close()
"""


@pytest.mark.thorough
@pytest.mark.parametrize("checks", ["run", "inductor"])
def test_two_ranks(checks):
    for rank, (output, code) in enumerate(run_ranks(PROGRAM.format(checks=checks), 2, store="apart")):
        assert code == 0, output
        assert f"right on rank {rank}" in output, output
