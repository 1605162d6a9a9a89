"""Can this GPU's memory be shared by dma-buf, as RDMA devices need it? Asked of the driver, with no such device."""

import ctypes
import os

import pytest
import torch

DMA_BUF_SUPPORTED = 124  # CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED
DMA_BUF = 1  # CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
NBYTES = 4 << 20


@pytest.fixture(scope="module")
def driver():
    torch.zeros(1, device="cuda")  # makes the context
    library = ctypes.CDLL("libcuda.so.1")
    supported = ctypes.c_int(0)
    assert library.cuDeviceGetAttribute(ctypes.byref(supported), DMA_BUF_SUPPORTED, 0) == 0
    if not supported.value:
        pytest.skip("the driver of this machine cannot share memory by dma-buf")
    return library


def share(library, memory: torch.Tensor) -> int:
    file = ctypes.c_int(-1)
    begin = memory.data_ptr() // 4096 * 4096
    call = library.cuMemGetHandleForAddressRange
    call.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_int, ctypes.c_uint64]
    status = call(ctypes.byref(file), begin, memory.numel(), DMA_BUF, 0)
    if status == 0:
        os.close(file.value)
    return status


def test_memory_of_torch(driver):
    assert share(driver, torch.zeros(NBYTES, dtype=torch.uint8, device="cuda")) == 0


def test_symmetric_memory(driver):
    """What the heap of several processes is made of."""
    symmetric = pytest.importorskip("torch.distributed._symmetric_memory")
    assert share(driver, symmetric.empty(NBYTES, dtype=torch.uint8, device="cuda")) == 0
