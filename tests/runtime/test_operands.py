"""Which tensors share memory: against every address, one by one. Which of them TMA can read."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mkernel.runtime.hopper import tma_descriptor
from mkernel.runtime.operands import describable, descriptor, matmul_precision, overlap, overlaps_itself

MEMORY = torch.zeros(4096, dtype=torch.uint8)


def addresses(tensor):
    """Where each element begins."""
    places = np.full(tuple(tensor.shape), tensor.data_ptr(), dtype=np.int64)
    for axis, (size, stride) in enumerate(zip(tensor.shape, tensor.stride())):
        steps = np.arange(size) * stride * tensor.element_size()
        places += steps.reshape([-1 if other == axis else 1 for other in range(tensor.dim())])
    return places.reshape(-1)


def every_byte(tensor):
    return set((addresses(tensor)[:, None] + np.arange(tensor.element_size())).reshape(-1).tolist())


@st.composite
def views(draw):
    """Tensors of any layout in one memory, of any type."""
    dimensions = draw(st.integers(1, 4))
    shape = draw(st.lists(st.integers(0, 5), min_size=dimensions, max_size=dimensions))
    strides = draw(st.lists(st.integers(0, 24), min_size=dimensions, max_size=dimensions))
    dtype = draw(st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.int64]))
    return MEMORY.view(dtype).as_strided(shape, strides, draw(st.integers(0, 60)))


@given(views())
def test_a_tensor_with_itself(tensor):
    places = addresses(tensor).tolist()
    assert overlaps_itself(tensor) == (len(set(places)) < len(places))


@given(views(), views())
def test_two_tensors(one, other):
    assert overlap(one, other) == bool(every_byte(one) & every_byte(other))
    assert overlap(other, one) == overlap(one, other)


WIDE = torch.zeros(64, 8, 96)


@pytest.mark.parametrize(
    "tensor",
    [
        WIDE,
        WIDE.permute(2, 0, 1),
        WIDE.transpose(0, 2),
        WIDE[::3, 1::2, ::5],
        WIDE[..., 32:64],
        WIDE[:, :1].expand(64, 1, 96),
        WIDE.as_strided((1, 1, 5), (0, 2**60, 1)),  # strides of dimensions of size 1 mean nothing
        WIDE.as_strided((7, 5), (5, 7)),  # not one inside of the other, and no two in one place
        WIDE.as_strided((0, 4), (0, 0)),
        WIDE.as_strided((), ()),
    ],
)
def test_legal_layouts(tensor):
    assert not overlaps_itself(tensor)


@pytest.mark.parametrize(
    "tensor",
    [
        WIDE[:1].expand(64, 8, 96),
        WIDE.as_strided((8, 6), (1, 1)),  # windows
        WIDE.as_strided((64, 64), (32, 1)),  # rows that reach into the next one
        WIDE.as_strided((8, 6), (5, 7)),
        WIDE.as_strided((2, 2, 2), (1, 2, 3)),
        WIDE.view(-1).unfold(0, 4, 3),
    ],
)
def test_layouts_with_overlaps(tensor):
    assert overlaps_itself(tensor)


def test_storages_that_share_memory():
    """Aliases by numpy and by dlpack, slices of them, and other types."""
    memory = np.zeros((8, 8), dtype=np.float32)
    one = torch.from_numpy(memory)
    assert overlap(one, torch.from_numpy(memory[2:]))
    assert overlap(one, torch.from_dlpack(one)[:, 4:])
    assert overlap(one[:4], one.view(torch.int16)[3:])
    assert not overlap(one[:4], torch.from_numpy(memory[4:]))
    assert not overlap(one[:, :4], torch.from_numpy(memory[:, 4:]))
    assert not overlap(one.view(torch.int16)[:, ::2], one.view(torch.int16)[:, 1::2])


def test_large_tensors_side_by_side():
    """Sizes of real models, on paper: what is interleaved is told apart."""
    frame = torch.empty(2**15, 2**14, device="meta")
    for one, other in [
        (frame[::2], frame[1::2]),
        (frame[:, ::2], frame[:, 1::2].t()),
        (frame[:, : 2**13], frame[:, 2**13 :].t()),
        (frame.view(2**15, 128, 128)[:, :, :64], frame.view(2**15, 128, 128)[:, :, 64:].permute(2, 0, 1)),
    ]:
        placed = [Placed(tensor) for tensor in (one, other)]
        assert not overlap(*placed)
        assert overlap(placed[0], Placed(frame))


class Placed:
    """A tensor on paper."""

    def __init__(self, tensor):
        self.shape, self._tensor = tensor.shape, tensor

    def stride(self):
        return self._tensor.stride()

    def element_size(self):
        return self._tensor.element_size()

    def numel(self):
        return self._tensor.numel()

    def data_ptr(self):
        return 2**44 + self._tensor.storage_offset() * self._tensor.element_size()


# -- which tensors TMA can read

ALIGNED = torch.empty(2**16, dtype=torch.float16)  # torch aligns it to 64 bytes


@pytest.mark.parametrize(
    ("shape", "strides", "start", "good"),
    [
        ((4, 8), (8, 1), 0, True),
        ((4, 8), (8, 1), 8, True),
        ((4, 8), (8, 1), 1, False),  # where it begins
        ((4, 8), (1, 4), 0, False),  # columns
        ((4, 8), (12, 1), 0, False),  # where rows begin
        ((4, 8), (0, 1), 0, False),  # an expanded row
        ((4, 16), (8, 1), 0, False),  # rows that overlap
        ((1, 8), (3, 1), 0, True),  # of one row, where the next would begin does not matter
        ((0, 8), (8, 1), 0, False),
        ((4, 0), (8, 1), 0, False),
        ((2, 4, 8), (32, 8, 1), 0, True),
        ((2, 4, 8), (0, 8, 1), 0, False),  # one matrix for all experts
        ((2, 4, 8), (36, 8, 1), 0, False),
        ((1, 4, 8), (36, 8, 1), 0, True),
        ((2, 3, 4, 8), (96, 8, 24, 1), 0, True),  # heads beside each other in a row
        ((2, 3, 4, 8), (96, 4, 24, 1), 0, False),
        ((2, 3, 4, 8), (96, 0, 24, 1), 0, False),
        ((2, 3, 4, 8), (96, 8, 24, 2), 0, False),
    ],
)
def test_tma_reads_aligned_rows_of_any_number_of_dimensions(shape, strides, start, good):
    assert ALIGNED.data_ptr() % 16 == 0
    assert describable(ALIGNED.as_strided(shape, strides, start)) is good


def test_descriptors_of_a_single_row_have_an_aligned_stride():
    """Also those of the kernels for Hopper: TMA refuses others, although nothing depends on it."""
    row = torch.empty(1, 310, dtype=torch.bfloat16)[:, :304]
    assert describable(row)
    for made in (descriptor(row, [1, 304], [310, 1], [64, 128]), tma_descriptor(row, 1, 304, 310, [64, 128])):
        assert made.strides == [312, 1]


@pytest.mark.parametrize("name", ["allow_tf32", "fp32_precision"])
def test_precision_is_read_whichever_setting_the_user_has_changed(name):
    settings = torch.backends.cuda.matmul
    values = {"allow_tf32": (True, False), "fp32_precision": ("tf32", "ieee")}[name]
    try:
        for value, expected in zip(values, ("tf32", "ieee")):
            setattr(settings, name, value)
            assert matmul_precision(torch.float32) == expected
            assert matmul_precision(torch.bfloat16) == "tf32"
    finally:
        settings.fp32_precision = "none"
