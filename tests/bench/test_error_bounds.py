"""The bounds of the errors that benchmarks accept."""

import pytest
import torch

from mkernel.bench.problems import fast_accumulation_bound
from mkernel.ops.reduce.bench import bound_of

KEPT = 13  # bits below the largest addend of an instruction that Hopper's tensor cores keep


def accumulated(products):
    """Sums over the last dimension as Hopper's tensor cores compute them: the sum, and 32 products at a time, truncated
    at the last bit that is kept."""
    total = torch.zeros(products.shape[0], dtype=torch.float64)
    for some in products.split(32, dim=1):
        addends = torch.cat([total[:, None], some], dim=1)
        unit = 2.0 ** (addends.abs().amax(1, keepdim=True).log2().floor() - KEPT)
        total = ((addends / unit).trunc() * unit).sum(1)
    return total


@pytest.mark.parametrize("depth", [1024, 4096])
def test_fast_accumulation(depth):
    """The bound holds for what it was derived for, with room for more elements than these, and little more."""
    generator = torch.Generator().manual_seed(depth)
    a, b = torch.randn(2, 4096, depth, generator=generator, dtype=torch.float64)
    error = (accumulated(a * b) - (a * b).sum(1)).abs().max().item()
    assert fast_accumulation_bound(depth) / 8 < error < fast_accumulation_bound(depth)


def test_a_sum_over_ranks_adds_the_errors_of_all():
    exactly, fast = (bound_of(8192, 2048, 4, torch.bfloat16, fast) for fast in (False, True))
    assert fast - exactly == pytest.approx(2 * fast_accumulation_bound(2048))
