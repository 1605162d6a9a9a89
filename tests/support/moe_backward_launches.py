"""What the backward pass of moe_ffn launches, for tests that compile it."""

from __future__ import annotations

import torch

from mkernel.compiling import launched
from mkernel.ops.moe import bias_grad, ffn, gradient_rows, grouped_matmul, redispatch, weight_grad
from mkernel.ops.moe.grouped import empty_rows

EXPERTS, K, TOKENS, SIZE = 16, 8, 1024, 2048  # of a rank, of a token, of a rank, and of a token and of its results
STEPS = {  # kernel -> step
    "moe_redispatch_matmul_kernel": "redispatch",
    "moe_redispatch_kernel": "redispatch alone",
    "moe_gated_backward_kernel": "gated",
    "moe_combine_backward_kernel": "combine",
    "moe_weight_grad_kernel": "weight grad",
    "moe_grouped_matmul_kernel": "product",
    "moe_bias_grad_kernel": "bias grad",
    "moe_nothing_kernel": "nothing",
}


def backward_launch(step, dtype=torch.bfloat16, capability=90):
    """What rank 0 of two nodes launches in a step of the backward pass of moe_ffn."""

    def prepare(group):
        x, ids = torch.empty(TOKENS, SIZE, dtype=dtype), torch.empty(TOKENS, K, dtype=torch.int64)
        weights, out = torch.empty(TOKENS, K), torch.empty(TOKENS, SIZE, dtype=dtype)
        gate_up = torch.empty(EXPERTS, 2 * SIZE, SIZE, dtype=dtype).transpose(1, 2)
        down = torch.empty(EXPERTS, SIZE, SIZE, dtype=dtype)
        sizes = ffn.agree(group, x, ids, down, None, TOKENS, None)
        given = (group, x, ids, weights, gate_up, down, out, sizes, None)
        launch, handle, _ = ffn.prepare_kept(*given, "activations")
        here = (group, launch.arguments["context"], handle)

        def rows(columns):
            return empty_rows(group, handle.capacity, columns, dtype, 128)

        steps = {
            "forward": lambda: launch,
            "redispatch": lambda: redispatch.prepare(group, handle, x, down.transpose(1, 2), weights)[0],
            "redispatch alone": lambda: redispatch.prepare(group, handle, x, None, weights)[0],
            "gated": lambda: gradient_rows.gated_backward(*here, weights, rows(2 * SIZE), rows(SIZE), rows(2 * SIZE))[
                0
            ],
            "gated with bias": lambda: gradient_rows.gated_backward(
                *here, weights, rows(2 * SIZE), rows(SIZE), rows(2 * SIZE), "silu", (down[:, 0], rows(SIZE))
            )[0],
            "bias grad": lambda: bias_grad.prepare(*here, rows(SIZE), weights.view(-1))[0],
            "nothing": lambda: gradient_rows.nothing(*here[:2], "moe_weight_grad"),
            "combine": lambda: gradient_rows.combine_backward(*here, weights, rows(SIZE), rows(SIZE))[0],
            "weight grad": lambda: weight_grad.prepare(*here, rows(SIZE), rows(2 * SIZE))[0],
            "product": lambda: grouped_matmul.prepare(
                *here, handle.tables.placed, rows(2 * SIZE), gate_up.transpose(1, 2)
            )[0],
        }
        return steps[step]()

    return launched(prepare, (2, 2), capability)
