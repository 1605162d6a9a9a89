"""What kernels tell the simulator. On a GPU these are nothing at all."""

import triton


@triton.jit
def waited_for(signals, mask, expected):
    """These signals, those that the mask chooses, have been waited for until they were as expected. No more than that
    is sure: they may have gone further, by chance."""


@triton.jit
def used_below(descriptor, row):
    """Of what is loaded through the descriptor from now on, rows from `row` on are not used: somebody may be writing
    them. (The rows are those of the last dimension but one. The simulator puts NaN in their place.)"""
