"""Whole layers: `mkernel plan --layer mlp`. What they call is said in mkernel.nn.layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mkernel import operators
from mkernel.runtime.errors import ArgumentError
from mkernel.scale.machine import Machine
from mkernel.scale.predict import predict

LAYERS = "mkernel.nn.layers:LAYERS"


@dataclass(frozen=True)
class Sum:
    """A layer's time on `nodes` nodes, in seconds: that of its calls, one after the other."""

    layer: str
    way: str  # "forward" or "backward"
    shape: tuple[int, ...]
    nodes: int
    seconds: float
    floor: float
    host: float
    parts: list[dict[str, Any]]

    def to_dict(self) -> dict[str, Any]:
        return {
            "layer": self.layer, "way": self.way, "shape": list(self.shape), "nodes": self.nodes, "modelled": True,
            "fused_ms": self.seconds * 1e3, "floor_ms": self.floor * 1e3, "host_driven_ms": self.host * 1e3,
            "floor_fraction": self.floor / self.seconds, "speedup": self.host / self.seconds, "parts": self.parts,
        }  # fmt: skip


def names() -> list[str]:
    return list(operators.resolve(LAYERS))


def parse(name: str, text: str | None) -> tuple[int, ...]:
    """The shape of a layer; its default if none is given."""
    known = operators.resolve(LAYERS)
    if name not in known:
        raise ArgumentError(f"there is no layer {name!r}; there are {', '.join(known)}")
    layer = known[name]
    if text is None:
        return layer.shape
    numbers = text.lower().split("x")
    if len(numbers) != len(layer.dimensions) or not all(number.isdigit() and int(number) for number in numbers):
        example = "x".join(map(str, layer.shape))
        raise ArgumentError(f"{text!r} is not a shape of {name}; write {' x '.join(layer.dimensions)}: {example}")
    return tuple(map(int, numbers))


def shape_on(shape: tuple[int, ...], nodes: int, first: int, weak: bool) -> tuple[int, ...]:
    """The shape on `nodes` nodes, given that for `first` nodes: the first number, the tokens, grows."""
    return (shape[0] * nodes // first, *shape[1:]) if weak else shape


def check(name: str, shape: Sequence[int], ranks: int) -> None:
    """Refuse a shape that cannot be divided as the layer divides it."""
    layer = operators.resolve(LAYERS)[name]
    for dimension, number in zip(layer.dimensions, shape):
        part = layer.parts[dimension](ranks) if dimension in layer.parts else 1
        if number % part:
            raise ArgumentError(
                f"{'x'.join(map(str, shape))}: {dimension} of {name} ({number}) must be divisible by {part}, with "
                f"{ranks} ranks"
            )


def layer_on(
    name: str, shape: Sequence[int], nodes: int, gpus_per_node: int, machine: Machine, dtype: torch.dtype
) -> list[Sum]:  # fmt: skip
    """The forward and the backward pass of a layer."""
    layer = operators.resolve(LAYERS)[name]
    found = []
    for way in ("forward", "backward"):
        parts: list[dict[str, Any]] = []
        for part in getattr(layer, way)(tuple(shape), nodes * gpus_per_node):
            if part.op:
                one = predict(
                    part.op, part.shape, machine=machine, nodes=nodes, gpus_per_node=gpus_per_node, dtype=dtype,
                    options=part.options,
                )  # fmt: skip
                times = (one.seconds, one.floor, one.host)
            else:
                local = part.flops / machine.library_flops[part.library]
                times = (local + machine.launch_seconds, local, local + machine.launch_seconds)
            parts.append({"name": part.name, "op": part.op, "fused_ms": times[0] * 1e3, "floor_ms": times[1] * 1e3,
                          "host_driven_ms": times[2] * 1e3})  # fmt: skip
        seconds, floor, host = (sum(part[key] for part in parts) / 1e3
                                for key in ("fused_ms", "floor_ms", "host_driven_ms"))  # fmt: skip
        found.append(Sum(name, way, tuple(shape), nodes, seconds, floor, host, parts))
    return found
