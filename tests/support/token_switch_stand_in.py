"""The interface of torch.distributed._token_switch of PyTorch 2.15, as `mkernel.integrations.token_switch` uses it, for
versions that do not have it. What an implementation inherits: dispatch and combine, each the gradient of the other."""

from __future__ import annotations

import sys
import types
from dataclasses import dataclass

import torch
import torch.distributed


@dataclass(frozen=True)
class Routing:
    handle: object
    topk_idx: torch.Tensor
    layout: str = "flat"


class Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, switch, routing, tokens, weights, rows):
        ctx.given = switch, routing, tokens.shape
        outputs = switch._alloc_dispatch_outputs(routing, tokens, weights, rows, tokens.shape[1], weights.shape[1])
        switch._dispatch(routing, tokens, weights, *outputs)
        return outputs

    @staticmethod
    def backward(ctx, gradient, *_):
        switch, routing, shape = ctx.given
        found = gradient.new_zeros(shape)
        switch._combine(routing, gradient.contiguous(), found)
        return None, None, found, None, None


class Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, switch, routing, rows):
        ctx.given = switch, routing, rows.shape
        out = rows.new_zeros(len(routing.topk_idx), rows.shape[1])
        switch._combine(routing, rows, out)
        return out

    @staticmethod
    def backward(ctx, gradient):
        switch, routing, shape = ctx.given
        weights = torch.zeros(routing.topk_idx.shape)
        most = switch._max_recv_tokens_per_rank
        outputs = switch._alloc_dispatch_outputs(routing, gradient, weights, most, shape[1], weights.shape[1])
        switch._dispatch(routing, gradient.contiguous(), weights, *outputs)
        return None, None, outputs[0][: shape[0]]


class TokenSwitch:
    def dispatch(self, routing, tokens, topk_weights, max_recv_tokens=None, *, out=None):
        if out is None:
            return Dispatch.apply(self, routing, tokens, topk_weights, max_recv_tokens)
        self._dispatch(routing, tokens, topk_weights, *out)
        return out

    def combine(self, routing, expert_tokens, *, out=None):
        if out is None:
            return Combine.apply(self, routing, expert_tokens)
        self._combine(routing, expert_tokens, out)
        return out


def install(monkeypatch):
    """Let imports find the stand-in. The integration is imported anew."""
    made = types.ModuleType("torch.distributed._token_switch")
    made.__dict__.update(TokenSwitch=TokenSwitch, Routing=Routing)
    monkeypatch.setitem(sys.modules, made.__name__, made)
    monkeypatch.setattr(torch.distributed, "_token_switch", made, raising=False)
    monkeypatch.delitem(sys.modules, "mkernel.integrations.token_switch", raising=False)
