"""05: a tensor-parallel MLP made of two operators, compared with the same MLP on one device.

    python examples/05_tensor_parallel_mlp.py          a GPU if there is one, else the simulator
    python examples/05_tensor_parallel_mlp.py cpu      the simulator: 2 nodes x 2 GPUs
    python examples/05_tensor_parallel_mlp.py cuda     4 ranks on the GPUs of this machine

Each rank holds some rows of the activations (sequence parallelism) and a slice of both weights (tensor
parallelism). The first layer needs the rows of all ranks: all_gather_matmul. The second produces a partial sum
on every rank: matmul_reduce_scatter adds them and leaves each rank its rows. Nothing is communicated in
between. This takes two calls instead of four, two of which would leave the tensor cores idle.
"""

import sys

import torch

import mkernel as mk

ROWS, HIDDEN, INNER = 32, 64, 128  # rows per rank; columns of the activations; columns of the inner layer


# 1. The whole layer. Every rank can recreate it, to check the results.
def layer(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    up = torch.randn(INNER, HIDDEN, generator=generator) * HIDDEN**-0.5
    down = torch.randn(HIDDEN, INNER, generator=generator) * INNER**-0.5
    return up.to(device, torch.bfloat16), down.to(device, torch.bfloat16)


def rows_of(rank: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(ROWS, HIDDEN, generator=generator).to(device, torch.bfloat16)


def on_rank(group: mk.Group) -> str:
    # 2. This rank's slice of the inner columns.
    up, down = layer(group.device)
    mine = slice(group.rank * INNER // group.size, (group.rank + 1) * INNER // group.size)
    up_slice, down_slice = up[mine], down[:, mine]
    x = rows_of(group.rank, group.device)

    # 3. The layer. Weights are [out, in], as in nn.Linear; the views .t() are read without a copy.
    inner = torch.relu(mk.all_gather_matmul(x, up_slice.t()))
    y = mk.matmul_reduce_scatter(inner, down_slice.t())
    group.synchronize()

    # 4. The same on one device, in float64. Rounded to bf16 along the way: the inner activations, each rank's
    #    partial sums, and the result.
    exact = torch.relu(x.double() @ up.double().t()) @ down.double().t()
    error = (y.double() - exact).abs().max().item()
    bound = 8 * torch.finfo(torch.bfloat16).eps
    assert error <= bound, f"rank {group.rank}: error {error} is over {bound}"
    return f"{group}: {tuple(y.shape)}, largest error {error:.4f}, bound {bound:.4f}"


if __name__ == "__main__":
    device = sys.argv[1] if len(sys.argv) > 1 else ("cuda" if torch.cuda.is_available() else "cpu")
    nodes, gpus_per_node = (2, 2) if device == "cpu" else (1, 4)
    print("\n".join(mk.spawn(on_rank, nodes=nodes, gpus_per_node=gpus_per_node, device=device)))
