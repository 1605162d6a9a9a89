"""What every operator refuses alike: an out that overlaps itself or an input, and types that no kernel knows."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
import torch
from support.operator_calls import assert_same, cluster_name, run

import mkernel as mk

BF16, FP32 = torch.bfloat16, torch.float32
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
TOKENS, HIDDEN, INTER, EXPERTS, K = 6, 16, 8, 2, 2


def values(name, shape, dtype=FP32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(name))).to(dtype)


def ids():
    return torch.arange(TOKENS * K).view(TOKENS, K) % EXPERTS


# operator -> (inputs, the shape of out), on one rank
OPERATORS = {
    "all_gather_matmul": (lambda: dict(a=values("a", (6, 8)), b=values("b", (8, 10))), (6, 10)),
    "all_gather_matmul_weight_grad": (lambda: dict(a=values("a", (6, 8)), dy=values("dy", (6, 10))), (8, 10)),
    "matmul_reduce_scatter": (
        lambda: dict(a=values("a", (6, 8)), b=values("b", (8, 10)), bias=values("bias", (10,)),
                     residual=values("residual", (6, 10))), (6, 10)),
    "matmul_all_reduce": (
        lambda: dict(a=values("a", (6, 8)), b=values("b", (8, 10)), bias=values("bias", (10,)),
                     residual=values("residual", (6, 10))), (6, 10)),
    "ring_attention": (
        lambda: {name: values(name, (1, 2, 8, 64)) for name in ("query", "key", "value")}, (1, 2, 8, 64)),
    "moe_ffn": (
        lambda: dict(x=values("x", (TOKENS, HIDDEN)), topk_ids=ids(), topk_weights=values("topk_weights", (TOKENS, K)),
                     w_gate_up=values("w_gate_up", (EXPERTS, HIDDEN, 2 * INTER)),
                     w_down=values("w_down", (EXPERTS, INTER, HIDDEN))), (TOKENS, HIDDEN)),
    "moe_combine": (
        lambda: dict(y=values("y", (TOKENS * K, HIDDEN)), topk_weights=values("topk_weights", (TOKENS, K))),
        (TOKENS, HIDDEN)),
    "moe_dispatch_matmul": (
        lambda: dict(x=values("x", (TOKENS, HIDDEN)), topk_ids=ids(), w=values("w", (EXPERTS, HIDDEN, INTER))), None),
}  # fmt: skip
WITH_OUT = [name for name, (_, shape) in OPERATORS.items() if shape is not None]


def inputs_of(op):
    return OPERATORS[op][0]()


def call(op, inputs, **more):
    return getattr(mk, op)(**inputs, **(given_before(op) | more if "handle" not in more else more))


def given_before(op):
    """What comes from a call before."""
    if op != "moe_combine":
        return {}
    x, w = torch.ones(TOKENS, HIDDEN), torch.ones(EXPERTS, HIDDEN, 1)
    return dict(handle=mk.moe_dispatch_matmul(x, ids(), w)[1])


def alone(function):
    return run(lambda group: function(), cluster=(1, 1))[0]


def refused(op, inputs, words, **more):
    def work():
        with pytest.raises(mk.ArgumentError) as caught:
            call(op, inputs, **more)
        for word in words:
            assert word in str(caught.value)

    alone(work)


# -- out and itself


def windows(shape, strides):
    return torch.zeros(2**16).as_strided(shape, strides)


OVERLAPPING = {
    "expanded": lambda shape: torch.zeros(shape[-1]).expand(shape),
    "windows": lambda shape: windows(shape, (1,) * len(shape)),
    "rows reach into the next one": lambda shape: windows(
        shape, tuple(4096 >> 4 * i for i in range(len(shape) - 2)) + (shape[-1] - 1, 1)
    ),
    "columns over rows": lambda shape: windows(
        shape, tuple(8192 >> i for i in range(len(shape) - 2)) + (3, 2)
    ),
}  # fmt: skip


@pytest.mark.parametrize("layout", OVERLAPPING)
@pytest.mark.parametrize("op", WITH_OUT)
def test_out_that_overlaps_itself(op, layout):
    shape = OPERATORS[op][1]
    words = ["out ", "several of its elements share one place in memory", f"torch.empty({shape}"]
    refused(op, inputs_of(op), words, out=OVERLAPPING[layout](shape))


def permuted(shape):
    """All dimensions the other way round, in the middle of a wider tensor."""
    wide = torch.full((*(size + 2 for size in reversed(shape)),), -7.0)
    return wide[(slice(1, -1),) * len(shape)].permute(*reversed(range(len(shape))))


def stepped(shape):
    return torch.full(tuple(3 * size for size in shape), -7.0)[(slice(1, None, 3),) * len(shape)]


def column_block(shape):
    return torch.full((*shape[:-1], 3 * shape[-1]), -7.0)[..., shape[-1] : 2 * shape[-1]]


@pytest.mark.parametrize("layout", [permuted, stepped, column_block])
@pytest.mark.parametrize("op", WITH_OUT)
def test_legal_layouts_of_out(op, layout):
    def work():
        expected = call(op, inputs_of(op))
        out = layout(tuple(expected.shape))
        assert call(op, inputs_of(op), out=out) is out
        assert_same(out, expected)

    alone(work)


def test_strides_of_dimensions_of_size_1_mean_nothing():
    def work():
        a, b = values("a", (1, 8)), values("b", (8, 10))
        out = torch.zeros(64).as_strided((1, 10), (0, 1))
        assert_same(mk.all_gather_matmul(a, b, out=out), mk.all_gather_matmul(a, b))
        query = values("query", (1, 1, 8, 64))
        out = torch.zeros(8 * 64).as_strided((1, 1, 8, 64), (1, 0, 64, 1))
        assert_same(mk.ring_attention(query, query, query, out=out), mk.ring_attention(query, query, query))

    alone(work)


# -- out and inputs

PAIRS = [(op, name) for op in WITH_OUT for name in inputs_of(op)]


def placed(tensor, memory, at):
    """The tensor in memory, from this byte on."""
    begin = memory[at : at + tensor.numel() * tensor.element_size()]
    return begin.view(tensor.dtype).view(tensor.shape).copy_(tensor)


@pytest.mark.parametrize("alias", ["view", "numpy", "dlpack"])
@pytest.mark.parametrize(("op", "name"), PAIRS)
def test_out_that_overlaps_an_input(op, name, alias):
    """They begin at different places, have other types and, as aliases, other storages."""
    memory = torch.zeros(2**16, dtype=torch.uint8)
    inputs = inputs_of(op)
    tensor = inputs[name]
    inputs[name] = placed(tensor, memory, 8192)
    share = {"view": lambda: memory, "numpy": lambda: torch.from_numpy(memory.numpy()),
             "dlpack": lambda: torch.from_dlpack(memory)}[alias]()  # fmt: skip
    shape = OPERATORS[op][1]
    nbytes = prod(shape) * 4
    last = 8192 + tensor.numel() * tensor.element_size() - tensor.element_size()
    for begin in (8192 - nbytes + 4, last // 4 * 4):
        out = share[begin : begin + nbytes].view(FP32).view(shape)
        refused(op, inputs, [f"out overlaps {name} in memory", f"torch.empty({shape}"], out=out)


@pytest.mark.parametrize(("op", "name"), PAIRS)
def test_out_beside_an_input(op, name):
    """Right behind it, in the same memory."""

    def work():
        memory = torch.zeros(2**16, dtype=torch.uint8)
        inputs = inputs_of(op)
        inputs[name] = placed(inputs[name], memory, 8192)
        expected = call(op, inputs_of(op))
        at = 8192 + inputs[name].numel() * inputs[name].element_size()
        call(op, inputs, out=placed(torch.zeros_like(expected), memory, at))
        assert_same(memory[at : at + expected.numel() * 4].view(FP32).view(expected.shape), expected)

    alone(work)


@pytest.mark.parametrize("op", ["matmul_reduce_scatter", "matmul_all_reduce"])
@pytest.mark.parametrize("rows", [1, 6])
def test_out_may_be_the_residual(op, rows):
    """It, or another tensor with the same elements in the same places: strides of one row mean nothing."""

    def work():
        inputs = inputs_of(op)
        inputs |= dict(a=inputs["a"][:rows], residual=inputs["residual"][:rows])
        expected = call(op, inputs)
        for strides in [(10, 1)] if rows > 1 else [(10, 1), (0, 1), (3, 1)]:
            residual = inputs["residual"].clone()
            out = torch.from_numpy(residual.numpy()).as_strided((rows, 10), strides)
            call(op, inputs | dict(residual=residual), out=out)
            assert_same(out, expected)

    alone(work)


def test_out_must_not_be_what_the_handle_keeps():
    def work():
        inputs = inputs_of("moe_combine")
        _, handle = mk.moe_dispatch_matmul(torch.ones(TOKENS, HIDDEN), ids(), torch.ones(EXPERTS, HIDDEN, 1))
        kept = handle.tables.destinations.view(FP32)
        with pytest.raises(mk.ArgumentError, match="out overlaps handle"):
            mk.moe_combine(**inputs, handle=handle, out=kept.as_strided((TOKENS, HIDDEN), (HIDDEN, 1)))

    alone(work)


# -- types

ALL_DTYPES = sorted({kind for kind in vars(torch).values() if isinstance(kind, torch.dtype)}, key=str)
ALLOWED = {"topk_ids": (torch.int32, torch.int64), "topk_weights": (*FLOATS, torch.float64)}


def empty(shape, dtype):
    """A tensor of any type, or None where torch makes none."""
    try:
        return torch.empty(shape, dtype=dtype)
    except (RuntimeError, TypeError, NotImplementedError):
        return None


@pytest.mark.filterwarnings("ignore:ComplexHalf", "ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize(("op", "name"), [(op, name) for op in OPERATORS for name in inputs_of(op)])
def test_types(op, name):
    """An input of another type than the rest has, or than any kernel knows."""
    inputs = inputs_of(op)

    def work():
        before = given_before(op)
        for dtype in ALL_DTYPES:
            other = empty(inputs[name].shape, dtype)
            if other is None or dtype in ALLOWED.get(name, (FP32,)):
                continue
            if dtype in FLOATS and name in ("x", "y", "a", "query"):
                continue  # then it is the others that differ
            with pytest.raises(mk.ArgumentError) as caught:
                call(op, inputs | {name: other}, **before)
            assert f"{name} has dtype {dtype}" in str(caught.value)
            assert "torch." in str(caught.value)

    alone(work)


@pytest.mark.parametrize("dtype", ALLOWED["topk_weights"])
@pytest.mark.parametrize("op", ["moe_ffn", "moe_combine"])
def test_types_of_weights(op, dtype):
    def work():
        inputs = inputs_of(op)
        exact = inputs["topk_weights"].bfloat16().float()  # all of these types have it
        expected = call(op, inputs | dict(topk_weights=exact))
        assert_same(call(op, inputs | dict(topk_weights=exact.to(dtype))), expected)

    alone(work)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested():
    w = torch.nested.nested_tensor([torch.ones(HIDDEN, INTER), torch.ones(HIDDEN, INTER)])
    inputs = inputs_of("moe_dispatch_matmul") | dict(w=w)
    refused("moe_dispatch_matmul", inputs, ["w is a nested tensor", "w.to_padded_tensor"])


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (dict(cu_seqlens=torch.tensor([False, True])), ["cu_seqlens must be a 1-D tensor of integers", "torch.bool"]),
        (dict(cu_seqlens=torch.tensor([0, 8 + 1j])), ["cu_seqlens must be"]),
        (dict(scale=True), ["scale must be a number", "True"]),
    ],
)
def test_other_arguments_of_attention(more, words):
    refused("ring_attention", inputs_of("ring_attention"), words, **more)


def test_a_residual_that_is_out_in_another_order():
    """The same bytes, transposed: elements would be read after others were written over them."""
    memory = np.zeros((6, 10), dtype=np.float32)
    inputs = inputs_of("matmul_all_reduce") | dict(residual=torch.from_numpy(memory))
    refused("matmul_all_reduce", inputs, ["out overlaps residual"], out=torch.from_numpy(memory.reshape(10, 6)).t())


# -- configurations

ABSURD = {
    "tile_m": (2**20, "to 4096; got"),
    "tile_n": (2**20, "to 4096; got"),
    "tile_k": (2**20, "to 4096; got"),
    "copy_bytes": (2**30, "to 262144; got"),
    "stages": (10**9, "to 227; got"),
    "warps": (64, "to 32; got"),
    "chunk_rows": (2**63, "to 1073741824; got"),
    "group_m": (2**31 - 1, "to 1024; got"),
    "passes": (2**31, "to 64; got"),
    "held_tiles": (2**31, "to 1024; got"),
    "team_ctas": (32, "to 16; got"),
}


@pytest.mark.parametrize("field", ABSURD)
@pytest.mark.parametrize("op", OPERATORS)
def test_absurd_configurations(op, field):
    value, bound = ABSURD[field]
    refused(op, inputs_of(op), [f"config.{field}", bound, str(value)], config=mk.Config(**{field: value}))


@pytest.mark.parametrize(("field", "most", "value"), [("warps", 32, 12), ("team_ctas", 16, 3), ("team_ctas", 16, 0)])
def test_powers_of_two(field, most, value):
    words = [f"config.{field} must be a power of two from 1 to {most}; got {value}"]
    refused("all_gather_matmul", inputs_of("all_gather_matmul"), words, config=mk.Config(**{field: value}))


GEMMS = [op for op in OPERATORS if op not in ("ring_attention", "moe_combine")]
TOO_LARGE = [
    (dict(tile_m=512, tile_n=256), ["config.tile_m is 512, tile_n 256", "65536 registers", "at most 256"]),
    (dict(tile_n=4096), ["tile_n 4096", "65536 registers", "tile_m may be at most 16"]),
    (dict(tile_m=4096), ["config.tile_m is 4096", "65536 registers"]),
    (dict(tile_m=2048, tile_n=32, tile_k=1024), ["2048 x 1024", "1048576 elements", "tile_k may be at most 512"]),
    (
        dict(tile_m=128, tile_n=128, tile_k=128, stages=5),
        ["config.stages 5", "bytes of shared memory", "232448"],
    ),
    (dict(tile_m=256, tile_n=256, tile_k=512, stages=1), ["config.stages 1", "shared memory", "smaller tile"]),
    (dict(stages=200), ["config.stages 200", "shared memory", "fewer stages"]),
]


@pytest.mark.parametrize(("fields", "words"), TOO_LARGE)
@pytest.mark.parametrize("op", GEMMS)
def test_tiles_that_no_gpu_has_room_for(op, fields, words):
    refused(op, inputs_of(op), words, config=mk.Config(**fields))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (dict(tile_m=512, tile_n=256), ["config.tile_m is 512, tile_n 256", "65536 registers"]),
        (dict(tile_m=2048), ["config.tile_m is 2048", "2048 x 64", "at most 1024"]),
        (dict(tile_m=16, tile_n=4096), ["shared memory"]),
        (dict(stages=100), ["config.stages 100", "shared memory", "fewer stages"]),
    ],
)
def test_tiles_of_attention_that_no_gpu_has_room_for(fields, words):
    refused("ring_attention", inputs_of("ring_attention"), words, config=mk.Config(**fields))


@pytest.mark.parametrize("op", ["moe_dispatch_matmul", "moe_ffn"])
def test_chunks_whose_ids_do_not_fit(op):
    words = ["config.chunk_rows must be a power of two", "at most 32768 with 2 experts for each token", "65536"]
    refused(op, inputs_of(op), words, config=mk.Config(chunk_rows=65536))


LARGEST = {
    "all_gather_matmul": [
        dict(tile_m=4096, tile_n=16), dict(tile_m=16, tile_n=4096), dict(tile_m=16, tile_n=16, tile_k=2048),
        dict(chunk_rows=2**30), dict(copy_bytes=262144), dict(group_m=1024), dict(warps=32), dict(stages=20),
        dict(team_ctas=16), dict(team_ctas=16, tile_m=4096, tile_n=16),
    ],
    "all_gather_matmul_weight_grad": [
        dict(tile_m=4096, tile_n=16), dict(tile_m=16, tile_n=4096), dict(tile_m=16, tile_n=16, tile_k=2048),
        dict(chunk_rows=2**30), dict(copy_bytes=262144), dict(group_m=1024), dict(warps=32), dict(stages=20),
        dict(passes=64), dict(held_tiles=1024),
    ],
    "matmul_all_reduce": [
        dict(tile_m=4096, tile_n=16), dict(group_m=1024), dict(warps=32), dict(stages=20), dict(team_ctas=16),
    ],
    "matmul_reduce_scatter": [
        dict(tile_m=16, tile_n=4096), dict(group_m=1024), dict(warps=32), dict(stages=20),
        dict(team_ctas=16, tile_m=16, tile_n=4096),
    ],
    "ring_attention": [
        dict(tile_m=1024, tile_n=16), dict(tile_m=16, tile_n=512), dict(chunk_rows=2**30), dict(copy_bytes=262144),
        dict(warps=32), dict(stages=10),
    ],
    "moe_ffn": [
        dict(tile_m=2048, tile_n=32), dict(chunk_rows=1024), dict(copy_bytes=262144), dict(group_m=1024),
        dict(warps=32), dict(stages=20),
    ],
    "moe_combine": [dict(copy_bytes=262144), dict(warps=32)],
}  # fmt: skip


@pytest.mark.parametrize(("op", "fields"), [(op, fields) for op, several in LARGEST.items() for fields in several])
def test_largest_configurations(op, fields):
    """What the bounds leave, runs."""

    def work():
        expected = call(op, inputs_of(op))
        y = call(op, inputs_of(op), config=mk.Config(**fields))
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)

    alone(work)


@pytest.mark.parametrize("cluster", [(1, 2), (2, 1), (2, 2)], ids=cluster_name)
def test_one_chunk_is_more_than_there_is(cluster):
    """Between ranks, too, where chunks are copied, sent and waited for."""

    def work(group):
        inputs, config = inputs_of("all_gather_matmul"), mk.Config(chunk_rows=2**30)
        assert_same(mk.all_gather_matmul(**inputs, config=config), mk.all_gather_matmul(**inputs))
        dy = values("dy", (6 * group.size, 10))
        given = inputs["a"], dy
        assert_same(
            mk.all_gather_matmul_weight_grad(*given, config=config), mk.all_gather_matmul_weight_grad(*given)
        )  # fmt: skip
        inputs = inputs_of("ring_attention")
        torch.testing.assert_close(mk.ring_attention(**inputs, config=config), mk.ring_attention(**inputs))

    run(work, cluster=cluster)


@pytest.mark.parametrize("wrong", ["no", 1, None])
def test_switches_are_bools(wrong):
    """Of strings and numbers, most would be true."""

    def on_rank(group):
        a, b, query = torch.ones(2, 16), torch.ones(16, 4), torch.ones(1, 1, 4, 64)
        fp8 = torch.ones(16, 16).to(torch.float8_e4m3fn)
        one = torch.ones(())
        calls = {
            "return_gathered": lambda: mk.all_gather_matmul(a, b, return_gathered=wrong),
            "return_lse": lambda: mk.ring_attention(query, query, query, return_lse=wrong),
            "fixed_order": lambda: mk.matmul_all_reduce(a, b, fixed_order=wrong),
            "use_fast_accum": lambda: mk.all_gather_scaled_matmul(fp8, fp8.t(), one, one, use_fast_accum=wrong),
        }
        for name, call in calls.items():
            with pytest.raises(mk.ArgumentError, match=f"{name} must be True or False, got {wrong!r}"):
                call()
        with pytest.raises(mk.ArgumentError, match="return_gathered must be True or False"):
            mk.all_gather_scaled_matmul(fp8, fp8.t(), one, one, return_gathered=wrong)

    mk.spawn(on_rank, gpus_per_node=1, device="cpu")


def test_explain_takes_names():
    with pytest.raises(mk.ArgumentError, match="there is no function among the names of operators; there are: all"):
        mk.explain(mk.all_gather_matmul, torch.ones(2, 16), torch.ones(16, 4))


def test_plans_mention_no_work_of_ctas_that_do_not_exist():
    """One rank copies nothing."""

    def on_rank(group):
        a, gathered = torch.ones(32, 32), torch.ones(32 * group.size, 32)
        return [
            str(mk.explain("all_gather_matmul", a, a)),
            str(mk.explain("all_gather_matmul_weight_grad", a, gathered)),
        ]

    for plan in mk.spawn(on_rank, gpus_per_node=1, device="cpu")[0]:
        assert "(0 send, 0 intra)" in plan
    for plan in mk.spawn(on_rank, gpus_per_node=2, device="cpu")[0][:1]:
        assert "1 intra, which compute" in plan


def test_tensors_on_other_devices():
    """The error says how to move them."""

    def on_rank(group):
        with pytest.raises(mk.ArgumentError, match=r"b is on meta, but this rank's device is cpu: pass b\.to\(group"):
            mk.all_gather_matmul(torch.ones(2, 16), torch.ones(16, 4, device="meta"))
        fp8, one = torch.ones(16, 16).to(torch.float8_e4m3fn), torch.ones(())
        with pytest.raises(mk.ArgumentError, match=r"scale_b is on meta, .* pass scale_b\.to\(group\.device\)"):
            mk.all_gather_scaled_matmul(fp8, fp8.t(), one, one.to("meta"))

    mk.spawn(on_rank, gpus_per_node=1, device="cpu")
