"""Copies of kernels with other device functions, for what is compiled: the copy alone calls them, and must."""

import pytest
import triton
from support.package_copies import copied
from support.scenarios import Gathers

import mkernel as mk
from mkernel.lang import signals
from mkernel.ops.all_gather_matmul import kernel, protocol, transfer
from mkernel.ops.all_gather_matmul.protocol import notify_chunk


@triton.jit
def notify_all_but_one(comm, gather, peer, source, chunk):
    if chunk != 1:
        notify_chunk(comm, gather, peer, source, chunk)


def compiled_from(module):
    """What Triton knows a kernel by: its source, and that of all that it calls."""
    return module.kernel.all_gather_matmul_kernel.cache_key


@pytest.mark.thorough
def test_the_copy_calls_other_functions(tmp_path):
    with copied(tmp_path, "ops.all_gather_matmul", {}) as plain:
        key = compiled_from(plain)
    with copied(tmp_path, "ops.all_gather_matmul", {protocol.notify_chunk: notify_all_but_one}) as broken:
        assert compiled_from(broken) != key
        assert broken.kernel is not kernel
        assert broken.all_gather_matmul is not mk.all_gather_matmul
    assert transfer.notify_chunk is notify_chunk


@pytest.mark.thorough
def test_so_do_modules_that_are_imported_later(tmp_path):
    with copied(tmp_path, "ops.all_gather_matmul", {protocol.notify_chunk: notify_all_but_one}) as broken:
        hopper = __import__(f"{broken.__name__}.hopper", fromlist=["notify_chunk"])
        assert hopper.notify_chunk is broken.transfer.notify_chunk
        compiled_from(broken)


@pytest.mark.thorough
def test_a_function_that_no_kernel_calls_is_an_error(tmp_path):
    @triton.jit
    def refuse_nothing(context, reason, peer, seen, expected):
        pass

    with (
        pytest.raises(AssertionError, match="no kernel that was compiled calls refuse"),
        copied(tmp_path, "ops.all_gather_matmul", {signals.refuse: refuse_nothing}) as broken,
    ):
        compiled_from(broken)


@pytest.mark.thorough
def test_a_copy_passes(tmp_path, monkeypatch):
    """Copying alone breaks nothing."""
    with copied(tmp_path, "ops.all_gather_matmul", {}) as module:
        monkeypatch.setattr(mk, "all_gather_matmul", module.all_gather_matmul)
        for cluster in ((1, 2), (2, 1), (2, 2)):
            Gathers(cluster).run(seed=0)
