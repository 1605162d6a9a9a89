"""A tensor-parallel layer in CUDA graphs, which need a GPU. Ranks are threads of this process, or processes:

    python examples/08_cuda_graphs.py
    torchrun --nproc-per-node 2 examples/08_cuda_graphs.py

A replay launches all kernels of a layer at once, so the host no longer matters for small shapes. Here two graphs, for
two numbers of tokens, are replayed alternately with new inputs, and eager calls are made in between.
"""

import os
import sys

import torch

import mkernel as mk

HIDDEN, INTER = 512, 1024


class Layer:
    """This rank's columns of the first weight and rows of the second one, [out, in] as in nn.Linear."""

    def __init__(self, group: mk.Group):
        generator = torch.Generator(group.device).manual_seed(group.rank)
        size = INTER // group.size
        self.up = torch.randn(size, HIDDEN, device=group.device, generator=generator).bfloat16() / HIDDEN**0.5
        self.down = torch.randn(HIDDEN, size, device=group.device, generator=generator).bfloat16() / INTER**0.5

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(mk.all_gather_matmul(x, self.up.t()))
        return mk.matmul_reduce_scatter(h, self.down.t())


def run(group: mk.Group) -> None:
    layer = Layer(group)
    inputs, results, graphs = {}, {}, {}
    with torch.no_grad():
        for tokens in (4, 256):
            x = torch.zeros(tokens, HIDDEN, device=group.device, dtype=torch.bfloat16)
            layer(x)  # compiles and loads
            graph = torch.cuda.CUDAGraph()
            with group.capture(graph):  # all ranks together
                y = layer(x)
            inputs[tokens], results[tokens], graphs[tokens] = x, y, graph

        for step in range(4):
            for tokens, graph in graphs.items():
                new = torch.randn(tokens, HIDDEN, device=group.device).bfloat16()
                inputs[tokens].copy_(new)  # a graph reads its inputs from where they were when it was captured
                group.synchronize()
                group.barrier()  # for ranks that are threads: none may still have to load anything
                graph.replay()
                group.synchronize()  # raises if a rank has not replayed its graph
                again = layer(new)
                group.synchronize()
                assert torch.equal(results[tokens], again), f"rank {group.rank}, step {step}, {tokens} tokens"
    print(f"{group}: 8 replays of {len(graphs)} graphs computed what eager calls compute", flush=True)


def main() -> None:
    if not torch.cuda.is_available():
        print("CUDA graphs need a GPU, and torch sees none", file=sys.stderr)
        sys.exit(2)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:  # torchrun sets it
        group = mk.init(timeout=60.0)
        run(group)
        group.close()
        torch.distributed.destroy_process_group()
    else:
        mk.spawn(run, gpus_per_node=2, device="cuda")


if __name__ == "__main__":
    main()
