"""07: train a small Llama with tensor and sequence parallelism, next to the same model on one device.

    torchrun --nproc-per-node 4 examples/07_train_llama.py    processes, on GPUs or on CPUs: 20 steps
    python examples/07_train_llama.py                         one process: 20 steps
    python examples/07_train_llama.py cpu                     the simulator, 2 nodes x 2 GPUs: 2 steps, since it is slow
    python examples/07_train_llama.py cuda                    4 ranks on the GPUs of this machine: 20 steps

With --bf16, in bf16; with --fp8 RowWise, the linear layers and the gradients of their inputs in fp8.

Each rank holds a part of every sequence (sequence parallelism), and a slice of every linear layer (tensor
parallelism): some heads of attention, some inner features of the MLP. Four operators a layer communicate, each in
the kernel that also multiplies:

    norm -> q, k, v: all_gather_matmul -> attention, local -> output: matmul_reduce_scatter
    norm -> gate, up: all_gather_matmul -> SwiGLU, local   -> down:   matmul_reduce_scatter

For comparison, every rank also trains the plain model, which has the same code but plain layers. The losses of both
must agree at every step.
"""

import argparse
import os
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

import mkernel as mk
import mkernel.nn

VOCABULARY, HIDDEN, INNER, LAYERS = 64, 64, 128, 2
HEADS, KV_HEADS = 8, 4  # grouped-query attention: two heads share the keys of one; both are divided among the ranks
BATCH, LENGTH = 2, 32  # sequences, and tokens of each
STEPS, SIMULATED_STEPS, LEARNING_RATE = 20, 2, 0.003


# 1. The layers that differ. Plain ones for one device: the names of their parameters are those of the parallel ones.
class QKV(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.k_proj = nn.Linear(HIDDEN, HIDDEN * KV_HEADS // HEADS, bias=False)
        self.v_proj = nn.Linear(HIDDEN, HIDDEN * KV_HEADS // HEADS, bias=False)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [layer(x).unflatten(-1, (-1, HIDDEN // HEADS)) for layer in (self.q_proj, self.k_proj, self.v_proj)]


class SwiGLU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, INNER, bias=False)
        self.up_proj = nn.Linear(HIDDEN, INNER, bias=False)
        self.down_proj = nn.Linear(INNER, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


# 2. The model. With a group, it is this rank's shard; activations are [batch, this rank's tokens, hidden].
class Block(nn.Module):
    def __init__(self, group: mk.Group | None, fp8: str | None):
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        if group is None:
            self.qkv, self.output, self.mlp = QKV(), nn.Linear(HIDDEN, HIDDEN, bias=False), SwiGLU()
        else:
            shared = dict(group=group, sequence_dim=1)
            if fp8 is not None:  # what shares a scale; gradients are quantized, too
                shared |= dict(fp8=fp8, fp8_gradients=torch.float8_e5m2)
            self.qkv = mk.nn.ParallelQKV(HIDDEN, HEADS, KV_HEADS, **shared)
            self.output = mk.nn.RowParallelLinear(HIDDEN, HIDDEN, bias=False, **shared)
            self.mlp = mk.nn.ParallelSwiGLU(HIDDEN, INNER, **shared)

    def forward(self, x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        query, key, value = self.qkv(self.attention_norm(x))  # the whole sequence, and this rank's heads of it
        query, key = rotate(query, *rotation), rotate(key, *rotation)
        heads = F.scaled_dot_product_attention(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), is_causal=True, enable_gqa=True
        )
        x = x + self.output(heads.transpose(1, 2).flatten(2))
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    def __init__(self, group: mk.Group | None = None, fp8: str | None = None):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        nn.init.normal_(self.embedding.weight, std=HIDDEN**-0.5)
        self.blocks = nn.ModuleList(Block(group, fp8) for _ in range(LAYERS))
        self.norm = nn.RMSNorm(HIDDEN)
        if group is not None:
            # Norms and the embedding are replicated, and see only this rank's tokens: the backward pass must sum their
            # gradients over the ranks. Those of the parallel layers are complete.
            for module in self.modules():
                if isinstance(module, nn.RMSNorm | nn.Embedding):
                    mk.nn.sum_gradients(module, group=group)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        rotation = rotary(tokens.device)
        for block in self.blocks:
            x = block(x, rotation)
        return F.linear(self.norm(x), self.embedding.weight)  # the output head is tied to the embedding


def rotary(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of the angle of each position and pair of features: [LENGTH, 1, head_dim/2]."""
    dim = HIDDEN // HEADS
    frequencies = 10000.0 ** (-torch.arange(0, dim, 2, device=device) / dim)
    angles = torch.outer(torch.arange(LENGTH, device=device), frequencies)[:, None]
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Rotate pairs of features by the angle of their position. x: [batch, LENGTH, heads, head_dim]."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cosine - b * sine, b * cosine + a * sine), -1).to(x.dtype)


# 3. Data: sequences that count by 1, 2 or 3.
def batches(steps: int, device: torch.device) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        start = torch.randint(VOCABULARY, (BATCH, 1), generator=generator)
        stride = torch.randint(1, 4, (BATCH, 1), generator=generator)
        tokens = ((start + stride * torch.arange(LENGTH + 1)) % VOCABULARY).to(device)
        yield tokens[:, :-1], tokens[:, 1:]


# 4. A step. The loss is the mean over all tokens of all ranks; each rank has the part of it that its tokens contribute.
def loss_of(model: Llama, tokens: torch.Tensor, targets: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    with torch.autocast(tokens.device.type, dtype, enabled=dtype != torch.float32):
        logits = model(tokens)
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum") / (BATCH * LENGTH)


def initial_values() -> dict[str, torch.Tensor]:
    """Drawn once in a process: ranks that are threads share torch's generator, and would disturb each other."""
    torch.manual_seed(0)
    return Llama().state_dict()


def on_rank(group: mk.Group, values: dict[str, torch.Tensor], steps: int, dtype: torch.dtype, fp8: str | None) -> str:
    plain, parallel = Llama().to(group.device), Llama(group, fp8).to(group.device)
    plain.load_state_dict(values)
    parallel.load_state_dict(values)  # a rank takes its shard of each linear layer
    optimizers = [torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE) for model in (plain, parallel)]
    losses = []
    for tokens, targets in batches(steps, group.device):
        expected = loss_of(plain, tokens, targets, dtype)
        expected.backward()

        part = (each.chunk(group.size, 1)[group.rank] for each in (tokens, targets))  # this rank's part of the sequence
        loss = loss_of(parallel, *part, dtype)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append((loss.detach(), expected.detach()))

    # 5. The check.
    group.synchronize()
    mine, expected = torch.tensor(losses, dtype=torch.float64).T
    whole = sum(group.exchange("losses", mine))  # the loss is the sum of what the ranks contribute
    difference = ((whole - expected).abs() / expected).max().item()
    tolerance = 3e-2 if fp8 is not None else 1e-6 if dtype == torch.float32 else 1e-2
    assert difference <= tolerance, f"losses {whole.tolist()}, of the plain model {expected.tolist()}"
    return f"{group}: loss {whole[0]:.4f} -> {whole[-1]:.4f} in {steps} steps, relative difference {difference:.1e}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("device", nargs="?", choices=("cpu", "cuda"), help="ranks in this process: mk.spawn's device")
    parser.add_argument("--nodes", type=int)
    parser.add_argument("--gpus-per-node", type=int)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--bf16", action="store_true", help="compute in bf16, with parameters in fp32")
    parser.add_argument(
        "--fp8", choices=("TensorWise", "RowWise", "BlockWise"), help="multiply in fp8: what shares a scale"
    )
    given = parser.parse_args()
    dtype = torch.bfloat16 if given.bf16 else torch.float32
    if given.device is not None:
        nodes, gpus_per_node = (2, 2) if given.device == "cpu" else (1, 4)
        steps = given.steps or (SIMULATED_STEPS if given.device == "cpu" else STEPS)
        results = mk.spawn(
            on_rank, initial_values(), steps, dtype, given.fp8, nodes=given.nodes or nodes,
            gpus_per_node=given.gpus_per_node or gpus_per_node, device=given.device,
        )  # fmt: skip
        print("\n".join(results))
    else:
        group = mk.init(gpus_per_node=given.gpus_per_node)
        print(on_rank(group, initial_values(), given.steps or STEPS, dtype, given.fp8), flush=True)
        group.close()
        if "RANK" in os.environ:
            torch.distributed.destroy_process_group()
