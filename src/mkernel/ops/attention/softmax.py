"""Online softmax: scores come block by block, and accumulated sums are rescaled to the largest score so far.

`row_max` is the largest score of a row so far, scaled and in units of log2; `total` is the sum of the weights relative
to it; `accumulator` is the sum of the weights times the values. A row that has seen no key has row_max = -inf and
total = 0.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


class State(NamedTuple):
    """The attention of a tile of queries to the keys processed so far."""

    accumulator: Any
    total: Any
    row_max: Any


@triton.jit
def cap_scores(call, scores):
    """Products of queries and keys, or what takes their place: with SOFTCAP, the tanh of each, which is between -1 and
    1. `call.scale` makes scores of either. So a cap that is large against the scores multiplies the error of tanh: near
    zero, where the formula with the exponential loses digits, a polynomial takes its place."""
    if call.SOFTCAP:
        exponent = scores * call.cap_scale
        x = exponent * 0.34657359027997264  # log(2) / 2
        square = x * x
        near_zero = x + x * square * (-1.0 / 3 + square * (2.0 / 15 - square * (17.0 / 315)))
        scores = tl.where(tl.abs(x) < 0.2, near_zero, 1.0 - 2.0 / (1.0 + tl.exp2(exponent)))
    return scores


@triton.jit
def through_cap(call, gradients, scores):
    """Gradients of scores before they were capped. scores: from `cap_scores`."""
    if call.SOFTCAP:
        gradients = gradients * (1.0 - scores * scores)
    return gradients


@triton.jit
def online_softmax_step(scores, total, row_max, scale):
    """(weights, total, row_max, alpha) after one more block of scores. The caller rescales its accumulator by alpha."""
    new_max = tl.maximum(row_max, tl.max(scores, 1) * scale)
    pivot = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(scores * scale - pivot[:, None])
    alpha = tl.exp2(row_max - pivot)
    return weights, total * alpha + tl.sum(weights, 1), new_max, alpha


@triton.jit
def normalize(accumulator, total, row_max):
    """(result, log-sum-exp) of rows after all their keys; zeros and -inf for rows that saw no key."""
    nothing = total == 0.0
    result = accumulator / tl.where(nothing, 1.0, total)[:, None]
    logarithm = (row_max + tl.log2(tl.where(nothing, 1.0, total))) * 0.6931471805599453
    return result, tl.where(nothing, float("-inf"), logarithm)
