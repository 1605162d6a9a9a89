"""Plans of parallelize_module that turn the layers of a model into those of mkernel.nn."""

import pytest
from support import forked_processes

PLANS = """
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import parallelize_module
    from support.nn_reference import assert_near, values
    import mkernel as mk
    from mkernel import nn

    class MLP(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up = torch.nn.Linear(24, 36)
            self.down = torch.nn.Linear(36, 24)

        def forward(self, x):
            return self.down(torch.nn.functional.silu(self.up(x)))

    def make(mesh, layout, use_local_output=True):
        torch.manual_seed(1)
        model = parallelize_module(MLP(), mesh, dict(
            up=nn.ColwiseParallel(input_layouts=layout, use_local_output=use_local_output),
            down=nn.RowwiseParallel(output_layouts=layout, use_local_output=use_local_output),
        ))
        torch.manual_seed(1)
        return model, MLP().double()

    dist.init_process_group("gloo")
    size, rank = dist.get_world_size(), dist.get_rank()
"""

TRAINING = """
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    x, grad = values(2, 12, 24, seed=1), values(2, 12, 24, seed=2)
    for layout in (Shard(1), Replicate()):
        for local in (True, False):
            model, plain = make(mesh["tp"], layout, local)
            assert isinstance(model.up, torch.nn.Linear) and isinstance(model.up, nn.ColumnParallelLinear)
            placements = dict(up_weight=Shard(0), up_bias=Shard(0), down_weight=Shard(1), down_bias=Replicate())
            for name, placement in placements.items():
                assert model.get_parameter(name.replace("_", ".")).placements == (placement,)
            part = lambda whole: whole.chunk(size, 1)[rank] if layout == Shard(1) else whole
            whole = x.double().requires_grad_()
            exact = plain(whole)
            exact.backward(grad.double())
            runs = [model]
            if COMPILED and not local:
                # dynamic=False: with DTensors as inputs, torch 2.13 cannot partition graphs of symbolic sizes
                runs.append(torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=False))
            for run in runs:
                model.zero_grad()
                mine = part(x).clone().requires_grad_()
                y = run(mine if local else DTensor.from_local(mine, mesh["tp"], [layout], run_check=False))
                assert isinstance(y, DTensor) is not local
                if not local:
                    assert y.placements == (layout,) and y.shape == x.shape
                y = y if local else y.to_local()
                assert_near(y, part(exact.detach()))
                y.backward(part(grad))
                assert_near(mine.grad, part(whole.grad))
                for name, parameter in model.named_parameters():
                    expected = plain.get_parameter(name).grad
                    assert parameter.grad.shape == expected.shape
                    assert_near(parameter.grad.full_tensor(), expected, name)
    # a DTensor of another layout is redistributed
    other = distribute_tensor(x, mesh["tp"], [Shard(0)] if size == 2 else [Replicate()])
    model, plain = make(mesh["tp"], Shard(1), False)
    assert_near(model(other).full_tensor(), plain(x.double()).detach())

    # optimizers and distributed checkpoints see DTensors
    torch.optim.AdamW(model.parameters(), lr=0.1).step()
    model(other).to_local().sum().backward()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    optimizer.step()
    assert isinstance(optimizer.state[model.up.weight]["exp_avg"], DTensor)
    state = model.state_dict()
    saved = {name: value.full_tensor() for name, value in state.items()}
    another, _ = make(mesh["tp"], Replicate())
    another.load_state_dict(saved)  # a plain checkpoint
    assert all(torch.equal(another.get_parameter(name).full_tensor(), value) for name, value in saved.items())
    another, _ = make(mesh["tp"], Replicate())
    another.load_state_dict(state)  # shards
    assert all(torch.equal(another.get_parameter(name).full_tensor(), value) for name, value in saved.items())
    full = nn.full_state_dict(another)
    assert all(torch.equal(full[name], value) for name, value in saved.items())
    another.up.reset_parameters()
    assert not torch.equal(another.up.weight.full_tensor(), saved["up.weight"])

    # in fp8: the bits of the layers
    options = dict(fp8="RowWise", fp8_gradients=torch.float8_e5m2)
    torch.manual_seed(1)
    model, plain = MLP(), MLP()
    plain.load_state_dict(model.state_dict())
    parallelize_module(model, mesh["tp"], dict(
        up=nn.ColwiseParallel(input_layouts=Shard(1), **options),
        down=nn.RowwiseParallel(output_layouts=Shard(1), **options),
    ))
    options |= dict(group=mesh["tp"], sequence_dim=1)
    plain.up = nn.ColumnParallelLinear.from_linear(plain.up, **options)
    plain.down = nn.RowParallelLinear.from_linear(plain.down, **options)
    mine = x.chunk(size, 1)[rank].clone().requires_grad_()
    one, other = (torch.autograd.grad(each(mine).square().sum(), mine)[0] for each in (model, plain))
    assert torch.equal(one, other)
    print("right on rank", rank)
"""

MESHES = """
    # tensor parallelism in each row of a 2 x 2 mesh, and the output's features on every rank
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x = values(4, 12, 24, seed=1).chunk(2)[mesh["dp"].get_local_rank()]
    model, plain = make(mesh["tp"], Shard(1))
    assert_near(model(x.chunk(2, 1)[mesh["tp"].get_local_rank()]),
                plain(x.double()).detach().chunk(2, 1)[mesh["tp"].get_local_rank()])
    torch.manual_seed(1)
    head = parallelize_module(torch.nn.Linear(24, 36), mesh["tp"], nn.ColwiseParallel(output_layouts=Replicate()))
    torch.manual_seed(1)
    assert_near(head(x), torch.nn.Linear(24, 36).double()(x.double()).detach())
    print("right on rank", rank)
"""


# a plan for a model on the meta device, which is then filled
META = """
    mesh = init_device_mesh("cpu", (size,))
    layout = Shard(1)
    for way in ("reset", "load", "assign"):
        with torch.device("meta"):
            model, _ = make(mesh, layout)
        torch.manual_seed(1)
        plain = MLP()
        if way == "assign":
            model.load_state_dict(plain.state_dict(), assign=True)
        elif way == "load":
            model.to_empty(device="cpu").load_state_dict(plain.state_dict(keep_vars=True))
        else:
            model.to_empty(device="cpu")
            torch.manual_seed(1)
            model.up.reset_parameters()
            model.down.reset_parameters()
        state = nn.full_state_dict(model)
        for name, value in plain.state_dict().items():
            assert torch.equal(state[name], value), (way, name)
        model(values(2, 12, 24, seed=1).chunk(size, 1)[rank]).sum().backward()
    print("right on rank", rank)
"""


# a plan as for a transformer of TorchTitan: torch's styles for norms and inputs, ours for the layers
WITH_TORCH = """
    import torch.nn.functional as F
    from torch.distributed.tensor.parallel import PrepareModuleInput, SequenceParallel, loss_parallel

    class Attention(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.wq = torch.nn.Linear(24, 24, bias=False)
            self.wo = torch.nn.Linear(24, 24, bias=False)

        def forward(self, x):
            return self.wo(torch.tanh(self.wq(x)))

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.attention_norm, self.attention = torch.nn.RMSNorm(24), Attention()
            self.mlp_norm, self.mlp = torch.nn.RMSNorm(24), MLP()
            self.head = torch.nn.Linear(24, 48, bias=False)

        def forward(self, x):
            x = x + self.attention(self.attention_norm(x))
            return self.head(x + self.mlp(self.mlp_norm(x)))

    mesh = init_device_mesh("cpu", (size,))
    torch.manual_seed(1)
    plain = Model().double()
    torch.manual_seed(1)
    model = parallelize_module(Model(), mesh, {
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "attention.wq": nn.ColwiseParallel(),
        "attention.wo": nn.RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        "mlp_norm": SequenceParallel(),
        "mlp.up": nn.ColwiseParallel(input_layouts=Shard(1)),
        "mlp.down": nn.RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        "head": nn.ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
    })
    x, target = values(2, 12, 24, seed=1), torch.arange(24) * 7 % 48
    with loss_parallel():
        logits = model(distribute_tensor(x, mesh, [Shard(1)]))
        assert logits.placements == (Shard(2),) and logits.shape == (2, 12, 48)
        F.cross_entropy(logits.flatten(0, 1), target).backward()
    F.cross_entropy(plain(x.double()).flatten(0, 1), target).backward()
    for name, parameter in model.named_parameters():
        assert_near(parameter.grad.full_tensor(), plain.get_parameter(name).grad, name)
    norms = [torch.nn.utils.clip_grad_norm_(each.parameters(), 1.0) for each in (model, plain)]
    assert_near(norms[0].full_tensor(), norms[1])
    print("right on rank", rank)
"""


def run(program, ranks):
    for rank, (output, code) in enumerate(forked_processes.run_ranks(program, ranks, store="apart")):
        assert code == 0, output
        assert f"right on rank {rank}" in output, output


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.thorough)])
def test_training(ranks):
    run(PLANS + TRAINING.replace("COMPILED", "False"), ranks)


@pytest.mark.thorough
def test_compiled():
    run(PLANS + TRAINING.replace("COMPILED", "True"), 2)


@pytest.mark.thorough
def test_one_dimension_of_a_mesh():
    run(PLANS + MESHES, 4)


def test_models_on_the_meta_device():
    run(PLANS + META, 2)


@pytest.mark.thorough
def test_with_styles_of_torch():
    run(PLANS + WITH_TORCH, 2)


def test_what_is_refused():
    program = """
        import pytest
        import torch
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Partial, Replicate, Shard
        from torch.distributed.tensor.parallel import parallelize_module
        import mkernel as mk
        from mkernel import nn

        torch.distributed.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (2,))
        for make, message in [
            (lambda: nn.ColwiseParallel(input_layouts=Shard(-1)), "input_layouts must be Replicate() or Shard(dim)"),
            (lambda: nn.ColwiseParallel(input_layouts=Partial()), "input_layouts must be Replicate() or Shard(dim)"),
            (lambda: nn.ColwiseParallel(output_layouts=Shard(1)), "output_layouts must be Shard(-1) or Replicate()"),
            (lambda: nn.RowwiseParallel(input_layouts=Replicate()), "input_layouts must be Shard(-1)"),
            (lambda: nn.RowwiseParallel(output_layouts=Shard(-1)), "output_layouts must be Replicate() or Shard(dim)"),
            (
                lambda: parallelize_module(torch.nn.Embedding(4, 4), mesh, nn.ColwiseParallel()),
                "ColwiseParallel of mkernel.nn is for torch.nn.Linear, not for Embedding: use torch.distributed.tensor",
            ),
            (
                lambda: parallelize_module(torch.nn.Linear(4, 5), mesh, nn.ColwiseParallel()),
                "out_features is 5, which 2 ranks cannot divide equally",
            ),
        ]:
            with pytest.raises(mk.ArgumentError) as error:
                make()
            assert message in str(error.value), error.value
        print(nn.RowwiseParallel(output_layouts=Shard(1)))
        print("right on rank", torch.distributed.get_rank())
    """
    run(program, 2)
