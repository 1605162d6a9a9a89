"""What `mkernel.integrations.torchtitan_moe` uses of TorchTitan, as small modules of the same names and interfaces, for
where TorchTitan is not installed; and its experts, as plain PyTorch."""

from __future__ import annotations

import dataclasses
import sys
import types
from dataclasses import dataclass

import torch


class Configurable:
    def __init_subclass__(cls):
        cls.Config._owner = cls

    @dataclass(kw_only=True, slots=True)
    class Config:
        _owner = None  # type: ignore[misc]

        def build(self):
            return type(self)._owner(dataclasses.replace(self))


class Dispatcher(Configurable):
    """Groups tokens by expert on one rank."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        num_experts: int
        top_k: int

    def __init__(self, config):
        self.num_experts, self.top_k, self.ep_mesh = config.num_experts, config.top_k, None

    def wire_meshes(self, *, ep_mesh):
        self.ep_mesh = ep_mesh

    def dispatch(self, x_TD, topk_scores_TK, topk_expert_ids_TK, num_local_tokens_per_expert_E):
        assert self.ep_mesh is None, "all-to-all is not a part of the stand-in"
        order = topk_expert_ids_TK.flatten().argsort(stable=True)
        return x_TD[order // self.top_k], num_local_tokens_per_expert_E, (order, topk_scores_TK)

    def combine(self, routed_output_RD, metadata, x_TD):
        order, scores = metadata
        weighted = routed_output_RD * scores.flatten()[order, None]
        return torch.zeros_like(x_TD).index_add(0, order // self.top_k, weighted)


def derive(source, target, **deltas):
    shared = {field.name for field in dataclasses.fields(source)} & {field.name for field in dataclasses.fields(target)}
    return target(**{name: getattr(source, name) for name in shared} | deltas)


OVERRIDES = {}  # target -> (factory, exact)


def override(*, target, description="", exact=False):
    def register(factory):
        OVERRIDES[target] = factory, exact
        return factory

    return register


def overridden(config, **arguments):
    """What the registered overrides make of a config. They match subclasses of their targets, unless they are exact."""
    for target, (factory, exact) in OVERRIDES.items():
        if type(config) is target or (not exact and isinstance(config, target)):
            return factory(config, **arguments)
    return config


def install(monkeypatch):
    """Let imports find the stand-ins. The integration is imported anew."""

    def module(name, **contents):
        made = types.ModuleType(name)
        made.__dict__.update(contents)
        monkeypatch.setitem(sys.modules, name, made)
        return made

    dispatchers = module("torchtitan.models.common.token_dispatcher", AllToAllTokenDispatcher=Dispatcher)
    common = module("torchtitan.models.common", token_dispatcher=dispatchers)
    models = module("torchtitan.models", common=common)
    config = module("torchtitan.config", derive=derive, override=override)
    module("torchtitan", models=models, config=config)
    monkeypatch.delitem(sys.modules, "mkernel.integrations.torchtitan_moe", raising=False)


class Mesh:
    """A one-dimensional mesh of expert parallelism."""

    def __init__(self, group):
        self.group = group

    def size(self):
        return self.group.size

    def get_group(self):
        return self.group


class Experts(torch.nn.Module):
    """SwiGLU experts, whose parameters have the shapes of TorchTitan's."""

    def __init__(self, w1, w2, w3):
        super().__init__()
        self.w1_EFD, self.w2_EDF, self.w3_EFD = (torch.nn.Parameter(w.clone()) for w in (w1, w2, w3))

    def forward(self, x_RD, num_tokens_per_expert_E):
        offs = torch.cumsum(num_tokens_per_expert_E, dim=0, dtype=torch.int32)

        def multiply(rows, w):
            return torch._grouped_mm(rows.bfloat16(), w.bfloat16().transpose(-2, -1), offs=offs)

        hidden = torch.nn.functional.silu(multiply(x_RD, self.w1_EFD)) * multiply(x_RD, self.w3_EFD)
        return multiply(hidden, self.w2_EDF).type_as(x_RD)
