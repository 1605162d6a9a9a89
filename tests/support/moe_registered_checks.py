"""Checks of the registered mixture-of-experts operators, which a program runs on each of its ranks."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode

import mkernel as mk
from mkernel.ops.library import encoded, registered
from support.compiled_checks import compiled, graphs_made
from support.moe_gradients import ffn_gradients, halves_gradients
from support.moe_reference import SMALL, Layer

SCALED = "moe_dispatch_scaled_matmul"
EXPERTS, K, HIDDEN, INTER, TOKENS = 2, 2, 16, 8, 6  # of a rank; TOKENS is the most of any rank
CALLS = {
    "ffn": ("x", "weights", "gate_up", "down"), "halves": ("x", "weights", "w"),
    "biased ffn": ("x", "weights", "gate_up", "down", "b_gate_up", "b_down"),
    "biased halves": ("x", "weights", "w", "bias"),
    "rows": ("x", "weights"),
}  # fmt: skip


def layer_of(group):
    tokens = tuple(TOKENS - rank % 2 for rank in range(group.size))
    return Layer(tokens, (EXPERTS,) * group.size, k=K, hidden=HIDDEN, out=INTER, dtype=torch.float32, has_bias=True)


def leaves(group, names, transposed=True):
    """Inputs of this rank that require grad."""
    layer, made = layer_of(group), []
    for name in names:
        tensor = getattr(layer, name)(group.rank).nan_to_num(0.0)
        if transposed and tensor.dim() == 3:
            tensor = tensor.transpose(1, 2).contiguous().transpose(1, 2)
        made.append(tensor.requires_grad_())
    return made


def call_of(group, name, **more):
    ids = layer_of(group).ids(group.rank)
    return with_ids(group, name, ids, **more)


def gradients(function, inputs):
    for each in inputs:
        each.grad = None
    y = function(*inputs)
    y.square().sum().backward()
    return [y.detach(), *(each.grad for each in inputs)]


def check_gradients(group):
    """Beside float64, as in the simulator."""
    for save in ("inputs", "activations"):
        for check in (ffn_gradients, halves_gradients):
            check(group, layer_of(group), save=save)
    ffn_gradients(group, layer_of(group), 1, config=SMALL, max_tokens=TOKENS)


def calls(group):
    """Every registered operator of the family, with arguments of all kinds."""
    name, ids = group.group_name, layer_of(group).ids(group.rank)
    x, weights, gate_up, down = leaves(group, CALLS["ffn"])
    w = leaves(group, ["w"], transposed=False)[0]
    plain = [each.detach() for each in (x, weights, gate_up, down)]
    config, capacity = encoded(SMALL), group.size * TOKENS * K
    numbers = [K, EXPERTS, capacity, TOKENS, 8, 16]
    dout, out = torch.ones(len(x), HIDDEN), torch.zeros(len(x), HIDDEN)
    _, tables, rows, pre = registered("moe_ffn", "_kept")(
        plain[0], ids, *plain[1:], None, None, name, numbers, "silu", True, config
    )
    y, routed, _ = torch.ops.mkernel.moe_dispatch_matmul(plain[0], ids, w.detach(), None, name, numbers, False, config)
    y = torch.zeros_like(y)  # its rows beyond the counts are not written
    short = torch.zeros(len(x), INTER)
    bare, biases = (*plain, None, None), [torch.ones(EXPERTS, n, requires_grad=True) for n in (2 * INTER, HIDDEN)]
    biased = (*plain, *[each.detach() for each in biases])
    none, all_four = [True, False, False, False], [True, True, True, True]
    return [
        ("moe_ffn", "", (bare[0], ids, *bare[1:], name, None, None, "silu")),
        ("moe_ffn", "", (biased[0], ids, *biased[1:], name, capacity, TOKENS, "gelu", config)),
        ("moe_ffn", "_out", (bare[0], ids, *bare[1:], name, None, TOKENS, "relu", None, out)),
        ("moe_ffn", "_kept", (x, ids, weights, gate_up, down, None, None, name, numbers, "relu", False)),
        ("moe_ffn", "_kept", (x, ids, weights, gate_up, down, *biases, name, numbers, "silu", True, config)),
        ("moe_ffn", "_backward", (dout, *bare, tables, rows, pre, name, numbers, "silu", none)),
        ("moe_ffn", "_backward", (dout, *biased, tables, rows[:0], pre[:0], name, numbers, "gelu", all_four)),
        ("moe_dispatch_matmul", "", (x, ids, w, None, name, numbers, False)),
        ("moe_dispatch_matmul", "", (x, ids, w, torch.ones(EXPERTS, INTER), name, numbers, True, config)),
        (
            "moe_dispatch_matmul", "_backward",
            (y, plain[0], w.detach(), routed, rows[:0], name, numbers, [True, True]),
        ),
        ("moe_dispatch", "", (x, ids, name, numbers)),
        ("moe_dispatch", "", (plain[0], ids, name, numbers, config)),
        ("moe_dispatch", "_backward", (torch.ones(capacity, HIDDEN), routed, len(x), name, numbers)),
        ("moe_combine", "", (y.detach().requires_grad_(), routed, weights, name, numbers)),
        ("moe_combine", "_out", (y, routed, plain[1], name, numbers, None, short)),
        ("moe_combine", "_backward", (short.clone(), y, routed, plain[1], name, numbers)),
    ]  # fmt: skip


def check_opcheck(group):
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    made = calls(group)
    for operator, variant, arguments in made:
        # what is not written of tables and rows differs between two runs, which the last test would compare
        whole = variant != "_kept" and (operator, variant) not in (("moe_dispatch_matmul", ""), ("moe_dispatch", ""))
        used = (*tests, "test_aot_dispatch_dynamic") if whole else tests
        outcome = torch.library.opcheck(registered(operator, variant).default, arguments, test_utils=used)
        assert set(outcome.values()) == {"SUCCESS"}, (operator, variant, outcome)
    checked = {operator + variant for operator, variant, _ in made}
    everything = {each.name for each in torch._C._jit_get_all_schemas() if each.name.startswith("mkernel::moe_")}
    check_opcheck_scaled(group)
    check_opcheck_scaled_ffn(group)
    assert checked | {SCALED} == {name.removeprefix("mkernel::") for name in everything}


def check_opcheck_scaled(group):
    """In fp8. torch cannot compare fp8 tensors, which other checks do."""
    layer, config = layer_of(group), encoded(mk.Config(tile_m=16, tile_n=32, tile_k=32))
    x, ids = layer.x(group.rank), layer.ids(group.rank)
    w, scale_w = (each.transpose(1, 2) for each in mk.quantize(layer.w(group.rank).transpose(1, 2).contiguous()))
    bias, name = torch.ones(EXPERTS, INTER).bfloat16(), group.group_name
    numbers = [K, EXPERTS, group.size * TOKENS * K, TOKENS, 8, 16]
    narrow, scale_x = mk.quantize(x)
    for arguments in (
        (narrow, ids, w, scale_x, scale_w, bias, name, numbers, torch.bfloat16, False, config),
        (x, ids, w, None, scale_w, None, name, numbers, torch.float32, True, config, "RowWise", torch.float8_e5m2),
    ):
        checks = ("test_autograd_registration", "test_faketensor")
        outcome = torch.library.opcheck(registered(SCALED).default, arguments, test_utils=checks)
        assert set(outcome.values()) == {"SUCCESS"}, outcome


def check_opcheck_scaled_ffn(group):
    layer, config = layer_of(group), encoded(mk.Config(tile_m=16, tile_n=32, tile_k=32))
    x, ids, weights = layer.x(group.rank), layer.ids(group.rank), layer.weights(group.rank).nan_to_num(0.0)
    gate_up = mk.quantize(layer.gate_up(group.rank).transpose(1, 2).contiguous())
    down = mk.quantize(layer.down(group.rank).transpose(1, 2).contiguous(), "BlockWise128x128")
    (w1, scale_1), (w2, scale_2) = ([each.transpose(1, 2) for each in pair] for pair in (gate_up, down))
    narrow, scale_x = mk.quantize(x)
    given, rest = (ids, weights, w1, w2), (scale_1, scale_2, group.group_name, None, TOKENS, "silu")
    out = torch.zeros(x.shape, dtype=torch.bfloat16)
    numbers = [K, EXPERTS, group.size * TOKENS * K, TOKENS, 8, 16]
    leaves_of = (x.clone().requires_grad_(), ids, weights.clone().requires_grad_(), w1, w2, None, scale_1, scale_2)
    for variant, arguments in (
        ("_kept", (*leaves_of, group.group_name, numbers, "silu", config, "RowWise")),
        ("", (narrow, *given, scale_x, *rest, config)),
        ("", (x, *given, None, *rest, None, "RowWise")),
        ("_out", (narrow, *given, scale_x, *rest, None, None, None, out)),
    ):
        checks = ("test_autograd_registration", "test_faketensor")
        outcome = torch.library.opcheck(registered("scaled_moe_ffn", variant).default, arguments, test_utils=checks)
        assert set(outcome.values()) == {"SUCCESS"}, outcome


def layout(tensor):
    return tuple(tensor.shape), tensor.stride(), tensor.dtype


def check_fake_tensors(group):
    """The same shapes, strides and dtypes as on real tensors, with no call on the group, and a backward pass."""
    for name in CALLS:
        real = gradients(call_of(group, name), leaves(group, CALLS[name]))
        exchanges = group._exchanges
        with FakeTensorMode() as mode:
            fakes = [mode.from_tensor(each.detach()).requires_grad_() for each in leaves(group, CALLS[name])]
            ids = mode.from_tensor(layer_of(group).ids(group.rank))
            made = gradients(with_ids(group, name, ids), fakes)
        assert group._exchanges == exchanges, "a fake call has talked to other ranks"
        assert [layout(each) for each in made] == [layout(each) for each in real]


def with_ids(group, name, ids, **more):
    more = dict(group=group, max_tokens=TOKENS) | more

    def ffn(x, p, up, down, b_up=None, b_down=None):
        return mk.moe_ffn(x, ids, p, up, down, b_gate_up=b_up, b_down=b_down, **more)

    def halves(x, p, w, bias=None):
        y, handle = mk.moe_dispatch_matmul(x, ids, w, bias=bias, **more)
        return mk.moe_combine(y.sigmoid(), handle, p, group=group)

    def rows(x, p):
        y, handle = mk.moe_dispatch(x, ids, EXPERTS, **{key: more[key] for key in more if key != "save"})
        return mk.moe_combine(y.sigmoid(), handle, p, group=group)

    return rows if name == "rows" else ffn if name.endswith("ffn") else halves


def check_compiled(group):
    """One graph, and the same bits."""
    for name, names in CALLS.items():
        for more in ({}, dict(save="activations", capacity=group.size * TOKENS * K + 5)):
            inputs = leaves(group, names)
            expected = gradients(call_of(group, name, **more), inputs)
            found = gradients(compiled(call_of(group, name, **more)), inputs)
            assert graphs_made() == 1, counters
            for one, other in zip(found, expected, strict=True):
                assert torch.equal(one, other)
    with torch.no_grad():  # no gradients, no sizes: max_tokens may be left out
        inputs = leaves(group, CALLS["ffn"])
        y = call_of(group, "ffn")(*inputs)
        assert torch.equal(compiled(call_of(group, "ffn", max_tokens=None))(*inputs), y)


def check_compiled_in_fp8(group):
    """A layer, and the halves of one: one graph, and the same bits, gradients included."""
    layer, rank = layer_of(group), group.rank
    ids = layer.ids(rank)
    w, scale_w = (each.transpose(1, 2) for each in mk.quantize(layer.w(rank).transpose(1, 2).contiguous()))
    module = mk.nn.ExpertParallelMoE(
        HIDDEN, INTER, EXPERTS * group.size, K, fp8="RowWise", group=group, max_tokens=TOKENS
    )

    def halves(x, p):
        more = dict(group=group, max_tokens=TOKENS, recipe_x="RowWise", out_dtype=torch.float32)
        y, handle = mk.moe_dispatch_scaled_matmul(x, ids, w, None, scale_w, **more)
        return mk.moe_combine(y.sigmoid(), handle, p, group=group)

    for function, names, parameters in ((halves, ("x", "weights"), []), (module, ("x",), list(module.parameters()))):
        inputs, results = leaves(group, names), []
        for each in (function, compiled(function)):
            module.zero_grad()
            results.append([*gradients(each, inputs), *(parameter.grad for parameter in parameters)])
        assert graphs_made() == 1, counters
        for one, other in zip(*results, strict=True):
            assert torch.equal(one, other)


def check_what_a_graph_needs(group):
    for name, names in CALLS.items():
        with pytest.raises(Exception, match="max_tokens must be given where a call is traced"):
            compiled(call_of(group, name, max_tokens=None))(*leaves(group, names))


def check_autocast(group):
    for name, names in CALLS.items():
        with torch.autocast("cpu", torch.bfloat16):
            y, *found = gradients(call_of(group, name), leaves(group, names))
        assert y.dtype == (torch.float32 if name == "rows" else torch.bfloat16)  # what does not multiply does not cast
        assert all(each.dtype == torch.float32 for each in found)


def run(group):
    """All checks, in the order in which they are written."""
    for name, function in list(globals().items()):
        if name.startswith("check_"):
            function(group)
            group.barrier()
