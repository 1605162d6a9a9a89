"""Blocks, attention and mixture of experts in the simulator, beside plain modules in float64."""

import copy
import functools
import io

import pytest
import torch
import torch.nn.functional as F
from support.nn_reference import BLOCKS, WORLDS, Block, assert_near, values

import mkernel as mk
from mkernel import nn

SEQUENCE, HIDDEN, INNER = 12, 24, 36


def part(group, whole, dim, sequence_parallel=True):
    return whole.chunk(group.size, dim)[group.rank] if sequence_parallel else whole


def spawn(function, nodes=1, gpus_per_node=2):
    return mk.spawn(function, nodes=nodes, gpus_per_node=gpus_per_node, device="cpu")


@pytest.mark.parametrize(("nodes", "gpus"), WORLDS)
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_gradients(nodes, gpus, block):
    mk.spawn(block.check, True, nodes=nodes, gpus_per_node=gpus, device="cpu")


def test_pairs_of_ranks_have_the_same_keys():
    """Also with autocast and in fp8, and of copies and files, whose reader may be another process."""

    def on_rank(group):
        Block("qkv", kv_heads=2).check(group, True)
        module = nn.ParallelQKV(24, 12, 2, head_dim=4)
        assert f"shard {group.rank // 2} of 2, sequence_parallel=True, sequence_dim=0, on 2 ranks" in repr(module)
        file = io.BytesIO()
        torch.save(module, file)
        file.seek(0)
        loaded, elsewhere = torch.load(file, weights_only=False), copy.deepcopy(module)
        for layer in (elsewhere.k_proj, elsewhere.v_proj):
            layer._replicas = copy.copy(layer._replicas)
            layer._replicas._group = None
        gradients = []
        for each in (module, copy.deepcopy(module), loaded, elsewhere):
            x = values(6, 24, seed=group.rank)
            sum(y.sum() * (group.rank + 1) for y in each(x)).backward()
            gradients.append(each.k_proj.weight.grad)
        assert all(torch.equal(gradient, gradients[0]) for gradient in gradients)
        ranks = group.exchange("gradients", gradients[0])
        assert torch.equal(ranks[0], ranks[1])
        assert torch.equal(ranks[2], ranks[3])
        assert_near(ranks[0], (1 + 2) * torch.cat(group.exchange("x", x)).double().sum(0).expand(4, 24))
        with torch.autocast("cpu", torch.bfloat16):
            assert module(x)[1].dtype == torch.bfloat16
        in_fp8 = nn.ParallelQKV(32, 8, 2, head_dim=16, fp8="RowWise")
        sum(y.sum() for y in in_fp8(values(6, 32, seed=group.rank))).backward()
        ranks = group.exchange("gradients", in_fp8.v_proj.weight.grad)
        assert torch.equal(ranks[0], ranks[1])
        assert torch.equal(ranks[2], ranks[3])

    spawn(on_rank, 2, 2)


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_residual_of_a_swiglu(sequence_parallel):
    def on_rank(group):
        module = nn.ParallelSwiGLU(HIDDEN, INNER, sequence_parallel=sequence_parallel)
        x, residual = values(SEQUENCE, HIDDEN, seed=1), values(SEQUENCE // group.size, HIDDEN, seed=2 + group.rank)
        if not sequence_parallel:
            residual = values(SEQUENCE, HIDDEN, seed=2)
        mine = part(group, x, 0, sequence_parallel)
        with torch.no_grad():
            assert_near(module(mine, residual), module(mine).double() + residual)

    spawn(on_rank)


@pytest.mark.parametrize(("nodes", "gpus"), WORLDS)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("input_layout", ["bshd", "bhsd"])
def test_attention(nodes, gpus, layout, input_layout):
    length, heads, kv_heads, dim = 24, 4, 2, 64
    query = values(2, heads, length, dim, seed=1)
    key, value = values(2, kv_heads, length, dim, seed=2), values(2, kv_heads, length, dim, seed=3)
    exact = F.scaled_dot_product_attention(
        query.double(), key.double(), value.double(), is_causal=True, enable_gqa=True, scale=0.2
    )

    def on_rank(group):
        def mine(whole):
            local = mk.to_zigzag(whole) if layout == "zigzag" else part(group, whole, 2)
            return local.transpose(1, 2) if input_layout == "bshd" else local

        module = nn.ContextParallelAttention(is_causal=True, scale=0.2, layout=layout, input_layout=input_layout)
        assert not list(module.parameters())
        assert_near(module(mine(query), mine(key), mine(value)), mine(exact))

    spawn(on_rank, nodes, gpus)


def test_attention_of_packed_documents():
    x = values(1, 2, 16, 64, seed=1)
    exact = torch.cat([F.scaled_dot_product_attention(each, each, each) for each in x.double().split([5, 11], 2)], 2)

    def on_rank(group):
        module = nn.ContextParallelAttention(input_layout="bhsd")
        mine = part(group, x, 2)
        assert_near(module(mine, mine, mine, cu_seqlens=[0, 5, 16]), part(group, exact, 2))

    spawn(on_rank)


def test_attention_with_capped_scores():
    query, key, value = (3 * values(1, 2, 16, 64, seed=seed) for seed in range(3))
    scores = 2.0 * torch.tanh(query.double() @ key.double().mT * 64**-0.5 / 2.0)
    exact = scores.softmax(-1) @ value.double()

    def on_rank(group):
        module = nn.ContextParallelAttention(softcap=2.0, input_layout="bhsd")
        assert "softcap=2.0" in repr(module)
        mine = [part(group, x, 2) for x in (query, key, value)]
        assert_near(module(*mine), part(group, exact, 2))
        with pytest.raises(mk.ArgumentError, match="softcap must be 0, which is off, or a number from"):
            nn.ContextParallelAttention(softcap=-1.0)

    spawn(on_rank)


class PlainExperts(torch.nn.Module):
    """Each token through each of its experts, one after the other."""

    def forward(self, x, ids, weights, gate_up, down, b_gate_up=None, b_down=None):
        b_gate_up = torch.zeros_like(gate_up[:, :, 0]) if b_gate_up is None else b_gate_up
        b_down = torch.zeros_like(down[:, :, 0]) if b_down is None else b_down
        rows = [torch.zeros_like(token) for token in x]
        for token, slot in torch.cartesian_prod(torch.arange(len(x)), torch.arange(ids.shape[1])).tolist():
            expert = ids[token, slot]
            gate, up = (gate_up[expert] @ x[token] + b_gate_up[expert]).chunk(2)
            result = down[expert] @ (F.silu(gate) * up) + b_down[expert]
            rows[token] = rows[token] + weights[token, slot] * result
        return torch.stack(rows)


@pytest.mark.parametrize(
    ("nodes", "gpus", "normalize", "options"),
    [
        *((*world, True, {}) for world in WORLDS), (1, 2, False, {}), (1, 2, True, dict(bias=True)),
        (1, 1, True, dict(shared_experts=1)), (1, 2, True, dict(shared_experts=2, bias=True, save="activations")),
        (2, 1, True, dict(shared_experts=2, max_tokens=8)),
    ],
)  # fmt: skip
def test_mixture_of_experts(nodes, gpus, normalize, options):
    experts, k = 12, 3
    state = {
        "gate.weight": values(experts, HIDDEN, seed=1),
        "experts.gate_up_proj": values(experts, 2 * INNER, HIDDEN, seed=2) * HIDDEN**-0.5,
        "experts.down_proj": values(experts, HIDDEN, INNER, seed=3) * INNER**-0.5,
    }
    if options.get("bias"):
        state["experts.gate_up_proj_bias"] = values(experts, 2 * INNER, seed=4)
        state["experts.down_proj_bias"] = values(experts, HIDDEN, seed=5)
    shared = options.get("shared_experts", 0)
    for name in [name for name in state if name.startswith("experts.")] if shared else ():
        all_experts = values(shared, *state[name].shape[1:], seed=6 + len(name))
        state[name.replace("experts.", "experts.shared_")] = all_experts * INNER**-0.5

    def tokens_of(rank):
        return values(2, 3 + rank, HIDDEN, seed=10 + rank)  # each rank has other tokens, and not as many

    def gradient_of(rank):
        return values(2, 3 + rank, HIDDEN, seed=20 + rank)

    @functools.cache
    def exact(size):
        """The plain parameters with their gradients, and of each rank the gradient of its tokens and its result."""
        wide, inputs = {name: value.double().requires_grad_() for name, value in state.items()}, []
        for rank in range(size):
            x = tokens_of(rank).double().requires_grad_()
            tokens = x.flatten(0, 1)
            weights, ids = torch.softmax(tokens @ wide["gate.weight"].t(), -1).topk(k)
            if normalize:
                weights = weights / weights.sum(-1, keepdim=True)
            parameters = [value for name, value in wide.items() if ".shared_" not in name][1:]
            if shared:  # the last experts, which each token names
                others = [value for name, value in wide.items() if ".shared_" in name]
                parameters = [torch.cat(pair) for pair in zip(parameters, others, strict=True)]
                named = torch.arange(experts, experts + shared).expand(len(ids), shared)
                ids, weights = torch.cat([ids, named], 1), torch.cat([weights, weights.new_ones(len(ids), shared)], 1)
            y = PlainExperts()(tokens, ids, weights, *parameters)
            y = y.reshape(x.shape)
            y.backward(gradient_of(rank).double())
            inputs.append((x.grad, y.detach()))
        return wide, inputs

    def on_rank(group):
        module = nn.ExpertParallelMoE(HIDDEN, INNER, experts, k, normalize=normalize, **options)
        module.load_state_dict(state)
        assert module.experts.down_proj.shape == (experts // group.size, HIDDEN, INNER)
        x = tokens_of(group.rank).requires_grad_()
        y = module(x)
        y.backward(gradient_of(group.rank))
        plain, inputs = exact(group.size)
        assert_near(y.detach(), inputs[group.rank][1])
        assert_near(x.grad, inputs[group.rank][0])
        for name, parameter in module.named_parameters():
            whole = plain[name].grad
            replicated = name == "gate.weight" or ".shared_" in name
            mine = whole if replicated else whole.chunk(group.size)[group.rank]
            assert_near(parameter.grad, mine, name)
        with torch.no_grad():
            assert_near(module(x), inputs[group.rank][1])
        full = nn.full_state_dict(module)
        assert set(full) == set(state)
        assert all(torch.equal(full[name], state[name]) for name in state)

    spawn(on_rank, nodes, gpus)


def test_shared_experts_are_behind_the_others_in_memory():
    """So no matrix is copied in a call; also behind `to` and in copies. Where they are not, the result is the same."""

    def on_rank(group):
        torch.manual_seed(3)
        layer, x = nn.ExpertParallelMoE(8, 16, 4, 2, shared_experts=2, max_tokens=4), values(4, 8, seed=group.rank)
        assert "num_experts=4, shared_experts=2, shard" in repr(layer)
        expected = layer(x)
        for module in (layer, copy.deepcopy(layer), layer.half().float()):
            for name in ("gate_up_proj", "down_proj"):
                own = getattr(module.experts, name)
                assert module.experts._all(name).data_ptr() == own.data_ptr()
        layer = nn.ExpertParallelMoE(8, 16, 4, 2, shared_experts=2).to(torch.float16)
        assert layer.experts._all("down_proj").data_ptr() == layer.experts.down_proj.data_ptr()
        torch.manual_seed(3)
        other = nn.ExpertParallelMoE(8, 16, 4, 2, shared_experts=2)
        other.experts.shared_down_proj = torch.nn.Parameter(other.experts.shared_down_proj.detach().clone())
        assert other.experts._all("down_proj").data_ptr() != other.experts.down_proj.data_ptr()
        assert torch.equal(other(x), expected)
        with pytest.raises(mk.ArgumentError, match="a token can go to at most 16 experts"):
            nn.ExpertParallelMoE(8, 16, 32, 15, shared_experts=2)

    spawn(on_rank)


def test_shared_experts_cost_no_traffic_but_their_names():
    def bytes_sent(shared):
        def on_rank(group):
            torch.manual_seed(3)  # the same router
            layer = nn.ExpertParallelMoE(8, 16, 4, 2, shared_experts=shared, max_tokens=4)
            with torch.no_grad():
                layer(values(4, 8, seed=group.rank))
            group.barrier()
            return group.world.traffic.network[0][1]

        return spawn(on_rank, 2, 1)[-1]

    assert bytes_sent(2) - bytes_sent(0) == 2 * 4 * (4 + 4)  # an id and a weight for each token and shared expert


def test_experts_start_alike_on_any_number_of_ranks():
    def on_rank(group):
        torch.manual_seed(5)
        return nn.ExpertParallelMoE(8, 16, 4, 2).state_dict(), torch.rand(1)

    ((one, drawn),) = spawn(on_rank, 1, 1)
    for rank, (shard, drawn_there) in enumerate(spawn(on_rank, 2, 2)):
        assert torch.equal(drawn, drawn_there)
        assert torch.equal(shard["gate.weight"], one["gate.weight"])
        for name in ("experts.gate_up_proj", "experts.down_proj"):
            assert torch.equal(shard[name], one[name][rank : rank + 1])
            assert len(one[name].unique()) > 0.9 * one[name].numel()  # no two experts are alike


@pytest.mark.parametrize(
    ("make", "given", "message"),
    [
        (
            lambda: nn.ExpertParallelMoE(8, 8, 2, 1).double(),
            lambda: [torch.zeros(4, 8, dtype=torch.float64)],
            "x has dtype torch.float64; supported are",
        ),
        (
            lambda: nn.ContextParallelAttention(),
            lambda: [torch.zeros(4, 1, 64)] * 3,
            "query must be [batch, seq_local, heads, dim], got shape (4, 1, 64)",
        ),
    ],
)
def test_what_is_refused(make, given, message):
    def on_rank(group):
        with pytest.raises(mk.ArgumentError) as error:
            make()(*given())
        return str(error.value)

    for text in spawn(on_rank):
        assert message in text
