"""Repeated launches: the parameters of kernels, which of them depend on tensors, and what the driver is passed. The
driver is a stand-in; test_versions.py compares parameters with those that compiled kernels declare."""

import ctypes
import struct
from types import SimpleNamespace

import pytest

from mkernel.runtime import cuda_driver
from mkernel.runtime.cuda_driver import INVALID_CONTEXT, SCRATCH, Kernel, Patch, Ready, TensorMap, Unknown, find_patches

A, B, OUT, WORKSPACE = 0x7000_0000_0000, 0x7000_0010_0000, 0x7000_0020_0000, 0x7000_0030_0000
TENSORS = [(A, 4096), (B, 4096), (0, 0), (OUT, 8192)]


def word(value):
    return value.to_bytes(8, "little")


def tensor_map(address):
    return TensorMap(address, 10, 2, (64, 32), (32, 1), (16, 32), 3)


KERNEL = Kernel(77, 132, 384, 200_000)


class Stream:
    cuda_stream = 0x55


class StandIn:
    """A driver that keeps what it is passed."""

    def __init__(self, results=()):
        self.launches = []
        self.contexts = []
        self._results = list(results)

    def launch(self, config, function, parameters, extra):
        config = ctypes.cast(config, ctypes.POINTER(cuda_driver._LaunchConfig))[0]
        self.launches.append((tuple(config.grid), tuple(config.block), config.shared_bytes, config.stream))
        self.function = function.value
        self.parameters = parameters
        return self._results.pop(0) if self._results else 0

    def parameter_sizes(self, function):
        return self.sizes

    def current_context(self, where):
        ctypes.cast(where, ctypes.POINTER(ctypes.c_void_p))[0] = 99
        return 0

    def make_tensor_map(self, where, element_type, rank, address, shape, strides, block, steps, *options):
        assert where.value % cuda_driver.TENSOR_MAP_ALIGNMENT == 0
        numbers = [element_type.value, rank.value, *shape, *strides[: rank.value - 1], *block, *steps]
        self.encoded = [address.value, *numbers, *(option.value for option in options)]
        ctypes.memmove(where.value, word(address.value) + bytes(range(120)), 128)
        return 0

    def move_tensor_map(self, where, address):
        assert where.value % cuda_driver.TENSOR_MAP_ALIGNMENT == 0
        ctypes.memmove(where.value, word(address.value), 8)
        self.moved = getattr(self, "moved", 0) + 1
        return 0

    def set_context(self, context):
        self.contexts.append(context.value)
        return 0

    def check(self, code):
        if code:
            raise RuntimeError(f"CUDA error {code}")

    def read(self, i, size):
        return ctypes.string_at(self.parameters[i], size)


@pytest.fixture
def driver(monkeypatch):
    made = StandIn()
    monkeypatch.setattr(cuda_driver, "driver", lambda: made)
    return made


def ready_for(driver, parameters):
    driver.sizes = [cuda_driver.size_of(value) for value in parameters]
    return Ready(KERNEL, Stream(), parameters, find_patches(parameters, TENSORS), kept=None)


def test_parameters_that_depend_on_tensors():
    maps = [tensor_map(A), tensor_map(WORKSPACE), tensor_map(OUT + 64)]
    parameters = [word(WORKSPACE), maps[0], word(A), bytes(4), maps[1], word(B + 256), word(7), maps[2]]
    assert find_patches(parameters, TENSORS) == [Patch(1, 0, 0), Patch(2, 0, 0), Patch(5, 1, 256), Patch(7, 3, 64)]


def test_the_end_of_a_tensor_is_not_part_of_it():
    assert find_patches([word(A + 4095), word(A + 4096), word(A - 1)], TENSORS) == [Patch(0, 0, 4095)]


def test_overlapping_tensors_are_not_repeated():
    with pytest.raises(Unknown, match="could be of either"):
        find_patches([word(A)], [(A, 4096), (A + 4000, 4096)])


def test_other_addresses(driver):
    parameters = [word(WORKSPACE), tensor_map(A), bytes([1, 2, 3, 4]), word(A), word(OUT + 8), bytes([9])]
    ready = ready_for(driver, parameters)
    assert driver.encoded == [A, 9, 2, 32, 64, 64, 32, 16, 1, 1, 0, 3, 2, 0]
    for moved in (0, 4096, 12288):
        ready.start([A + moved, B, 0, OUT + 2 * moved])
        assert driver.function == 77
        assert driver.launches[-1] == ((132, 1, 1), (384, 1, 1), 200_000, 0x55)
        assert driver.read(0, 8) == word(WORKSPACE)
        assert driver.read(1, 128) == word(A + moved) + bytes(range(120))
        assert driver.read(2, 4) == bytes([1, 2, 3, 4])
        assert driver.read(3, 8) == word(A + moved)
        assert driver.read(4, 8) == word(OUT + 2 * moved + 8)
        assert driver.read(5, 1) == bytes([9])
    assert driver.moved == 3


def test_a_tensor_map_is_moved_only_if_its_tensor_is_elsewhere(driver):
    ready = ready_for(driver, [tensor_map(A)])
    for _ in range(3):
        ready.start([A, B, 0, OUT])
    assert driver.moved == 1


def test_a_launch_after_one_that_failed_halfway(driver):
    """The addresses of the last launch are those of a parameter that is no longer there."""
    ready = ready_for(driver, [word(A), tensor_map(OUT)])
    ready.start([A, B, 0, OUT])
    move = driver.move_tensor_map
    driver.move_tensor_map = lambda where, address: 1
    with pytest.raises(RuntimeError, match="CUDA error 1"):
        ready.start([A + 4096, B, 0, OUT + 4096])
    driver.move_tensor_map = move
    ready.start([A, B, 0, OUT])
    assert driver.read(0, 8) == word(A)
    assert driver.read(1, 8) == word(OUT)


def test_a_thread_without_a_context_gets_that_of_the_launch(driver):
    ready = ready_for(driver, [word(A)])
    driver._results = [INVALID_CONTEXT, 0]
    ready.start([A, B, 0, OUT])
    assert driver.contexts == [99]
    assert len(driver.launches) == 2
    driver._results = [700]
    with pytest.raises(RuntimeError, match="700"):
        ready.start([A, B, 0, OUT])


def test_a_kernel_with_other_parameters_is_left_to_triton(driver):
    driver.sizes = [8, 8]
    with pytest.raises(Unknown, match="bytes"):
        Ready(KERNEL, Stream(), [word(A)], [], kept=None)


def compiled_with(signature, **metadata):
    return SimpleNamespace(src=SimpleNamespace(signature=signature), metadata=SimpleNamespace(**metadata))


def test_numbers():
    kinds = {"a": "i32", "b": ("i64", ("fp32", "constexpr")), "c": "u8", "d": "i1", "e": "*fp32", "f": "constexpr"}
    values = {"a": -5, "b": (2**40, (0.5, 3)), "c": 200, "d": True, "e": None, "f": "x"}
    assert cuda_driver.parameters_of(compiled_with(kinds), values) == [
        struct.pack("<i", -5), struct.pack("<q", 2**40), struct.pack("<f", 0.5), bytes([200]), bytes([1]), bytes(8),
        SCRATCH, SCRATCH,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("signature", "metadata"),
    [({"a": "fp8e4nv"}, {}), ({"a": "i32"}, {"num_ctas": 2}), ({"a": "i32"}, {"global_scratch_size": 128}),
     ({"a": "tensordesc<bf16[128, 64]>"}, {"tensordesc_meta": None}), ({"a": "i32"}, {"tensordesc_meta": [{}]})],
)  # fmt: skip
def test_what_is_not_certain_is_left_to_triton(signature, metadata):
    with pytest.raises(Unknown):
        cuda_driver.parameters_of(compiled_with(signature, **metadata), {"a": 1})


def test_structures_are_laid_out_as_the_driver_s():
    # CUlaunchConfig of cuda.h
    assert cuda_driver._LaunchConfig.stream.offset == 32
    assert ctypes.sizeof(cuda_driver._LaunchConfig) == 56
