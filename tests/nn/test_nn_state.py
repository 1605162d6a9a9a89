"""Parameters of parallel modules: how they start, how checkpoints load, and what copies and files keep."""

import copy
import io

import pytest
import torch
from support.nn_reference import FEATURES, WORLDS, PlainQKV, PlainSwiGLU
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import mkernel as mk
from mkernel import nn

KINDS = [nn.ColumnParallelLinear, nn.RowParallelLinear]


def on_ranks(function, nodes=1, gpus_per_node=2):
    return mk.spawn(function, nodes=nodes, gpus_per_node=gpus_per_node, device="cpu")


def assert_shards(module, plain):
    """A module's parameters are its shards of a plain state_dict, bit for bit."""
    assert dict(module.named_parameters()).keys() == plain.keys()
    for name, parameter in module.named_parameters():
        owner, _, own = name.rpartition(".")
        assert torch.equal(parameter, module.get_submodule(owner).shard_of(own, plain[name])), name


PLAIN_AND_PARALLEL = [
    (lambda: torch.nn.Linear(*FEATURES), lambda: nn.ColumnParallelLinear(*FEATURES)),
    (lambda: torch.nn.Linear(*FEATURES), lambda: nn.RowParallelLinear(*FEATURES)),
    (lambda: torch.nn.Linear(*FEATURES, bias=False), lambda: nn.RowParallelLinear(*FEATURES, bias=False)),
    (lambda: PlainSwiGLU(*FEATURES, bias=True), lambda: nn.ParallelSwiGLU(*FEATURES, bias=True)),
    (lambda: PlainQKV(24, 24, 12, 4), lambda: nn.ParallelQKV(24, 24, 12, head_dim=4)),
    (lambda: PlainQKV(24, 24, 1, 4), lambda: nn.ParallelQKV(24, 24, 1, head_dim=4)),
]


@pytest.mark.parametrize(("nodes", "gpus"), WORLDS)
@pytest.mark.parametrize(("plain", "parallel"), PLAIN_AND_PARALLEL)
def test_values_are_those_of_the_plain_module(nodes, gpus, plain, parallel):
    torch.manual_seed(11)
    state = plain().state_dict()
    drawn_next = torch.rand(1)

    def on_rank(group):
        torch.manual_seed(11)
        module = parallel()
        assert torch.equal(torch.rand(1), drawn_next)  # the modules after it start alike, too
        assert_shards(module, state)

    on_ranks(on_rank, nodes, gpus)


@pytest.mark.parametrize(("plain", "parallel"), PLAIN_AND_PARALLEL)
def test_threads_that_build_modules_in_turns_draw_the_same_values(plain, parallel):
    """Threads share torch's default generator. All ranks seed it first; then each module is built by all of them."""
    torch.manual_seed(11)
    states = [plain().state_dict() for _ in range(2)]
    drawn_next = torch.rand(1)

    def on_rank(group):
        torch.manual_seed(11)
        for state in states:
            group.barrier()
            assert_shards(parallel(), state)
        group.barrier()
        return torch.rand(1) if group.rank == 1 else None

    assert torch.equal(on_ranks(on_rank, 1, 3)[1], drawn_next)


GIVEN = [
    lambda **given: nn.ColumnParallelLinear(*FEATURES, **given),
    lambda **given: nn.RowParallelLinear(*FEATURES, **given),
    lambda **given: nn.ParallelSwiGLU(*FEATURES, bias=True, **given),
    lambda **given: nn.ParallelQKV(24, 24, 12, head_dim=4, **given),
    lambda **given: nn.ExpertParallelMoE(8, 16, 6, 2, bias=True, **given),
]


@pytest.mark.parametrize("make", GIVEN)
def test_values_come_from_the_given_generator_alone(make):
    torch.manual_seed(11)
    (alone,) = on_ranks(lambda group: nn.full_state_dict(make()), 1, 1)

    def on_rank(group):
        torch.manual_seed(group.rank)
        if group.rank == 2:
            torch.rand(group.rank)
        before = torch.get_rng_state()
        module = make(generator=torch.Generator().manual_seed(11))
        assert torch.equal(torch.get_rng_state(), before)
        return nn.full_state_dict(module)

    for state in on_ranks(on_rank, 1, 3):
        assert state.keys() == alone.keys()
        assert all(torch.equal(state[name], alone[name]) for name in alone)


@pytest.mark.parametrize(("nodes", "gpus"), WORLDS)
@pytest.mark.parametrize(("plain", "parallel"), PLAIN_AND_PARALLEL)
@pytest.mark.parametrize("assign", [False, True])
def test_a_plain_checkpoint_is_sharded_on_loading(nodes, gpus, plain, parallel, assign):
    state = plain().state_dict()
    before = {name: value.clone() for name, value in state.items()}

    def on_rank(group):
        module = parallel()
        module.load_state_dict(state, assign=assign)
        assert_shards(module, state)
        assert all(parameter.is_contiguous() for parameter in module.parameters())
        if assign and group.size > 1:  # a view would keep all shards in memory
            weights = [parameter for parameter in module.parameters() if parameter.dim() == 2]
            memory = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in weights}
            assert sum(memory.values()) == sum(weight.nbytes for weight in weights)
        # what a rank has saved loads on the same rank
        other = parallel()
        other.load_state_dict(module.state_dict())
        assert_shards(other, state)
        # and together the ranks have the plain checkpoint again
        full = nn.full_state_dict(module)
        assert full.keys() == state.keys()
        assert all(torch.equal(full[name], state[name]) for name in state)

    on_ranks(on_rank, nodes, gpus)
    assert all(torch.equal(state[name], before[name]) for name in state)


def test_other_shapes_are_refused():
    def on_rank(group):
        module = torch.nn.Sequential(nn.ColumnParallelLinear(*FEATURES))
        before = module.state_dict()["0.weight"].clone()
        state = {"0.weight": torch.zeros(FEATURES[1] // 3, FEATURES[0]), "0.bias": torch.zeros(FEATURES[1])}
        with pytest.raises(RuntimeError) as error:
            module.load_state_dict(state)
        assert torch.equal(module.state_dict()["0.weight"], before)
        return str(error.value)

    for rank, message in enumerate(on_ranks(on_rank)):
        assert message.count("size mismatch") == 1
        assert (
            "size mismatch for 0.weight: the checkpoint has (12, 24); it must be (36, 24), as in the plain module, or "
            f"(18, 24), the shard of rank {rank} of 2" in message
        )


def test_keys_are_checked_as_usual():
    def on_rank(group):
        module = nn.RowParallelLinear(*FEATURES)
        state = torch.nn.Linear(*FEATURES).state_dict()
        with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "bias"'):
            module.load_state_dict({"weight": state["weight"]})
        with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "more"'):
            module.load_state_dict({**state, "more": torch.zeros(1)})
        result = module.load_state_dict({"weight": state["weight"], "more": torch.zeros(1)}, strict=False)
        assert (result.missing_keys, result.unexpected_keys) == (["bias"], ["more"])
        with pytest.raises(RuntimeError, match="size mismatch for bias"):
            module.load_state_dict({**state, "bias": torch.zeros(FEATURES[1] // 2)})  # it is replicated

    on_ranks(on_rank)


@pytest.mark.parametrize("kind", KINDS)
def test_the_meta_device(kind):
    def on_rank(group):
        torch.manual_seed(3)
        drawn = torch.rand(1)
        torch.manual_seed(3)
        module = kind(*FEATURES, device="meta")
        assert module.weight.is_meta
        assert torch.equal(torch.rand(1), drawn)
        torch.manual_seed(3)
        module.to_empty(device="cpu").reset_parameters()
        torch.manual_seed(3)
        assert_shards(module, torch.nn.Linear(*FEATURES).state_dict())

    on_ranks(on_rank)


def test_a_model_on_the_meta_device():
    """Groups that its modules make are on no such device. What to_empty leaves is set by reset_parameters alone."""

    def model(generator):
        return torch.nn.Sequential(
            nn.ParallelSwiGLU(8, 12, generator=generator),
            nn.ParallelQKV(8, 4, 1, 8, generator=generator),
            nn.ExpertParallelMoE(8, 8, 4, 2, shared_experts=1, bias=True, correction_bias=True, generator=generator),
        )

    def on_rank(group):
        with torch.device("meta"):
            made = model(None)
        assert all(tensor.is_meta for tensor in made.state_dict().values())
        made.to_empty(device="cpu")
        for tensor in made.state_dict().values():
            tensor.fill_(torch.nan)
        first, second = (torch.Generator().manual_seed(3) for _ in range(2))
        for module in made.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters(first)
        for (name, tensor), expected in zip(made.state_dict().items(), model(second).state_dict().values()):
            assert torch.equal(tensor, expected), name
        assert all(each.isfinite().all() for each in made[1](torch.ones(4, 8)))

    on_ranks(on_rank)


def test_the_whole_state_of_a_model():
    """A layer that is in two places; a wrapper, whose keys of the state are not those of its modules; under autocast,
    which would round the values."""
    plain = torch.nn.Linear(8, 8)

    def on_rank(group):
        layer = nn.ColumnParallelLinear.from_linear(plain)
        model = torch.nn.Sequential(layer, torch.nn.ReLU(), checkpoint_wrapper(layer), torch.nn.LayerNorm(8))
        with torch.autocast("cpu", torch.bfloat16):
            state, single = nn.full_state_dict(model), layer.to_linear()
        assert list(state) == ["0.weight", "0.bias", "2.weight", "2.bias", "3.weight", "3.bias"]
        for name, parameter in plain.named_parameters():
            for whole in (state[f"0.{name}"], state[f"2.{name}"], single.get_parameter(name)):
                assert torch.equal(whole, parameter), name
        assert not any(tensor.requires_grad for tensor in state.values())

    on_ranks(on_rank)


@pytest.mark.parametrize(("nodes", "gpus"), WORLDS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_from_and_to_a_plain_layer(nodes, gpus, kind, dtype):
    plain = torch.nn.Linear(*FEATURES, dtype=dtype)
    plain.bias.requires_grad_(False)

    def on_rank(group):
        module = kind.from_linear(plain, group=group, sequence_parallel=False)
        assert_shards(module, plain.state_dict())
        assert (module.weight.requires_grad, module.bias.requires_grad) == (True, False)
        assert module.sequence_parallel is False
        back = module.to_linear()
        assert type(back) is torch.nn.Linear
        for name, parameter in plain.named_parameters():
            assert torch.equal(back.get_parameter(name), parameter)
            assert back.get_parameter(name).requires_grad == parameter.requires_grad
            assert back.get_parameter(name).data_ptr() != module.get_parameter(name).data_ptr()
        assert kind.from_linear(torch.nn.Linear(*FEATURES, device="meta"), group=group).weight.is_meta

    on_ranks(on_rank, nodes, gpus)


def test_large_parameters_are_gathered_in_pieces(monkeypatch):
    monkeypatch.setattr("mkernel.nn.shards.GATHERED_BYTES", 5 * 4 * FEATURES[0])
    plain = torch.nn.Linear(*FEATURES)

    def on_rank(group):
        assert torch.equal(nn.ColumnParallelLinear.from_linear(plain).to_linear().weight, plain.weight)

    on_ranks(on_rank)


def test_from_plain_layers_of_a_swiglu():
    plain = PlainSwiGLU(*FEATURES)

    def on_rank(group):
        layers = plain.gate_proj, plain.up_proj, plain.down_proj
        module = nn.ParallelSwiGLU.from_linears(*layers, save="gathered", reduce_dtype=torch.float32)
        assert_shards(module, plain.state_dict())
        assert (module.up_proj.save, module.down_proj.reduce_dtype) == ("gathered", torch.float32)
        with pytest.raises(mk.ArgumentError, match="up_proj has 24 output features, but down_proj has 36"):
            nn.ParallelSwiGLU.from_linears(plain.gate_proj, plain.down_proj, plain.down_proj)

    on_ranks(on_rank)


def test_copies_share_the_group_and_files_name_it():
    def on_rank(group):
        module = torch.nn.Sequential(nn.ColumnParallelLinear(*FEATURES), nn.ContextParallelAttention())
        copied = copy.deepcopy(module)
        assert copied[0].group is group
        assert copied[0].weight.data_ptr() != module[0].weight.data_ptr()
        file = io.BytesIO()
        torch.save(module, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        assert loaded[0].group is group
        assert loaded[1].group is group
        assert torch.equal(loaded[0].weight, module[0].weight)
        return file.getvalue()

    _, saved = on_ranks(on_rank)
    loaded = torch.load(io.BytesIO(saved), weights_only=False)
    assert loaded[0].weight.shape == (FEATURES[1] // 2, FEATURES[0])
    with pytest.raises(mk.MKernelError, match="as shard 1 of 2, and there was no group in which this process is rank"):
        loaded[0](torch.zeros(2, FEATURES[0]))


def test_the_shard_of_another_rank_does_not_find_a_group():
    saved = io.BytesIO()

    def on_rank(group):
        module = nn.RowParallelLinear(*FEATURES)
        if group.rank == 1:
            torch.save(module, saved)

    on_ranks(on_rank)
    mk.init()
    saved.seek(0)
    loaded = torch.load(saved, weights_only=False)
    with pytest.raises(mk.MKernelError, match=r"call mk\.init"):
        loaded(torch.zeros(2, FEATURES[0] // 2))


def test_no_group():
    with pytest.raises(mk.MKernelError, match="there is no group yet"):
        nn.ColumnParallelLinear(*FEATURES)


def test_replicated_parameters_that_differ():
    def on_rank(group):
        torch.manual_seed(1)
        model = torch.nn.Sequential(
            torch.nn.LayerNorm(24), nn.ColumnParallelLinear(*FEATURES), nn.RowParallelLinear(36, 2)
        )
        nn.check_replicated(model)
        if group.rank == 2:
            torch.nn.init.zeros_(model[2].bias)
        with pytest.raises(mk.ArgumentError, match=r"differ between ranks 0 and 2: 2\.bias\. Call torch\.manual_seed"):
            nn.check_replicated(model)

    on_ranks(on_rank, 1, 3)


def raises(make, message, ranks=2):
    def on_rank(group):
        with pytest.raises(mk.ArgumentError) as error:
            make()
        return str(error.value)

    for text in on_ranks(on_rank, 1, ranks):
        assert message in text


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: nn.ColumnParallelLinear(24, 36),
            "out_features is 36, which 5 ranks cannot divide equally: it must be a multiple of 5, such as 35 or 40; 36 "
            "can be divided among 1, 2, 3, 4 ranks",
        ),
        (lambda: nn.RowParallelLinear(4, 35), "in_features is 4, which 5 ranks cannot divide equally"),
        (lambda: nn.RowParallelLinear(4, 35), "it must be a multiple of 5, such as 5; 4 can be"),
        (lambda: nn.ColumnParallelLinear(0, 5), "in_features must be a whole number, 1 or more; got 0"),
        (lambda: nn.ColumnParallelLinear(5, 5, save="all"), "save must be 'sharded' or 'gathered', got 'all'"),
        (lambda: nn.ParallelSwiGLU(5, 12), "intermediate_size is 12, which 5 ranks"),
        (lambda: nn.ParallelQKV(20, 10, 2), "num_kv_heads is 2, which 5 ranks cannot divide equally"),
        (lambda: nn.ParallelQKV(20, 10, 3), "num_heads is 10, which is not a multiple of num_kv_heads (3)"),
        (lambda: nn.ParallelQKV(24, 10), "hidden_size is 24, which is not a multiple of num_heads (10): pass head_dim"),
        (lambda: nn.ExpertParallelMoE(8, 8, 6, 2), "num_experts is 6, which 5 ranks cannot divide equally"),
        (lambda: nn.ExpertParallelMoE(8, 8, 5, 6), "top_k is 6; it must be at most num_experts (5) and at most 16"),
        (lambda: nn.ContextParallelAttention(layout="ring"), "layout must be one of 'contiguous', 'zigzag'"),
        (lambda: nn.ContextParallelAttention(input_layout="sbhd"), "input_layout must be one of 'bhsd', 'bshd'"),
        (lambda: nn.RowParallelLinear.from_linear(torch.nn.Conv1d(1, 1, 1)), "linear must be a torch.nn.Linear"),
        (lambda: nn.RowParallelLinear(5, 5, group=5), "group must be a mk.Group"),
    ],
)
def test_mistakes(make, message):
    raises(make, message, ranks=5)


def test_descriptions():
    def on_rank(group):
        layers = [
            nn.ColumnParallelLinear(4, 8, sequence_dim=1, gather_output=True),
            nn.RowParallelLinear(8, 4, bias=False, sequence_parallel=False),
            nn.ContextParallelAttention(is_causal=True, layout="zigzag", scale=0.5),
            nn.ParallelExperts(4, 8, 2),
        ]
        return [repr(layer) for layer in layers]

    assert on_ranks(on_rank)[1] == [
        "ColumnParallelLinear(in_features=4, out_features=8, bias=True, shard 1 of 2, sequence_parallel=True, "
        "sequence_dim=1, gather_output=True)",
        "RowParallelLinear(in_features=8, out_features=4, bias=False, shard 1 of 2, sequence_parallel=False)",
        "ContextParallelAttention(is_causal=True, layout='zigzag', input_layout='bshd', scale=0.5, part 1 of 2)",
        "ParallelExperts(hidden_size=4, intermediate_size=8, num_experts=2, shard 1 of 2)",
    ]
