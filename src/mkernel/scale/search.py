"""The best split of CTAs and the best chunks for a call, according to the model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace

from mkernel.runtime.config import Config
from mkernel.runtime.errors import ArgumentError
from mkernel.runtime.world import Links
from mkernel.scale.cluster import member, plan_of
from mkernel.scale.predict import Prediction

# What the model can tell apart. Tiles have a speed of their own, which only a GPU can tell.
MODELLED = ("send_ctas", "intra_ctas", "join_tiles", "ctas", "chunk_rows", "steps")
PASSES = 3
NOISE = 0.005  # a gain that is worth another configuration


def best(predicted: Prediction, again: Callable[[Config], Prediction], sms: int, capability: int) -> Prediction:
    """Improve a prediction field by field, over the values that tuning would try. again: predicts with a configuration.
    The result's config is Config() if nothing is better than the default."""
    from mkernel import operators

    operator = operators.find(predicted.op)
    if operator.space is None:
        return predicted
    nodes, gpus = predicted.nodes, predicted.gpus_per_node
    with member(nodes, gpus, 0, ctas=sms, capability=capability, links=Links()) as group:
        plan = plan_of(group, operator, predicted.shape, predicted.dtype, predicted.options, None)
        space = operator.load("space")(group, plan)
    axes = space.hopper if getattr(plan, "hopper", False) else space.portable
    axes = {name: axes[name] for name in MODELLED if name in axes}
    if "chunk_rows" in axes:
        default = plan.config.chunk_rows
        axes["chunk_rows"] = sorted({*axes["chunk_rows"], max(default // 4, 1), max(default // 2, 1), 2 * default})
    if nodes > 1 and "intra_ctas" in axes:
        axes["send_ctas"] = [1, 2, 4]
    config, found = Config(), predicted
    for _ in range(PASSES):
        before = found
        for name, values in axes.items():
            for value in values:
                candidate = replace(config, **{name: value})
                with contextlib.suppress(ArgumentError):  # a configuration that does not run
                    tried = again(candidate)
                    if tried.seconds < found.seconds * (1 - NOISE):
                        config, found = candidate, tried
        if found is before:
            break
    return found
