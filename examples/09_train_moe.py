"""09: train a small mixture-of-experts language model, next to the same model on one device.

    torchrun --nproc-per-node 4 examples/09_train_moe.py    processes, on GPUs or on CPUs: 20 steps
    python examples/09_train_moe.py                         one process: 20 steps
    python examples/09_train_moe.py cpu                     the simulator, 2 nodes x 2 GPUs: 2 steps, since it is slow
    python examples/09_train_moe.py cuda                    4 ranks on the GPUs of this machine: 20 steps

Each rank has some sequences of every batch (data parallelism) and some experts of every layer (expert parallelism).
Everything else is replicated, and the backward pass sums its gradients over the ranks. The router is replicated, too;
it learns through the weights of the experts that it has chosen. mk.moe_ffn sends tokens to their experts and returns
the results. Its backward pass sends gradients to the same ranks, without routing a token again.

For comparison, every rank also trains the plain model, which has the same code but a plain layer of experts. The losses
of both must agree at every step.
"""

import argparse
import os
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

import mkernel as mk
import mkernel.nn

VOCABULARY, HIDDEN, INNER, HEADS, LAYERS = 64, 32, 48, 4, 2
EXPERTS, TOP_K = 8, 2  # of a layer, of a token
BATCH, LENGTH = 4, 16  # sequences of all ranks, and tokens of each
STEPS, SIMULATED_STEPS, LEARNING_RATE = 20, 2, 0.01


# 1. The layer that differs. The plain one has the parameters of mk.nn.ExpertParallelMoE, under the same names.
class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, 2 * INNER, HIDDEN) * HIDDEN**-0.5)
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, HIDDEN, INNER) * INNER**-0.5)

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(x)
        for expert in range(EXPERTS):  # every expert on every token, with weight 0 for those that have not chosen it
            gate, up = (x @ self.gate_up_proj[expert].t()).chunk(2, -1)
            result = (F.silu(gate) * up) @ self.down_proj[expert].t()
            total = total + (weights * (ids == expert)).sum(-1, keepdim=True) * result
        return total


class PlainMoE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = mk.nn.TopKRouter(HIDDEN, EXPERTS, TOP_K), Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        return self.experts(tokens, *self.gate(tokens)).view(x.shape)


# 2. The model. With a group, it has this rank's experts. Activations are [this rank's sequences, LENGTH, hidden].
class Block(nn.Module):
    def __init__(self, group: mk.Group | None):
        super().__init__()
        self.attention_norm, self.moe_norm = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.qkv, self.output = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False), nn.Linear(HIDDEN, HIDDEN, bias=False)
        if group is None:
            self.moe: nn.Module = PlainMoE()
        else:
            tokens = BATCH // group.size * LENGTH  # of each rank; so the ranks need not exchange how many they have
            self.moe = mk.nn.ExpertParallelMoE(HIDDEN, INNER, EXPERTS, TOP_K, group=group, max_tokens=tokens)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(self.attention_norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.output(heads.transpose(1, 2).flatten(2))
        return x + self.moe(self.moe_norm(x))


class Model(nn.Module):
    def __init__(self, group: mk.Group | None = None):
        super().__init__()
        self.embedding, self.positions = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(LENGTH, HIDDEN)
        self.blocks = nn.ModuleList(Block(group) for _ in range(LAYERS))
        self.norm = nn.RMSNorm(HIDDEN)
        for table in (self.embedding, self.positions):
            nn.init.normal_(table.weight, std=HIDDEN**-0.5)
        if group is not None:
            # What is replicated sees only this rank's tokens: the backward pass must sum its gradients over the ranks.
            # Those of ExpertParallelMoE are complete: experts see the tokens of all ranks, and it sums the router's.
            for module in self.modules():
                if isinstance(module, nn.RMSNorm | nn.Embedding | nn.Linear):
                    mk.nn.sum_gradients(module, group=group)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.embedding.weight)  # the output head is tied to the embedding


# 3. Data: sequences that count by 1, 2 or 3.
def batches(steps: int, device: torch.device) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        start = torch.randint(VOCABULARY, (BATCH, 1), generator=generator)
        stride = torch.randint(1, 4, (BATCH, 1), generator=generator)
        tokens = ((start + stride * torch.arange(LENGTH + 1)) % VOCABULARY).to(device)
        yield tokens[:, :-1], tokens[:, 1:]


# 4. A step. The loss is the mean over all tokens of all ranks; each rank has the part of it that its tokens contribute.
def loss_of(model: Model, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    logits = model(tokens)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / (BATCH * LENGTH)


def initial_values() -> dict[str, torch.Tensor]:
    """Drawn once in a process: ranks that are threads share torch's generator, and would disturb each other."""
    torch.manual_seed(0)
    return Model().state_dict()


def on_rank(group: mk.Group, values: dict[str, torch.Tensor], steps: int) -> str:
    assert BATCH % group.size == 0, f"{BATCH} sequences cannot be divided among {group.size} ranks"
    plain, parallel = Model().to(group.device), Model(group).to(group.device)
    plain.load_state_dict(values)
    parallel.load_state_dict(values)  # a rank takes its experts of each layer
    optimizers = [torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE) for model in (plain, parallel)]
    losses = []
    for tokens, targets in batches(steps, group.device):
        expected = loss_of(plain, tokens, targets)
        expected.backward()

        part = (each.chunk(group.size)[group.rank] for each in (tokens, targets))  # this rank's sequences
        loss = loss_of(parallel, *part)
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
    assert difference <= 1e-5, f"losses {whole.tolist()}, of the plain model {expected.tolist()}"
    return f"{group}: loss {whole[0]:.4f} -> {whole[-1]:.4f} in {steps} steps, relative difference {difference:.1e}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("device", nargs="?", choices=("cpu", "cuda"), help="ranks in this process: mk.spawn's device")
    parser.add_argument("--nodes", type=int)
    parser.add_argument("--gpus-per-node", type=int)
    parser.add_argument("--steps", type=int)
    given = parser.parse_args()
    if given.device is not None:
        nodes, gpus_per_node = (2, 2) if given.device == "cpu" else (1, 4)
        steps = given.steps or (SIMULATED_STEPS if given.device == "cpu" else STEPS)
        results = mk.spawn(
            on_rank, initial_values(), steps, nodes=given.nodes or nodes,
            gpus_per_node=given.gpus_per_node or gpus_per_node, device=given.device,
        )  # fmt: skip
        print("\n".join(results))
    else:
        group = mk.init(gpus_per_node=given.gpus_per_node)
        print(on_rank(group, initial_values(), given.steps or STEPS), flush=True)
        group.close()
        if "RANK" in os.environ:
            torch.distributed.destroy_process_group()
