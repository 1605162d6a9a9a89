"""all_gather_matmul in several processes:

    torchrun --nproc-per-node 4 examples/all_gather_matmul.py

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
    group = mk.init(gpus_per_node=2)
    torch.manual_seed(group.rank)
    m, n, k = 96, 48, 64
    a = torch.randn(m, k, device=group.device).bfloat16()  # this rank's rows
    w = torch.randn(n, k, device=group.device).bfloat16()  # this rank's weights, [out, in] as in nn.Linear

    y = mk.all_gather_matmul(a, w.t())

    # the reference: all-gather, then multiply
    parts = [torch.empty_like(a, device="cpu") for _ in range(group.size)]
    torch.distributed.all_gather(parts, a.cpu())  # gloo gathers on the CPU
    exact = torch.cat(parts).to(group.device).double() @ w.double().t()
    error = (y.double() - exact).abs().max().item()
    bound = 4 * k**0.5 * torch.finfo(a.dtype).eps
    assert error <= bound, f"rank {group.rank}: error {error}, bound {bound}"
    print(f"{group}: {tuple(y.shape)}, largest error {error:.3f}, bound {bound:.3f}", flush=True)
    group.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
