"""torch.ops.mkernel: opcheck, tensors without values, and exported programs. On one rank, and on two, which are
processes: PyTorch traces only one thread of a process at a time."""

from support.forked_processes import run_ranks

PROGRAM = """
    from support import registered_checks
    from support.patience import WAIT
    import mkernel as mk

    group = mk.init(timeout=WAIT)
    registered_checks.run(group)
    print("right on rank", group.rank)
    group.close()
"""


def test_two_ranks():
    for rank, (output, code) in enumerate(run_ranks(PROGRAM, 2, store="apart")):
        assert code == 0, output
        assert f"right on rank {rank}" in output, output
