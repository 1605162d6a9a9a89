"""Hints from kernels to the simulator. On a GPU they compile to nothing."""

import triton


@triton.jit
def waited_for(signals, mask, expected):
    """The signals selected by the mask were waited for until they reached `expected`. The race detector then relies on
    that value, even if the signals happened to be further."""


@triton.jit
def used_below(descriptor, row):
    """From now on, rows from `row` on of what is loaded through the descriptor are not used: another CTA may be writing
    them. (Rows are the last dimension but one. The simulator loads NaN in their place.)"""
