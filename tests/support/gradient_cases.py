"""Calls whose gradients are tested: in the simulator, and in processes."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, combinations

import torch

from support.gradient_reference import GATHER, REDUCE, SCATTER, SMALL, Case

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
GATHERED = {"return_gathered": True}


def growing(size, step, first=0):
    """A different number for each rank; `first` for the first one."""
    return tuple(first + step * rank for rank in range(size))


def main_cases(size):
    """Every operator, with every kind of argument."""
    w, w0 = {"b": "transposed"}, {"b0": "transposed"}
    return [
        Case(GATHER, (6, 24), 20, options={"config": SMALL}),
        Case(GATHER, (6, 24), 20, BF16, bias=True, layouts=w),
        Case(GATHER, (2, 3, 24), 20, FP16, dim=1, bias=True, layouts={"a": "reversed", "dy": "reversed"}),
        Case(GATHER, (2, 3, 24), 20, BF16, used=("y", "gathered"), options={**GATHERED, "save": "gathered"}),
        Case(GATHER, (6, 24), growing(size, 16), BF16, layouts=w),  # rank 0 has no columns
        Case(GATHER, (2, 3, 24), [20, 7], BF16, dim=1, used=("y0", "y1"), layouts=w0),
        Case(GATHER, (6, 24), [20, 7, 4], used=("y2", "gathered"), options=GATHERED),
        Case(GATHER, (2, 3, 24), [24, 0, 7], BF16, dim=1, used=("y0", "y1", "y2"), layouts=w0, adjoined=True),
        Case(GATHER, (6, 24), [20, 8, 3], used=("y0", "y2", "gathered"), options=GATHERED, adjoined=True),
        Case(SCATTER, (6 * size, 24), 20, bias=True, residual=True, options={"config": SMALL}),
        Case(SCATTER, (2, 3 * size, 24), 20, BF16, dim=1, bias=True, residual=True, layouts={**w, "dy": "transposed"}),
        Case(SCATTER, (2 * size, growing(size, 16)), 20, FP16, requires=("b",), layouts=w),  # rank 0 has a k of 0
        Case(REDUCE, (6, 24), 20, bias=True, residual=True, options={"config": SMALL}),
        Case(REDUCE, (2, 3, 24), 20, BF16, bias=True, residual=True, layouts={**w, "a": "gaps", "dy": "gaps"}),
        Case(REDUCE, (5, growing(size, 16)), 20, FP16, layouts=w),
    ]


def small_cases(size):
    """Ones and zeros for the sizes, and more dimensions."""
    ones = [
        Case(GATHER, (1, 1), 1, bias=True),
        Case(GATHER, (1, 1, 1, 1), 1, BF16, dim=-2, layouts={"b": "transposed"}),
        Case(GATHER, (1, 8), [1, 3], used=("y0", "y1")),
        Case(SCATTER, (size, 1), 1, BF16, bias=True, residual=True),
        Case(REDUCE, (1, 1), 1, bias=True, residual=True),
        Case(REDUCE, (8,), 5, bias=True, residual=True),
    ]
    dimensions = [
        Case(GATHER, (2, 3, 2, 8), 5, dim=2, bias=True, layouts={"a": "transposed", "dy": "transposed"}),
        Case(GATHER, (2, 3, 2, 8), [5, 3], dim=-3, used=("y0", "y1", "gathered"), options=GATHERED),
        Case(SCATTER, (2, 3, 2 * size, 8), 5, dim=2, bias=True, residual=True, layouts={"a": "reversed"}),
        Case(SCATTER, (2, size, 3, 8), 5, dim=-3, residual=True, layouts={"dy": "wide", "residual": "reversed"}),
        Case(REDUCE, (2, 3, 2, 8), 5, bias=True, residual=True, layouts={"a": "reversed", "dy": "reversed"}),
    ]
    zeros = [
        Case(GATHER, (0, 8), 5, bias=True),
        Case(GATHER, (3, 0, 8), 5, bias=True, used=("y", "gathered"), options=GATHERED),
        Case(GATHER, (3, 0, 8), [5, 2], dim=1, used=("y0", "y1")),
        Case(GATHER, (3, 8), 0, bias=True),
        Case(GATHER, (2, 3, 8), 0, BF16, dim=1, used=("y", "gathered"), options={**GATHERED, "save": "gathered"}),
        Case(GATHER, (3, 8), [0, 0], used=("y0", "y1")),
        Case(GATHER, (3, 0), 5, bias=True),
        Case(GATHER, (2, 3, 0), 5, dim=1),
        Case(SCATTER, (0, 8), 5, bias=True, residual=True),
        Case(SCATTER, (2, 0, 8), 5, dim=1, bias=True, residual=True),
        Case(SCATTER, (2 * size, 0), 5, bias=True, residual=True),
        Case(SCATTER, (2 * size, 3, 8), 0, bias=True, residual=True),
        Case(SCATTER, (2 * size, 3, 0), 0),
        Case(REDUCE, (0, 8), 5, bias=True, residual=True),
        Case(REDUCE, (3, 0, 8), 5, bias=True, residual=True),
        Case(REDUCE, (2, 3, 0), 5, bias=True, residual=True),
        Case(REDUCE, (2, 3, 8), 0, bias=True, residual=True),
    ]
    return ones + dimensions + zeros


def subsets(*names):
    """The nonempty ones."""
    return list(chain.from_iterable(combinations(names, count) for count in range(1, len(names) + 1)))


def frozen_cases(size):
    """Only some of the inputs require grad, in every combination."""
    cases = [
        (Case(GATHER, (3, 8), 5, BF16, bias=True), ("a", "b", "bias")),
        (Case(GATHER, (3, 8), 5, BF16, used=("y", "gathered"), options=GATHERED), ("a", "b")),
        (Case(GATHER, (3, 8), 5, BF16, options={"save": "gathered"}), ("a", "b")),
        (Case(GATHER, (3, 8), [5, 4], BF16, used=("y0", "y1")), ("a", "b0", "b1")),
        (Case(GATHER, (3, 8), [8, 5], BF16, used=("y0", "y1"), adjoined=True), ("a", "b0", "b1")),
        (Case(GATHER, (3, 8), [5, 4], BF16, used=("y0",), options={"save": "gathered"}), ("a", "b0")),
        (Case(SCATTER, (3 * size, 8), 5, BF16, bias=True, residual=True), ("a", "b", "bias", "residual")),
        (Case(REDUCE, (3, 8), 5, BF16, bias=True, residual=True), ("a", "b", "bias", "residual")),
    ]
    return [replace(case, requires=names) for case, inputs in cases for names in subsets(*inputs)]


def tiled_cases(size, turn=0):
    """Several tiles and chunks in every dimension: every operator in every dtype and in every layout. One dtype for
    each layout, another one in each turn; three turns have all of them."""
    layouts = ["plain", "transposed", "gaps", "wide"]
    found = []
    for i, dtype in enumerate((FP32, BF16, FP16)):
        for j, layout in enumerate(layouts):
            if (i - j - turn) % 3:
                continue
            given = {"a": layouts[(i + j) % 4], "b": layout, "dy": layouts[(i + 2 * j + 1) % 4]}
            options = {"config": SMALL} if j % 2 else {}
            more = dict(options=options, adjoined=bool(j % 2))
            reduced = options | ({"reduce_dtype": FP32} if dtype != FP32 and j < 2 else {})
            found += [
                Case(GATHER, (35, 40), 50, dtype, bias=bool(j % 2), layouts=given, options=options),
                Case(GATHER, (35, 40), [48 if j % 2 else 50, 33], dtype, used=("y0", "y1"), layouts=given, **more),
                Case(SCATTER, (35 * size, 40), 50, dtype, residual=bool(j % 2), layouts=given, options=reduced),
                Case(REDUCE, (45, 40), 50, dtype, bias=bool(j % 2), layouts=given, options=reduced),
            ]
    return found


def second_cases(size):
    """Calls of which gradients of gradients are tested."""
    return [
        Case(GATHER, (3, 8), 5, bias=True),
        Case(GATHER, (3, 8), growing(size, 2, first=3), layouts={"b": "transposed"}, options={"save": "gathered"}),
        Case(GATHER, (2, 3, 8), [5, 4], dim=1, used=("y0", "y1", "gathered"), options=GATHERED),
        Case(GATHER, (3, 8), [5, 4], used=("y0", "y1"), options={"save": "gathered"}),
        Case(GATHER, (3, 8), [4, 5], used=("y0", "y1"), layouts={"b0": "transposed"}, adjoined=True),
        Case(SCATTER, (3 * size, 8), 5, bias=True, residual=True),
        Case(SCATTER, (3 * size, 8), 5, requires=("b",), layouts={"b": "transposed"}),
        Case(REDUCE, (3, 8), 5, bias=True, residual=True),
        Case(REDUCE, (3, growing(size, 4, first=4)), 5, requires=("a", "b"), layouts={"b": "transposed"}),
    ]


def gpu_cases(size):
    """Shapes that take every kernel of a GPU, by name: those for Hopper, and the portable ones."""
    w = {"b": "transposed"}
    return {
        "gather": Case(GATHER, (256, 512), 384, BF16, layouts=w),
        "gather, odd": Case(GATHER, (129, 65), 257, bias=True),
        "gather, bias": Case(GATHER, (2, 128, 256), 320, FP16, dim=1, bias=True, layouts={**w, "dy": "transposed"}),
        "gather, saved": Case(GATHER, (256, 256), 512, BF16, layouts=w, used=("y", "gathered"),
                              options={**GATHERED, "save": "gathered"}),
        "gather, list": Case(GATHER, (320, 256), [512, 128, 128], BF16, used=("y0", "y1", "y2"),
                             layouts={"b0": "transposed", "b1": "transposed", "b2": "transposed"}),
        "gather, adjoined": Case(GATHER, (320, 256), [512, 128, 128], BF16, used=("y0", "y1", "y2"), adjoined=True,
                                 layouts={"b0": "transposed"}),
        "gather, uneven": Case(GATHER, (128, 128), growing(size, 128), BF16, layouts=w),  # rank 0 has no columns
        "scatter": Case(SCATTER, (256 * size, 192), 512, BF16, bias=True, residual=True, layouts=w),
        "scatter, plain": Case(SCATTER, (256 * size, 256), 512, BF16, layouts=w),
        "scatter, odd": Case(SCATTER, (33 * size, 65), 129, bias=True, residual=True),
        "scatter, weight": Case(SCATTER, (128 * size, 128), 256, FP16, requires=("b",), layouts=w),
        "reduce": Case(REDUCE, (256, 192), 512, BF16, bias=True, residual=True, layouts=w),
    }  # fmt: skip
