"""The program that says what a call costs the host, on the simulator and on processes."""

from support.forked_processes import run_python, run_ranks


def test_threads():
    output = run_python(["-c", PROGRAM + "\nhost_time.main()"])
    assert "1 threads, 8 x 16 x 8, bf16: all_gather_matmul" in output
    assert "torch.mm" in output


PROGRAM = """
import sys
from mkernel.bench import host_time
host_time.M, host_time.N, host_time.K, host_time.CALLS, host_time.WARM_UP = 8, 16, 8, 2, 1
"""


def test_processes():
    (zero, code), (one, other) = run_ranks(PROGRAM + "sys.argv[1:] = []\nhost_time.main()", 2)
    assert (code, other) == (0, 0), zero + one
    assert "2 processes, 8 x 16 x 8, bf16: all_gather_matmul" in zero
    assert "us" not in one
