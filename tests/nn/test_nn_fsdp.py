"""Tensor-parallel modules that FSDP divides further, over another dimension of a mesh: processes on CPUs."""

import pytest
from support import forked_processes

START = """
    import torch
    from support.patience import WAIT
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import parallelize_module
    import mkernel as mk
    from mkernel import nn
    from support.nn_reference import assert_near, values

    group = mk.init(timeout=WAIT)
    mesh = init_device_mesh("cpu", {mesh}, mesh_dim_names=("dp", "tp"))
    dp, tp = (mesh.get_local_rank(name) for name in ("dp", "tp"))
    PARTS, SHARDS = mesh.shape

    class Layer(torch.nn.Module):
        def __init__(self, up, down):
            super().__init__()
            self.norm, self.up, self.down = torch.nn.LayerNorm(8), up, down

        def forward(self, x):
            return self.down(torch.relu(self.up(self.norm(x))))

    def plain(seed=0):
        torch.manual_seed(seed)
        return Layer(torch.nn.Linear(8, 12), torch.nn.Linear(12, 8))

    def divided(kind):
        layer = plain()
        if kind == "plan":
            up, down = nn.ColwiseParallel(input_layouts=Shard(0)), nn.RowwiseParallel(output_layouts=Shard(0))
            parallelize_module(layer, mesh["tp"], dict(up=up, down=down))
        else:
            layer.up = nn.ColumnParallelLinear.from_linear(layer.up, group=mesh["tp"])
            layer.down = nn.RowParallelLinear.from_linear(layer.down, group=mesh["tp"])
        nn.sum_gradients(layer.norm, group=mesh["tp"])
        return fully_shard(layer, mesh=mesh["dp"])


    def assert_state(layer, expected):
        found = nn.full_state_dict(layer)
        assert list(found) == list(expected)
        for name, value in expected.items():
            assert torch.equal(found[name], value), (name, found[name].shape)
"""

END = """
    group.close()
    print("right on rank", group.rank)
"""


def run(program, mesh):
    outcomes = forked_processes.run_ranks(
        START.replace("{mesh}", str(mesh)) + program + END, mesh[0] * mesh[1], store="apart"
    )
    for rank, (output, code) in enumerate(outcomes):
        assert code == 0, output
        assert f"right on rank {rank}" in output, output


@pytest.mark.parametrize(
    "mesh", [(1, 2), *(pytest.param(mesh, marks=pytest.mark.thorough) for mesh in ((2, 1), (2, 2)))], ids=str
)
def test_gradients_and_state(mesh):
    program = """
    for kind in ("modules", "plan"):
        whole, layer = plain(), divided(kind)
        assert_state(layer, whole.state_dict())
        x = values(4 * PARTS, 8, seed=1)
        exact = whole.double()(x.double())
        exact.square().sum().backward()
        for turn in range(2):
            layer.zero_grad()
            y = layer(x.chunk(PARTS)[dp].chunk(SHARDS)[tp])
            assert_near(y.detach(), exact.detach().chunk(PARTS)[dp].chunk(SHARDS)[tp])
            y.square().sum().backward()
            for owner in ("norm", "up", "down"):
                for name, parameter in layer.get_submodule(owner).named_parameters():
                    gradient = parameter.grad.full_tensor() * PARTS  # FSDP averages
                    expected = whole.get_parameter(f"{owner}.{name}").grad
                    if gradient.shape != expected.shape:
                        expected = layer.get_submodule(owner).shard_of(name, expected)
                    assert_near(gradient, expected, f"{kind}: {owner}.{name}")
    """
    run(program, mesh)


@pytest.mark.parametrize("mesh", [(2, 1), pytest.param((2, 2), marks=pytest.mark.thorough)], ids=str)
def test_experts(mesh):
    """Made on the meta device, with checkpoints of activations: they start with the values of the plain module."""
    program = """
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    def experts(group):
        return nn.ExpertParallelMoE(8, 6, 4, 2, shared_experts=1, correction_bias=True, group=group)

    with torch.device("meta"):
        layer = fully_shard(checkpoint_wrapper(experts(mesh["tp"])), mesh=mesh["dp"])
    layer.to_empty(device="cpu")
    torch.manual_seed(0)
    for module in (layer.gate, layer.experts):
        module.reset_parameters()
    torch.manual_seed(0)
    whole = experts(group.subset([group.rank]))
    assert_state(layer, whole.state_dict())
    x = values(4 * PARTS, 8, seed=1)
    exact = whole(x)
    exact.square().sum().backward()
    y = layer(x.chunk(PARTS)[dp].chunk(SHARDS)[tp])
    assert_near(y.detach(), exact.detach().double().chunk(PARTS)[dp].chunk(SHARDS)[tp])
    y.square().sum().backward()
    for name, parameter in layer.named_parameters():
        expected = whole.get_parameter(name).grad.double()
        if name.startswith("experts."):
            expected = layer.experts.shard_of(name.partition(".")[2], expected)
        assert_near(parameter.grad.full_tensor() * PARTS, expected, name)  # FSDP averages
    """
    run(program, mesh)


def test_layers_that_are_not_called_are_refused():
    program = """
    def refused(block, part):
        fully_shard(block.get_submodule(part), mesh=mesh["dp"])
        try:
            block(torch.ones(4, 8))
        except mk.ArgumentError as error:
            return str(error)

    kind = dict(group=mesh["tp"])
    for block, part in ((nn.ParallelSwiGLU(8, 12, **kind), "up_proj"), (nn.ParallelQKV(8, 4, **kind), "q_proj"),
                        (nn.ExpertParallelMoE(8, 8, 4, 2, **kind), "gate")):
        name = type(block).__name__
        assert f"apply fully_shard to the whole {name}, not to {part}" in refused(block, part)
    """
    run(program, (2, 1))


def test_checkpoints():
    """Of the plain model; of one module, also by its own load_state_dict."""
    program = """
    other = plain(seed=1)
    for kind in ("modules", "plan"):
        layer = divided(kind)
        set_model_state_dict(layer, dict(other.state_dict()), options=StateDictOptions(full_state_dict=True))
        assert_state(layer, other.state_dict())
        layer.load_state_dict(layer.state_dict())
        assert_state(layer, other.state_dict())
        assert torch.equal(layer.up.to_linear().weight, other.up.weight)
    layer = divided("modules")
    layer.up.load_state_dict(other.up.state_dict())
    shards = {name: layer.down.shard_of(name, value) for name, value in other.down.state_dict().items()}
    layer.down.load_state_dict(shards)
    set_model_state_dict(layer.norm, dict(other.norm.state_dict()), options=StateDictOptions(full_state_dict=True))
    assert_state(layer, other.state_dict())
    torch.manual_seed(1)
    layer.norm.reset_parameters()
    layer.up.reset_parameters()
    layer.down.reset_parameters()
    assert_state(layer, other.state_dict())
    layer = divided("plan")
    refused = []
    for attempt in (lambda: layer.up.load_state_dict(other.up.state_dict()), layer.up.reset_parameters):
        try:
            attempt()
        except (RuntimeError, mk.ArgumentError) as error:
            refused.append(str(error))
    assert len(refused) == 2 and all("before fully_shard, or by torch.distributed" in each for each in refused), refused
    """
    run(program, (2, 1))
