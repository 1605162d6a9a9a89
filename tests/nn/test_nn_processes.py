"""Modules in processes on CPUs: gradients, torch.compile, and plans of parallelize_module."""

import pytest
from support import forked_processes


def run(program, ranks):
    for rank, (output, code) in enumerate(forked_processes.run_ranks(program, ranks, store="apart")):
        assert code == 0, output
        assert f"right on rank {rank}" in output, output


GRADIENTS = """
    from support.nn_reference import BLOCKS, LINEARS, check_two_layers
    from support.patience import WAIT
    import mkernel as mk

    group = mk.init(timeout=WAIT, gpus_per_node={gpus_per_node})
    assert group.nodes == {nodes}
    for case in [*LINEARS, *BLOCKS]:
        case.check(group, True)
    for sequence_parallel in (True, False):
        check_two_layers(group, sequence_parallel)
    group.close()
    print("right on rank", group.rank)
"""


@pytest.mark.parametrize(
    ("nodes", "gpus_per_node"),
    [(1, 2), *(pytest.param(*cluster, marks=pytest.mark.thorough) for cluster in ((1, 3), (2, 2)))],
)
def test_gradients(nodes, gpus_per_node):
    program = GRADIENTS.format(nodes=nodes, gpus_per_node=gpus_per_node if nodes > 1 else None)
    run(program, nodes * gpus_per_node)


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(backend):
    """fullgraph: what Dynamo cannot trace would be an error. Inductor, whose C++ takes long to compile, gets the layers
    that are sequence parallel."""
    program = f"""
        import torch
        from support.nn_reference import check_two_layers, values
        from support.patience import WAIT
        import mkernel as mk
        from mkernel import nn

        def wrap(module):
            return torch.compile(module, fullgraph=True, backend="{backend}")

        group = mk.init(timeout=WAIT)
        for sequence_parallel in {(True,) if backend == "inductor" else (True, False)}:
            check_two_layers(group, sequence_parallel, wrap)
        moe, x = nn.ExpertParallelMoE(24, 16, 4, 2, max_tokens=12), values(2, 6, 24, seed=1)
        both = [torch.autograd.grad(each(x).square().sum(), moe.parameters()) for each in (wrap(moe), moe)]
        torch.testing.assert_close(*both)
        with torch.no_grad():
            torch.testing.assert_close(wrap(moe)(x), moe(x))
            ids = torch.tensor([[0, 1], [2, -1]])
            assert torch.equal(wrap(lambda: nn.expert_load(ids, 4))(), nn.expert_load(ids, 4))
            attention, x = nn.ContextParallelAttention(is_causal=True), values(1, 8, 2, 64, seed=1)
            torch.testing.assert_close(wrap(attention)(x, x, x), attention(x, x, x))
        group.close()
        print("right on rank", group.rank)
    """
    run(program, 2)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_gradient_of_all_output_features(compiled):
    """The same loss on every rank, as Megatron's convention is."""
    program = """
        import torch
        from support.nn_reference import FEATURES, assert_near, values
        from support.patience import WAIT
        import mkernel as mk
        from mkernel import nn

        group = mk.init(timeout=WAIT)
        for sequence_parallel in (True, False):
            x, grad = values(2, 12, FEATURES[0], seed=1), values(2, 12, FEATURES[1], seed=2)
            torch.manual_seed(1)
            plain = torch.nn.Linear(*FEATURES).double()
            torch.manual_seed(1)
            module = nn.ColumnParallelLinear(
                *FEATURES, sequence_parallel=sequence_parallel, sequence_dim=1, gather_output=True
            )
            runs = [module]
            if COMPILED:
                runs.append(torch.compile(module, fullgraph=True, backend="aot_eager"))
            for wrapped in runs:
                module.zero_grad()
                plain.zero_grad()
                whole = x.double().requires_grad_()
                mine = (x.chunk(group.size, 1)[group.rank] if sequence_parallel else x).clone().requires_grad_()
                exact, y = plain(whole), wrapped(mine)
                assert_near(y, exact.detach())
                exact.backward(grad.double())
                y.backward(grad)
                assert_near(mine.grad, whole.grad.chunk(group.size, 1)[group.rank] if sequence_parallel else whole.grad)
                for name, parameter in module.named_parameters():
                    assert_near(parameter.grad, module.shard_of(name, plain.get_parameter(name).grad), name)
        group.close()
        print("right on rank", group.rank)
    """
    run(program.replace("COMPILED", str(compiled)), 2)


def test_autocast_and_what_is_refused():
    program = """
        import pytest
        import torch
        from support.patience import WAIT
        import mkernel as mk
        from mkernel import nn

        group = mk.init(timeout=WAIT)
        layers = torch.nn.Sequential(
            nn.ColumnParallelLinear(8, 16), torch.nn.ReLU(), nn.RowParallelLinear(16, 8),
        )
        replicated = nn.ColumnParallelLinear(8, 16, sequence_parallel=False)
        x = torch.randn(4, 8, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            (layers(x).float().sum() + replicated(x).float().sum()).backward()
        for parameter in [*layers.parameters(), *replicated.parameters()]:
            assert parameter.grad.dtype == torch.float32 and parameter.grad.isfinite().all()
        with pytest.raises(mk.ArgumentError, match="contains 0, a ColumnParallelLinear, which sums its gradients"):
            nn.sum_gradients(layers)
        norm = torch.nn.LayerNorm(8)
        assert len(nn.sum_gradients(torch.nn.LayerNorm(8).requires_grad_(False))) == 0  # frozen
        handles = nn.sum_gradients(norm)
        norm(torch.ones(3, 8)).sum().backward()
        assert (norm.bias.grad == 6).all()
        for handle in handles:
            handle.remove()
        norm.zero_grad()
        norm(torch.ones(3, 8)).sum().backward()
        assert (norm.bias.grad == 3).all()
        group.close()
        print("right on rank", group.rank)
    """
    run(program, 2)
