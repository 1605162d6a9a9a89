"""Gradients of all_gather_matmul, matmul_reduce_scatter and matmul_all_reduce, in the simulator."""

import gc
import weakref

import pytest
import torch
from support import gradient_cases, second_gradients
from support.gradient_reference import GATHER, REDUCE, SCATTER, Case, check
from support.operator_calls import assert_same, cluster_name, run
from torch.utils.checkpoint import checkpoint

import mkernel as mk
from mkernel.ops.library import registered

OPS = [GATHER, SCATTER, REDUCE]
CLUSTERS = [(1, 1), (1, 2), (1, 3), (2, 2)]


def on_all_clusters(*always):
    """Parameters of a test: all clusters, of which `make test` runs only some."""
    return [cluster if cluster in always else pytest.param(cluster, marks=pytest.mark.thorough) for cluster in CLUSTERS]


def check_all(group, cases, how=check):
    for case in cases:
        how(group, case)


def once(group, case):
    check(group, case, twice=False)


def check_on(cluster, cases, how=check, seed=0, **options):
    nodes, gpus = cluster
    run(check_all, cases(nodes * gpus), how, cluster=cluster, seed=seed, **options)


@pytest.mark.parametrize("cluster", CLUSTERS, ids=cluster_name)
def test_every_operator(cluster):
    """On two ranks twice, with the same bits; test_another_schedule does that on four of them."""
    check_on(cluster, gradient_cases.main_cases, check if cluster == (1, 2) else once, seed=sum(cluster))


def test_small_sizes_and_more_dimensions():
    check_on((1, 2), gradient_cases.small_cases, once)


def test_only_some_inputs_require_grad():
    check_on((1, 2), gradient_cases.frozen_cases, once)


def test_gradients_of_gradients():
    check_on((1, 2), gradient_cases.second_cases, second_gradients.check)


@pytest.mark.thorough
@pytest.mark.parametrize(("cluster", "turn"), [((1, 1), 0), ((1, 2), 0), ((1, 3), 1), ((2, 2), 2)])
def test_several_tiles(cluster, turn):
    """Every operator in every dtype and every layout on each cluster; in every layout of every dtype on one of them."""
    check_on(cluster, lambda size: gradient_cases.tiled_cases(size, turn), once, seed=11)


OTHERS = [(1, 1), (1, 3), (2, 2)]  # the tests above run these cases on two ranks


@pytest.mark.thorough
@pytest.mark.parametrize("cluster", OTHERS, ids=cluster_name)
def test_small_sizes_on_other_clusters(cluster):
    check_on(cluster, gradient_cases.small_cases, once, seed=11)


@pytest.mark.thorough
@pytest.mark.parametrize("cluster", OTHERS, ids=cluster_name)
def test_gradients_of_gradients_on_other_clusters(cluster):
    check_on(cluster, gradient_cases.second_cases, second_gradients.check, seed=11)


@pytest.mark.thorough
@pytest.mark.parametrize("cluster", OTHERS, ids=cluster_name)
def test_some_inputs_require_grad_on_other_clusters(cluster):
    """Which inputs do decides which calls the backward pass makes, on any cluster: a third of the cases on each."""
    turn = OTHERS.index(cluster)
    check_on(cluster, lambda size: gradient_cases.frozen_cases(size)[turn::3], once, seed=11)


@pytest.mark.thorough
def test_another_schedule():
    """Twice, with the same bits."""
    check_on((2, 2), gradient_cases.main_cases, seed=100)


# -- what autograd does with them


def refused(*parts):
    return pytest.raises(mk.ArgumentError, match="(?s)" + ".*".join(parts))


def call(op, group, a, b, **arguments):
    return getattr(mk, op)(a, b, group=group, **arguments)


def inputs(group, m=4, k=8, n=6, dtype=torch.float32):
    """Of any operator; the same for all ranks but a, so that any of them can be matmul_all_reduce's."""
    torch.manual_seed(7)
    b, dy = torch.randn(k, n).to(dtype), torch.randn(group.size * m, n).to(dtype)
    torch.manual_seed(group.rank)
    return torch.randn(group.size * m, k).to(dtype).requires_grad_(), b.requires_grad_(), dy


def gradients(op, group, a, b, dy, **arguments):
    y = call(op, group, a, b, **arguments)
    torch.autograd.backward([y], [dy[: y.shape[0]].clone() if y.shape[0] <= dy.shape[0] else dy.repeat(group.size, 1)])
    found = a.grad, b.grad
    a.grad = b.grad = None
    return found


@pytest.mark.parametrize("op", OPS)
def test_backward_can_be_repeated_and_adds_up(op):
    def program(group):
        a, b, dy = inputs(group)
        da, db = gradients(op, group, a, b, dy)
        y = call(op, group, a, b)
        for turn in (1, 2):
            y.backward(dy.repeat(group.size, 1)[: y.shape[0]], retain_graph=True)
            assert_same(a.grad, turn * da)
            assert_same(b.grad, turn * db)

    run(program)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints(op, reentrant):
    def program(group):
        def layer(a, b):
            return call(op, group, a.tanh(), b).sin()

        a, b, _ = inputs(group)
        layer(a, b).square().sum().backward()
        expected = a.grad, b.grad
        a.grad = b.grad = None
        checkpoint(layer, a, b, use_reentrant=reentrant).square().sum().backward()
        assert_same(a.grad, expected[0])
        assert_same(b.grad, expected[1])

    run(program)


@pytest.mark.parametrize("op", OPS)
def test_layouts_that_autograd_makes(op):
    """An expanded gradient, that of a transposed result, and inputs that are no leaves."""

    def program(group):
        a, b, dy = inputs(group)
        columns, rows = dy[0], dy.repeat(group.size, 1)[:, 0]
        losses = {
            "expanded": lambda y: y.sum(),
            "expanded rows": lambda y: (y.sum(0) * columns).sum(),
            "expanded columns": lambda y: (y.sum(1) * rows[: y.shape[0]]).sum(),
            "transposed": lambda y: (y.t() * rows[: y.shape[0]]).sum(),
            "every second column": lambda y: y[:, ::2].sin().sum(),
            "of one row": lambda y: sum(i * row.sum() for i, row in enumerate(y)),
        }
        for name, loss in losses.items():
            y = call(op, group, a, b)
            values = y.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(loss(values), values)
            expected = torch.autograd.grad(y, (a, b), gradient.contiguous(), retain_graph=True)
            torch.testing.assert_close(torch.autograd.grad(loss(y), (a, b)), expected, msg=lambda m: f"{name}: {m}")
        row = torch.ones(1, a.shape[1], requires_grad=True)
        column = torch.ones(b.shape[0], 1, requires_grad=True)
        y = call(op, group, row.expand(a.shape), column.expand(b.shape))
        y.sum().backward()
        terms = a.shape[0] * b.shape[1] * (group.size if op == GATHER else 1)
        assert (row.grad == terms).all()
        assert (column.grad == terms).all()

    run(program)


def test_the_gradient_of_a_weight_is_laid_out_like_the_weight():
    def program(group):
        for op in OPS:
            for shape in [(6, 8), (1, 8), (6, 1)]:
                w = torch.randn(shape, requires_grad=True)
                a = torch.randn(4 * group.size, shape[1], requires_grad=True)
                da, dw = torch.autograd.grad(call(op, group, a, w.t()).sum(), (a, w))  # as it is before it is added up
                assert dw.is_contiguous(), (op, shape)
                assert da.is_contiguous(), (op, shape)

    run(program)


@pytest.mark.parametrize("op", OPS)
def test_without_gradients_the_bits_are_the_same(op):
    def program(group):
        a, b, _ = inputs(group, dtype=torch.bfloat16)
        bias = torch.randn(b.shape[1], generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
        y = call(op, group, a, b, bias=bias)
        assert y.requires_grad
        for context in (torch.no_grad, torch.inference_mode):
            with context():
                plain = call(op, group, a, b, bias=bias)
            assert not plain.requires_grad
            assert_same(plain, y.detach())
        with torch.no_grad():
            out = torch.empty_like(y)
            assert call(op, group, a, b, bias=bias, out=out) is out
            assert_same(out, y.detach())

    run(program)


def test_biases_that_are_not_added_to_out():
    def program(group):
        a, b, _ = inputs(group)
        bias, out = torch.ones(b.shape[1], requires_grad=True), torch.zeros(group.size * a.shape[0], b.shape[1])
        with refused("out cannot be combined with tensors that require grad"):
            mk.all_gather_matmul(a.detach(), b.detach(), bias=bias, out=out)
        with refused("out overlaps bias"):
            mk.all_gather_matmul(a.detach(), b.detach(), bias=out[1], out=out)

    run(program)


@pytest.mark.parametrize("op", OPS)
def test_autocast(op):
    """fp32 parameters, products in bf16, gradients in fp32."""

    def program(group):
        a, b, dy = inputs(group)
        bias = torch.zeros(b.shape[1], requires_grad=True)
        half = [tensor.detach().bfloat16().requires_grad_() for tensor in (a, b)]
        expected = gradients(op, group, *half, dy.bfloat16())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = call(op, group, a, b, bias=bias)
            assert y.dtype == torch.bfloat16
        y.backward(dy.bfloat16().repeat(group.size, 1)[: y.shape[0]])
        assert a.grad.dtype == b.grad.dtype == bias.grad.dtype == torch.float32
        assert_same(a.grad, expected[0].float())
        assert_same(b.grad, expected[1].float())
        with torch.autocast("cpu", dtype=torch.bfloat16):  # backward inside of it, too
            a.grad = b.grad = None
            y = call(op, group, a, b)
            y.backward(dy.bfloat16().repeat(group.size, 1)[: y.shape[0]])
        assert_same(a.grad, expected[0].float())
        assert_same(b.grad, expected[1].float())

    run(program)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("frozen", ["a", "b"])
@pytest.mark.thorough
def test_frozen_tensors_are_not_kept_for_the_backward_pass(op, frozen):
    """b is needed for the gradient of a, and a for that of b. A frozen weight needs no activations."""

    def program(group):
        a, b, _ = inputs(group)
        a, b = (a * 1, b.detach()) if frozen == "b" else (a.detach(), b * 1)
        kept = weakref.ref(a if frozen == "b" else b)
        y = call(op, group, a, b)
        del a, b
        gc.collect()
        assert kept() is None
        y.sum().backward()

    run(program)


@pytest.mark.parametrize("several", [False, True])
def test_what_is_saved(several):
    """This rank's rows, or all rows, and b for the gradient of a."""

    def program(group):
        a, b, _ = inputs(group)
        for save, rows in (("sharded", a.shape[0]), ("gathered", group.size * a.shape[0])):
            saved = []
            with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor.shape) or tensor, id):
                mk.all_gather_matmul(a, [b, b] if several else b, save=save)
            assert saved == [(rows, a.shape[1]), b.shape, *([b.shape] if several else [])]

    run(program)


def test_the_gradient_of_a_bias_is_the_same_on_every_rank():
    def program(group):
        a, b, dy = inputs(group, dtype=torch.bfloat16)
        bias = torch.zeros(b.shape[1], dtype=a.dtype, requires_grad=True)
        y = mk.matmul_reduce_scatter(a, b, bias=bias)
        y.backward(dy[: y.shape[0]] * (group.rank + 1))
        return bias.grad

    first, *others = run(program, cluster=(2, 2))
    for other in others:
        assert_same(other, first)


def test_vmap():
    """PyTorch makes one call for each element."""

    def program(group):
        a, b, _ = inputs(group)
        several = torch.stack([a.detach(), 2 * a.detach()])
        for op in OPS:
            y = torch.vmap(lambda rows: call(op, group, rows, b.detach()))(several)
            assert_same(y, torch.stack([call(op, group, rows, b.detach()) for rows in several]))

    run(program)


@pytest.mark.parametrize("op", OPS)
def test_tensors_in_the_symmetric_heap(op):
    def program(group):
        a, b, dy = inputs(group, dtype=torch.bfloat16)
        expected = gradients(op, group, a, b, dy)
        mine = mk.empty(*a.shape).copy_(a.detach()).requires_grad_()
        right = mk.empty(*b.shape).copy_(b.detach()).requires_grad_()
        for one, other in zip(gradients(op, group, mine, right, dy), expected):
            assert_same(one, other)

    run(program, cluster=(2, 1))


def test_forward_mode_is_refused():
    def program(group):
        a, b, _ = inputs(group)
        forward = torch.autograd.forward_ad
        for op in OPS:
            for x, w in ((a, b), (a.detach(), b.detach())):
                with forward.dual_level():
                    with pytest.raises(mk.ArgumentError, match="a is a dual tensor"):
                        call(op, group, forward.make_dual(x, torch.ones_like(x)), w)
                    with pytest.raises(mk.ArgumentError, match="b is a dual tensor"):
                        call(op, group, x, forward.make_dual(w, torch.ones_like(w)))
                    if op == GATHER:
                        with pytest.raises(mk.ArgumentError, match=r"b\[1\] is a dual tensor"):
                            call(op, group, x, [w, forward.make_dual(w, torch.ones_like(w))])
                    call(op, group, x, w)
        with pytest.raises(mk.ArgumentError, match="dual tensor"):
            torch.func.jvp(lambda x: call(GATHER, group, x, b.detach()), (a.detach(),), (torch.ones_like(a),))

    run(program, cluster=(1, 1))  # threads would share the level


def test_torch_func_is_refused():
    """In words of the caller's; vmap runs one call after the other, also in the backward pass."""

    def program(group):
        a, b, _ = (each.detach() for each in inputs(group))
        for op in OPS:
            for transform in (torch.func.grad, torch.func.jacrev):
                with pytest.raises(mk.ArgumentError, match=r"a is differentiated by torch\.func .* backward\(\)"):
                    transform(lambda a: call(op, group, a, b).sum())(a)
            with pytest.raises(mk.ArgumentError, match=r"a is differentiated by torch\.func"):
                torch.func.grad(lambda a: torch.vmap(lambda x: call(op, group, x, b))(a[None]).sum())(a)
            rows, right = torch.stack([a, 2 * a]), b.clone().requires_grad_()
            ys = torch.vmap(lambda x: call(op, group, x, right))(rows)
            assert_same(ys[1], call(op, group, rows[1], b))
            ys[0].sum().backward()
            found, right.grad = right.grad, None
            call(op, group, a, right).sum().backward()
            assert_same(found, right.grad)

    run(program)


def test_graphs_in_the_simulator():
    """Its ranks are threads, of which PyTorch compiles one at a time; a graph of one is used by the others."""

    def program(group):
        for op in OPS:
            a, b, _ = inputs(group)
            function = torch.compile(lambda a, b: call(op, group, a, b).sin(), backend="aot_eager", fullgraph=True)
            expected = torch.autograd.grad(call(op, group, a, b).sin().sum(), (a, b))
            for one, other in zip(torch.autograd.grad(function(a, b).sum(), (a, b)), expected):
                assert_same(one, other)

    run(program)


# -- ranks that differ


def test_ranks_may_use_different_results():
    """Of several results: each rank still makes the same calls in the backward pass."""

    def program(group):
        a, b, _ = inputs(group)
        others = [torch.randn(b.shape, generator=torch.Generator().manual_seed(i)).requires_grad_() for i in (1, 2)]
        for save in ("sharded", "gathered"):
            for several in (False, True):
                given = [b, *others] if several else b
                ys, gathered = mk.all_gather_matmul(a, given, return_gathered=True, save=save)
                used = gathered if group.rank else (ys[1] if several else ys)
                used.sum().backward()
                everyone = 1.0 + (others[0] if several else b).detach().sum(1)  # of rank 1, and of rank 0
                torch.testing.assert_close(a.grad, everyone.expand(a.shape), rtol=1e-5, atol=1e-5)
                if several and group.rank == 0:
                    assert not b.grad.any()  # another result is used
                assert b.grad is None or group.rank == 0
                assert (others[0].grad is not None) == (several and group.rank == 0)
                for tensor in (a, b, *others):
                    tensor.grad = None

    run(program)


@pytest.mark.parametrize("op", OPS)
def test_a_rank_that_refuses_its_arguments(op):
    def program(group):
        a, b, dy = inputs(group)
        expected = gradients(op, group, a, b, dy)
        wrong = b.double() if group.rank == 1 else b
        with refused("b has dtype torch.float64" if group.rank == 1 else f"rank 1 refused its call of {op}"):
            call(op, group, a, wrong)
        with refused("bias" if group.rank == 0 else f"rank 0 refused its call of {op}"):
            call(op, group, a, b, bias=torch.ones(b.shape[1] + (group.rank == 0)))
        for before, after in zip(expected, gradients(op, group, a, b, dy)):
            assert_same(before, after)

    run(program)


@pytest.mark.parametrize("op", [GATHER, SCATTER])
def test_a_rank_that_refuses_its_arguments_in_the_backward_pass(op):
    """What it had saved comes back in another dtype."""
    inner = {GATHER: SCATTER, SCATTER: GATHER}[op]

    def program(group):
        a, b, dy = inputs(group)
        expected = gradients(op, group, a, b, dy)

        def unpack(tensor):
            return tensor.double() if group.rank == 1 else tensor

        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
            y = call(op, group, a, b)
        with refused("b has dtype torch.float64" if group.rank == 1 else f"rank 1 refused its call of {inner}"):
            y.backward(dy.repeat(group.size, 1)[: y.shape[0]])
        a.grad = b.grad = None
        for before, after in zip(expected, gradients(op, group, a, b, dy)):
            assert_same(before, after)

    run(program)


def test_a_rank_that_skips_the_backward_pass():
    """It makes another call instead: all ranks say so, and the group can be used again."""

    def program(group):
        a, b, dy = inputs(group)
        expected = gradients(GATHER, group, a, b, dy)
        y = call(GATHER, group, a, b)
        with refused("same calls in the same order", f"rank {group.rank} has", f"rank {1 - group.rank} has"):
            if group.rank == 1:
                call(GATHER, group, a, b)
            else:
                y.sum().backward()
        a.grad = b.grad = None
        for before, after in zip(expected, gradients(GATHER, group, a, b, dy)):
            assert_same(before, after)

    run(program)


def test_a_rank_that_ends_before_the_backward_pass():
    def program(group):
        a, b, _ = inputs(group)
        y = call(GATHER, group, a, b)
        if group.rank != 1:
            with pytest.raises(mk.CommTimeout, match="rank 1") as caught:
                y.sum().backward()
            assert caught.value.record.op == SCATTER
            assert caught.value.record.peer == 1

    run(program)


def test_tensor_and_data_parallel_groups():
    """Two groups of each rank, in one graph."""

    def program(group):
        rows, columns = group.split(group.rank // 2), group.split(group.rank % 2)
        for tp, dp in ((rows, columns), (rows.group_name, columns.group_name)):
            torch.manual_seed(group.rank)
            a, w, v = (torch.randn(4, 4).requires_grad_() for _ in range(3))
            y = mk.all_gather_matmul(a, w.t(), group=tp).relu()
            z = mk.matmul_reduce_scatter(y, v.t(), group=tp)
            total = mk.matmul_all_reduce(z, torch.eye(4), group=dp)  # the sum over data-parallel ranks
            total.square().sum().backward()
            parts = group.exchange("inputs", [tensor.detach() for tensor in (a, w, v)])
            leaves = [[tensor.double().requires_grad_() for tensor in each] for each in parts]
            sums = []
            for pair in ([0, 1], [2, 3]):
                everyone = torch.cat([leaves[rank][0] for rank in pair])
                hidden = [(everyone @ leaves[rank][1].t()).relu() for rank in pair]
                sums.append(sum(h @ leaves[rank][2].t() for h, rank in zip(hidden, pair)))
            (sums[0] + sums[1]).square().sum().backward()
            for mine, exact in zip((a, w, v), leaves[group.rank]):
                torch.testing.assert_close(mine.grad.double(), exact.grad, rtol=1e-5, atol=1e-4)

    run(program, cluster=(2, 2))


# -- the gradient of b, by its schema


@pytest.mark.parametrize("cluster", on_all_clusters((1, 2)), ids=cluster_name)
def test_weight_gradients_as_a_registered_operator(cluster):
    def program(group):
        weight_grad = registered(GATHER, "_weight_grad")
        sizes = [(5, 8, 6), (1, 1, 1), (4, 8, 0), (0, 8, 6), (33, 20, 17)]
        for i, (m, k, n) in enumerate(sizes):
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                case = Case(GATHER, (m, k), n, dtype, seed=i)
                a = case.inputs(group.rank, group.size)["a"]
                dy = torch.randn(group.size * m, n, generator=torch.Generator().manual_seed(i + group.rank)).to(dtype)
                whole = torch.cat([case.inputs(rank, group.size)["a"] for rank in range(group.size)]).double()
                exact = whole.t() @ dy.double()
                found = [weight_grad(a, dy, by_columns, group.group_name) for by_columns in (False, True)]
                for db, by_columns in zip(found, (False, True)):
                    assert (db.t() if by_columns else db).is_contiguous()
                    assert db.dtype == dtype
                    error = (db.double() - exact).abs()
                    magnitude = whole.abs().t() @ dy.double().abs()
                    bound = torch.finfo(dtype).eps / 2 * exact.abs() + (len(whole) + 4) * 2**-24 * magnitude + 1e-7
                    assert bool((error <= bound).all()), (case, by_columns, (error - bound).max())
                assert_same(weight_grad(a, dy, False, group.group_name), found[0])

    run(program, cluster=cluster)
