"""Modules in processes on CPUs: gradients, torch.compile, and plans of parallelize_module."""

import pytest
from support import forked_processes


def run(program, ranks):
    for rank, (output, code) in enumerate(forked_processes.run_ranks(program, ranks, store="apart")):
        assert code == 0, output
        assert f"right on rank {rank}" in output, output


GRADIENTS = """
    import torch
    from support.nn_reference import LINEARS, PlainQKV, PlainSwiGLU, assert_near, compare_gradients, values
    from support.patience import WAIT
    import mkernel as mk
    from mkernel import nn

    group = mk.init(timeout=WAIT, gpus_per_node={gpus_per_node})
    assert group.nodes == {nodes}
    for case in LINEARS:
        case.check(group, True)

    def part(whole, dim):
        return whole.chunk(group.size, dim)[group.rank]

    def compare(plain, parallel, sequence_parallel, scattered):
        torch.manual_seed(1)
        plain, module = plain(), parallel()
        module.load_state_dict(plain.state_dict())
        x = values(2, 12, 24, seed=1)
        mine = (part(x, 1) if sequence_parallel else x).clone().requires_grad_()
        whole = x.double().requires_grad_()
        results, exact = module(mine), plain.double()(whole)
        if scattered:
            results, exact = [results], [exact]
        parts = [part(each, 1) if scattered else part(each, -2) for each in exact]
        if scattered and not sequence_parallel:
            parts = exact
        grads = [values(*each.shape, seed=5) for each in exact]
        mine_of = {{id(each): own for each, own in zip(exact, parts)}}
        for result, own in zip(results, parts):
            assert_near(result, own.detach())
        torch.autograd.backward(exact, [grad.double() for grad in grads])
        own_grads = [
            part(grad, -2) if not scattered else part(grad, 1) if sequence_parallel else grad for grad in grads
        ]
        torch.autograd.backward(results, own_grads)
        assert_near(mine.grad, part(whole.grad, 1) if sequence_parallel else whole.grad, "input")
        compare_gradients(module, plain)

    for sequence_parallel in (True, False):
        common = dict(sequence_parallel=sequence_parallel, sequence_dim=1)
        for save in ("sharded", "gathered"):
            compare(
                lambda: PlainSwiGLU(24, 36, True), lambda: nn.ParallelSwiGLU(24, 36, True, save=save, **common),
                sequence_parallel, True,
            )
        compare(
            lambda: PlainQKV(24, 24, 12, 4, True), lambda: nn.ParallelQKV(24, 24, 12, 4, True, **common),
            sequence_parallel, False,
        )
    group.close()
    print("right on rank", group.rank)
"""


@pytest.mark.parametrize(("nodes", "gpus_per_node"), [(1, 2), (1, 3), (2, 2)])
def test_gradients(nodes, gpus_per_node):
    program = GRADIENTS.format(nodes=nodes, gpus_per_node=gpus_per_node if nodes > 1 else None)
    run(program, nodes * gpus_per_node)
