"""ring_attention as an attention implementation of Hugging Face transformers: with stand-ins for its two registries,
and with transformers itself where it is installed."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import mkernel as mk
from mkernel.integrations import huggingface

CAUSAL, FULL = SimpleNamespace(is_causal=True), SimpleNamespace(is_causal=False)  # layers of a model


class Registry:
    def __init__(self):
        self.functions = {}

    def register(self, name, function):
        self.functions[name] = function


@pytest.fixture
def transformers(monkeypatch):
    """What `register` uses of transformers."""
    module = ModuleType("transformers")
    module.AttentionInterface, module.AttentionMaskInterface = Registry(), Registry()
    monkeypatch.setitem(sys.modules, "transformers", module)
    return module


def registered(transformers, **options):
    """The two functions that transformers gets."""
    huggingface.register("mine", **options)
    return transformers.AttentionInterface.functions["mine"], transformers.AttentionMaskInterface.functions["mine"]


def values(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def spawn(function, nodes=1, gpus_per_node=2):
    mk.spawn(function, nodes=nodes, gpus_per_node=gpus_per_node, device="cpu")


@pytest.mark.parametrize(("nodes", "gpus"), [(1, 1), (1, 3), (2, 2)])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize(("module", "is_causal"), [(CAUSAL, None), (FULL, None), (FULL, True)])
def test_attention(transformers, nodes, gpus, layout, module, is_causal):
    """As scaled_dot_product_attention of the whole sequence, which need not be a multiple of twice the ranks."""
    attend, make_mask = registered(transformers, layout=layout)
    query, key, value = values(2, 4, 36, 64, seed=1), values(2, 2, 36, 64, seed=2), values(2, 2, 36, 64, seed=3)
    causal = module.is_causal if is_causal is None else is_causal
    exact = F.scaled_dot_product_attention(
        query.double(), key.double(), value.double(), is_causal=causal, scale=0.2, enable_gqa=True
    ).transpose(1, 2)
    ids = torch.arange(72).view(2, 36)

    def on_rank(group):
        part = huggingface.part_of(ids, layout=layout)
        mine = part["position_ids"][0]
        assert torch.equal(part["input_ids"], ids[:, mine])
        assert bool(part["attention_mask"].all())
        skip = {"allow_is_causal_skip": causal, "allow_is_bidirectional_skip": not causal}
        mask = make_mask(batch_size=2, q_length=len(mine), kv_length=len(mine), attention_mask=None, **skip)
        output, weights = attend(
            module, query[:, :, mine], key[:, :, mine], value[:, :, mine], mask, dropout=0.0, scaling=0.2,
            is_causal=is_causal, position_ids=part["position_ids"], use_cache=False,
        )  # fmt: skip
        assert weights is None
        assert output.is_contiguous()
        error = (output.double() - exact[:, mine]).abs().max().item()
        assert error <= 3 * torch.finfo(torch.float32).eps * value.abs().max().item(), error

    spawn(on_rank, nodes, gpus)


def test_capped_scores(transformers):
    """As Gemma 2 has them."""
    attend, _ = registered(transformers)

    def on_rank(group):
        query = values(1, 2, 4, 64, seed=group.rank)
        output, _ = attend(**attention_call(group, softcap=1.5))
        expected = mk.ring_attention(query, query, query, is_causal=True, softcap=1.5)
        assert torch.equal(output, expected.transpose(1, 2))
        assert not torch.equal(output, attend(**attention_call(group))[0])

    spawn(on_rank)


def sliding(size):
    return lambda batch, head, row, key: (key <= row) & (key > row - size)


def chunks_of_3(batch, head, row, key):
    return (key <= row) & (key // 3 == row // 3)


def to_both_sides(batch, head, row, key):
    return abs(row - key) < 3


def of_documents(batch, head, row, key):
    return sliding(3)(batch, head, row, key) & torch.tensor([True, False])[row]


def of_late_documents(batch, head, row, key):
    return sliding(3)(batch, head, row, key) & ((row < 300) == (key < 300))


def to_images(batch, head, row, key):
    return sliding(3)(batch, head, row, key) | ((row >= 100) & (row < 120) & (key >= 100) & (key < 120))


def dilated(batch, head, row, key):
    return sliding(7)(batch, head, row, key) & ((row - key) % 3 == 0)


def with_a_missing_table(batch, head, row, key):
    raise KeyError("documents")


def one_position_only(batch, head, row, key):
    return True


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_sliding_windows(transformers, layout):
    """Told by the layer, by its mask, or by both; as a mask in scaled_dot_product_attention."""
    attend, make_mask = registered(transformers, layout=layout)
    query, key, value = values(1, 2, 24, 64, seed=1), values(1, 1, 24, 64, seed=2), values(1, 1, 24, 64, seed=3)
    rows, keys = torch.arange(24)[:, None], torch.arange(24)
    seen = sliding(5)(0, 0, rows, keys)
    exact = F.scaled_dot_product_attention(query, key, value, attn_mask=seen, enable_gqa=True).transpose(1, 2)

    def on_rank(group):
        mine = huggingface.positions_of(24 // group.size, layout)
        mask = make_mask(kv_length=len(mine), local_size=5, mask_function=sliding(5))
        assert mask == (5,)
        for given, window in ((mask, 5), (mask, None), (None, 5)):
            output, _ = attend(
                CAUSAL, query[:, :, mine], key[:, :, mine], value[:, :, mine], given, sliding_window=window,
                position_ids=mine[None],
            )  # fmt: skip
            assert torch.allclose(output, exact[:, mine], atol=1e-5)

    spawn(on_rank)


def attention_call(group, **changes):
    """Arguments of a call that is right but for the changes."""
    query = values(1, 2, 4, 64, seed=group.rank)
    position_ids = huggingface.positions_of(4)[None]
    arguments = dict(module=CAUSAL, query=query, key=query, value=query, attention_mask=None, position_ids=position_ids)
    return arguments | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            dict(attention_mask=torch.ones(1, 1, 4, 4)),
            r"attention_mask must be None, got a mask of shape \(1, 1, 4, 4\)",
        ),
        (dict(dropout=0.1), r"dropout must be 0, got 0.1: call model.eval\(\)"),
        (dict(s_aux=torch.ones(2)), "s_aux was passed, but ring_attention has no support for attention sinks"),
        (dict(cu_seq_lens_q=torch.tensor([0, 4])), "no support for packed documents"),
        (dict(sliding_window=0), "sliding_window must be at least 1, or None, got 0"),
        (dict(sliding_window=7, is_causal=False), "sliding_window is 7.*in causal attention only"),
        (
            dict(sliding_window=7, attention_mask=huggingface.Window(3)),
            "sliding_window is 7, but the layer's mask is for a window of 3",
        ),
        (dict(output_attentions=True), "output_attentions must be False"),
        (dict(query=torch.ones(1, 2, 1, 64)), "key has 4 positions and query has 1, as in decoding with a cache"),
        (
            dict(key=torch.ones(1, 3, 4, 64), value=torch.ones(1, 3, 4, 64)),
            "2 heads, which is not a multiple of key's 3",
        ),
    ],
)
def test_what_is_refused(transformers, changes, message):
    attend, _ = registered(transformers)

    def on_rank(group):
        with pytest.raises(mk.ArgumentError, match=message):
            attend(**attention_call(group, **changes))
        attend(**attention_call(group, sliding_window=8, softcap=None))  # the group can be used, and this is no window

    spawn(on_rank)


def test_what_one_rank_refuses_fails_on_all(transformers):
    attend, make_mask = registered(transformers)

    def on_rank(group):
        late = "" if group.rank else "rank 1 refused its call of "
        wrong = attention_call(group, dropout=0.5 if group.rank else 0.0)
        with pytest.raises(mk.ArgumentError, match=f"{late}.*dropout must be 0"):
            attend(**wrong)
        padding = torch.ones(1, 4)
        padding[0, 0] = 1 - group.rank
        with pytest.raises(mk.ArgumentError, match=f"{late}.*attention_mask marks padding"):
            attend(**attention_call(group, attention_mask=make_mask(kv_length=4, attention_mask=padding)))
        attend(**attention_call(group, attention_mask=make_mask(kv_length=4, attention_mask=torch.ones(1, 4))))

    spawn(on_rank)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_positions_are_checked(transformers, layout):
    attend, _ = registered(transformers, layout=layout)

    def on_rank(group):
        # what a model numbers its tokens with if it is passed no position_ids
        with pytest.raises(mk.ArgumentError, match=f"position_ids.*but in the {layout} layout"):
            attend(**attention_call(group, position_ids=torch.arange(4)[None]))
        right = huggingface.positions_of(4, layout)[None]
        for _ in range(2):  # as two layers do
            attend(**attention_call(group, position_ids=right))
        attend(**attention_call(group, position_ids=None))
        unchecked = huggingface.RingAttention(layout, None, check_positions=False)
        unchecked.attend(**attention_call(group, position_ids=torch.arange(4)[None]))

    spawn(on_rank)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(local_size=7), "mask is local to 7 positions, and the sequence has 8"),
        (dict(local_size=3, mask_function=chunks_of_3), "not chunks or windows to both sides"),
        (dict(local_size=3, mask_function=to_both_sides), "not chunks or windows to both sides"),
        (dict(local_size=3, mask_function=sliding(4)), "mask is local to 3 positions"),
        *(
            (dict(local_size=3, mask_function=function), "mask is local to 3 positions")
            for function in (of_documents, with_a_missing_table, one_position_only)
        ),
        (dict(allow_is_causal_skip=False), "neither causal nor full.*pass an attention_mask of ones"),
        (dict(attention_mask=torch.tensor([[True, True, True, False]])), "attention_mask marks padding"),
    ],
)
def test_masks_that_are_refused(transformers, arguments, message):
    _, make_mask = registered(transformers)

    def on_rank(group):
        with pytest.raises(mk.ArgumentError, match=message):
            make_mask(batch_size=1, q_length=4, kv_length=4, q_offset=0, kv_offset=0, **arguments)
        assert make_mask(batch_size=1, q_length=4, kv_length=4, local_size=8) is None

    spawn(on_rank)


def test_windows_are_told_from_what_differs_late():
    others = [
        (of_late_documents, 3),
        (to_images, 3),
        (dilated, 7),
        (chunks_of_3, 3),
        (to_both_sides, 3),
        (sliding(4), 3),
    ]
    for function, size in others:
        assert not huggingface._is_sliding_window(function, size, 400), function
    for size in (1, 2, 399):
        for length in (size + 1, 400):
            assert huggingface._is_sliding_window(sliding(size), size, length)


def test_parts_that_are_refused():
    def on_rank(group):
        for ids, options, message in (
            (torch.ones(2, 9), {}, "input_ids has 9 positions, which is not a multiple of 2"),
            (torch.ones(2, 7), dict(layout="zigzag"), "input_ids has 7 positions, which is not a multiple of 2"),
            (torch.ones(8), {}, r"input_ids must be a tensor \[batch, length\], got shape \(8,\)"),
            ([1, 2], {}, r"input_ids must be a tensor \[batch, length\], got list"),
            (torch.ones(2, 8), dict(layout="ring"), "layout must be one of 'contiguous', 'zigzag'; got 'ring'"),
        ):
            with pytest.raises(mk.ArgumentError, match=message):
                huggingface.part_of(ids, **options)

    spawn(on_rank)


def test_a_layout_that_does_not_exist(transformers):
    with pytest.raises(mk.ArgumentError, match="layout must be one of 'contiguous', 'zigzag'; got 'ring'"):
        huggingface.register(layout="ring")
    assert not transformers.AttentionInterface.functions


def test_without_transformers(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(mk.MKernelError, match=r"transformers 4.53 or newer: pip install 'mkernel-gpu\[huggingface\]'"):
        huggingface.register()


def test_models_of_transformers():
    """A Llama gives the logits of the whole sequence, each rank its part of them."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    shape = dict(vocab_size=97, hidden_size=128, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2)
    config = transformers.LlamaConfig(**shape, num_key_value_heads=1, head_dim=64)
    torch.manual_seed(0)
    plain = transformers.LlamaForCausalLM(config).eval()
    ids = torch.randint(97, (2, 24))
    logits = plain.double()(ids).logits
    logits.square().sum().backward()
    gradients = {name: parameter.grad.clone() for name, parameter in plain.named_parameters()}
    exact = logits.detach()
    state = plain.float().state_dict()

    def on_rank(group, layout):
        name = f"mkernel_{layout}"
        huggingface.register(name, layout=layout)
        model = transformers.LlamaForCausalLM._from_config(config, attn_implementation=name).eval()
        model.load_state_dict(state)
        part = huggingface.part_of(ids, layout=layout)
        mine = part["position_ids"][0]
        with torch.no_grad():
            for use_cache in (True, False):
                logits = model(**part, use_cache=use_cache).logits
                assert (logits.double() - exact[:, mine]).abs().max().item() <= 1e-5
            with pytest.raises(mk.ArgumentError, match="position_ids"):
                model(part["input_ids"])
            with pytest.raises(mk.ArgumentError, match="attention_mask marks padding"):
                model(**part | dict(attention_mask=torch.zeros_like(part["input_ids"])))
            if layout == "zigzag":
                with pytest.raises(mk.ArgumentError, match="pass an attention_mask of ones"):
                    model(**part | dict(attention_mask=None), use_cache=False)
        model(**part).logits.square().sum().backward()
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    for layout in ("contiguous", "zigzag"):
        found = mk.spawn(on_rank, layout, nodes=1, gpus_per_node=2, device="cpu")
        for name, gradient in gradients.items():
            total = sum(of_rank[name].double() for of_rank in found)
            assert (total - gradient).abs().max().item() <= 1e-4 * (1 + gradient.abs().max().item()), name


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_windows_of_transformers(layout):
    """Layers with a window, and a window that the sequence fits in, of which transformers makes no mask."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    shape = dict(vocab_size=97, hidden_size=64, intermediate_size=32, num_hidden_layers=1, num_attention_heads=1)
    ids = torch.arange(16)[None]
    torch.manual_seed(0)
    config = transformers.MistralConfig(**shape, num_key_value_heads=1, head_dim=64)
    state = transformers.MistralForCausalLM(config).state_dict()

    def model_of(window, implementation):
        config.sliding_window = window
        model = transformers.MistralForCausalLM._from_config(config, attn_implementation=implementation).eval()
        model.load_state_dict(state)
        return model

    exact = {}
    with torch.no_grad():
        for window in (16, 15, 3):
            exact[window] = model_of(window, "eager")(ids, use_cache=False).logits
    assert (exact[16] - exact[3]).abs().max() > 1e-3

    def on_rank(group):
        huggingface.register(layout=layout)
        part = huggingface.part_of(ids, layout=layout)
        for window, expected in exact.items():
            with torch.no_grad():
                logits = model_of(window, "mkernel")(**part, use_cache=False).logits
            assert (logits - expected[:, part["position_ids"][0]]).abs().max().item() <= 1e-5

    spawn(on_rank)


def test_gemma_of_transformers():
    """Layers with and without a window, and capped scores; with gradients."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.Gemma2Config(
        vocab_size=97, hidden_size=64, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=64, sliding_window=4, attn_logit_softcapping=2.0, query_pre_attn_scalar=4,
    )  # fmt: skip
    ids = torch.arange(16)[None]
    torch.manual_seed(0)
    plain = transformers.Gemma2ForCausalLM._from_config(config, attn_implementation="eager").eval()
    logits = plain(ids, use_cache=False).logits
    logits.square().sum().backward()
    gradients = {name: parameter.grad.clone() for name, parameter in plain.named_parameters()}
    state, exact = plain.state_dict(), logits.detach()

    def on_rank(group):
        huggingface.register()
        model = transformers.Gemma2ForCausalLM._from_config(config, attn_implementation="mkernel").eval()
        model.load_state_dict(state)
        part = huggingface.part_of(ids)
        logits = model(**part, use_cache=False).logits
        assert (logits - exact[:, part["position_ids"][0]]).abs().max().item() <= 1e-4
        logits.square().sum().backward()
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    found = mk.spawn(on_rank, nodes=1, gpus_per_node=2, device="cpu")
    for name, gradient in gradients.items():
        total = sum(of_rank[name] for of_rank in found)
        assert (total - gradient).abs().max().item() <= 1e-4 * (1 + gradient.abs().max().item()), name


def test_chunks_of_transformers_are_refused():
    pytest.importorskip("transformers", reason="transformers is not installed")
    from transformers import masking_utils

    make = {
        "sliding": masking_utils.sliding_window_causal_mask_function(4),
        "chunked": masking_utils.chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.int64)),
    }
    attention = huggingface.RingAttention("contiguous", None, check_positions=True)

    def on_rank(group):
        given = dict(kv_length=8, local_size=4)
        assert attention.make_mask(**given, mask_function=make["sliding"]) == huggingface.Window(4)
        with pytest.raises(mk.ArgumentError, match="not chunks"):
            attention.make_mask(**given, mask_function=make["chunked"])

    spawn(on_rank)
