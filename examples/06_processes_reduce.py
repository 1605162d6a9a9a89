"""matmul_reduce_scatter and matmul_all_reduce in several processes:

    torchrun --nproc-per-node 4 examples/06_processes_reduce.py

Here every two consecutive ranks form a node, so that a single machine uses both paths: shared memory within
a "node" and the network (TCP) between "nodes". On a real cluster omit gpus_per_node: the ranks of a machine
then form a node.
"""

import os
import sys

import torch

import mkernel as mk


def main() -> None:
    if int(os.environ.get("WORLD_SIZE", "1")) % 2:  # torchrun sets it
        print(f"this needs 2, 4, ... processes: torchrun --nproc-per-node 4 {sys.argv[0]}", file=sys.stderr)
        sys.exit(2)
    group = mk.init(gpus_per_node=2, timeout=120.0)
    torch.manual_seed(group.rank)
    m, n, k = 96, 48, 64
    a = torch.randn(m, k, device=group.device).bfloat16()  # this rank's slice of the activations
    w = torch.randn(n, k, device=group.device).bfloat16()  # and of the weight, [out, in] as in nn.Linear

    mine = mk.matmul_reduce_scatter(a, w.t())  # this rank's rows of the sum
    everything = mk.matmul_all_reduce(a, w.t())  # all rows, on every rank

    # the reference: multiply, then all-reduce
    exact = a.double() @ w.double().t()
    size = exact.abs()
    for tensor in (exact, size):
        torch.distributed.all_reduce(tensor)
    bound = (2 * size + exact.abs()) * torch.finfo(a.dtype).eps / 2 * 1.01 + 1e-4
    rows = slice(group.rank * m // group.size, (group.rank + 1) * m // group.size)
    for y, part in ((mine, rows), (everything, slice(None))):
        error = (y.double() - exact[part]).abs()
        assert bool((error <= bound[part]).all()), f"rank {group.rank}: {(error - bound[part]).max()} over the bound"
    print(f"{group}: {tuple(mine.shape)} and {tuple(everything.shape)}, largest error {error.max():.3f}", flush=True)
    group.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
