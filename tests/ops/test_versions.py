"""Every kernel compiles, and every operator runs in the simulator, with the installed versions of torch and Triton.
`make test-versions` runs this with the oldest and the newest that are supported."""

import importlib
import inspect
import pkgutil
import re
import warnings
from dataclasses import dataclass, field

import pytest
import torch
from support import moe_backward_launches
from support.operator_calls import cluster_name, run
from support.workloads import workload_of

import mkernel as mk
from mkernel import checking, operators, ops
from mkernel.compiling import compile_launch, launched
from mkernel.runtime import cuda_driver

TRITON = mk.Config(warps=8)  # a configuration that the kernels for Hopper do not have


@dataclass(frozen=True)
class Call:
    """A call that takes a kernel. shape, options: as for `mkernel bench`. ctas: SMs of a GPU, if not all."""

    op: str
    shape: tuple[int, ...]
    cluster: tuple[int, int] = (2, 2)
    config: mk.Config | None = None
    multicast: bool = False
    options: dict = field(default_factory=dict, hash=False)
    ctas: int | None = None

    def launch(self, capability):
        """What rank 0 of a cluster of such GPUs would launch."""

        def prepare(group):
            made = workload_of(self.op).make(group, self.shape, torch.bfloat16, **self.options)
            return made.tried.prepare(self.config)

        gpu = {"ctas": self.ctas} if self.ctas else {}
        return launched(prepare, self.cluster, capability, multicast=self.multicast, **gpu)


@dataclass(frozen=True)
class Step:
    """A step of the backward pass of moe_ffn."""

    kernel: str

    def launch(self, capability):
        return moe_backward_launches.backward_launch(moe_backward_launches.STEPS[self.kernel], capability=capability)


ONE_NODE = (1, 4)
# Most are calls that other files look at more closely, so that Triton's cache has them.
PORTABLE = {
    "all_gather_matmul_kernel": Call("all_gather_matmul", (1024, 2048, 2048)),
    "weight_grad_kernel": Call("all_gather_matmul_weight_grad", (1024, 2048, 2048), config=mk.Config(passes=3)),
    "matmul_reduce_scatter_kernel": Call("matmul_reduce_scatter", (4096, 4096, 4096), ONE_NODE, TRITON),
    "two_level_kernel": Call("matmul_all_reduce", (4096, 4096, 4096), ONE_NODE, config=TRITON),
    "sliced_kernel": Call("matmul_all_reduce", (256, 8192, 4096), ONE_NODE),
    "ring_attention_kernel": Call("ring_attention", (1, 8, 2048, 128), config=TRITON),
    "ring_attention_backward_kernel": Call("ring_attention_backward", (1, 8, 2048, 128), config=TRITON),
}
# TMA, or NVLink's multicast
SINCE_HOPPER = {
    "few_rows_kernel": Call("all_gather_matmul", (16, 1024, 8192), ONE_NODE),
    "reduce_few_rows_kernel": Call("matmul_reduce_scatter", (16, 1024, 32768), ONE_NODE),
    "multicast_kernel": Call("matmul_all_reduce", (4096, 4096, 4096), ONE_NODE, multicast=True),
    "moe_dispatch_matmul_kernel": Call("moe_dispatch_matmul", (4096, 2048, 2048)),
    "moe_dispatch_kernel": Call("moe_dispatch", (4096, 2048)),
    "moe_combine_kernel": Call("moe_combine", (4096, 2048)),
    "moe_ffn_kernel": Call("moe_ffn", (4096, 2048, 2048)),
    **{kernel: Step(kernel) for kernel in moe_backward_launches.STEPS},
}
HOPPER = {
    "ring_attention_backward_hopper_kernel": Call(
        "ring_attention_backward", (1, 8, 2048, 128), ONE_NODE, options={"zigzag": True}, ctas=33
    ),
    "all_gather_matmul_hopper_kernel": Call("all_gather_matmul", (16384, 2048, 2048), ONE_NODE),
    "all_gather_scaled_matmul_hopper_kernel": Call("all_gather_scaled_matmul", (16384, 2048, 2048), ONE_NODE),
    "weight_grad_hopper_kernel": Call("all_gather_matmul_weight_grad", (16384, 2048, 2048), ONE_NODE),
    "matmul_reduce_scatter_hopper_kernel": Call("matmul_reduce_scatter", (4096, 4096, 2048), ONE_NODE),
    "matmul_all_reduce_hopper_kernel": Call("matmul_all_reduce", (4096, 4096, 4096), ONE_NODE),
    "ring_attention_hopper_kernel": Call(
        "ring_attention", (1, 8, 16384, 128), ONE_NODE, options={"zigzag": True}, ctas=33
    ),
}
SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}  # of a CTA
# what test_ampere, test_blackwell and test_other_gpus of other files compile for these GPUs
ELSEWHERE = {
    80: {
        "all_gather_matmul_kernel", "weight_grad_kernel", "matmul_reduce_scatter_kernel", "ring_attention_kernel",
        "ring_attention_backward_kernel",
    },
    100: {
        "all_gather_matmul_kernel", "weight_grad_kernel", "two_level_kernel", "ring_attention_kernel",
        "few_rows_kernel", "reduce_few_rows_kernel",
    },
}  # fmt: skip
# Kernels that take long to compile: with less in them for GPUs that the oldest and the newest Triton are not tried on.
LESS = {
    "ring_attention_backward_kernel": Call("ring_attention_backward", (1, 8, 2048, 64)),
    "moe_dispatch_matmul_kernel": Call("moe_dispatch_matmul", (512, 512, 512), ONE_NODE),
    "moe_ffn_kernel": Call("moe_ffn", (512, 512, 512), ONE_NODE),
}
BY_CAPABILITY = {
    80: {kernel: call for kernel, call in PORTABLE.items() if kernel not in ELSEWHERE[80]},
    90: PORTABLE | SINCE_HOPPER | HOPPER,
    100: {kernel: call for kernel, call in (PORTABLE | SINCE_HOPPER | LESS).items() if kernel not in ELSEWHERE[100]},
}


def marked(capability, kernel):
    """`make test-all` compiles with one Triton for every kind of GPU, `make test-versions` with others for Hopper."""
    marks = [pytest.mark.thorough, *([pytest.mark.versions] if capability == 90 else [])]
    return pytest.param(capability, kernel, marks=marks, id=f"sm_{capability}-{kernel}")


@pytest.mark.parametrize("op", operators.registered())
@pytest.mark.parametrize("cluster", [(1, 2), (2, 2)], ids=cluster_name)
@pytest.mark.versions
def test_simulates(op, cluster):
    """Two calls in a row, on the interpreter: the results are right."""
    operator, ranks = operators.registered()[op], cluster[0] * cluster[1]
    run(checking.calls_of(operator, operator.load("demo").simulated(ranks), 2), cluster=cluster)


def test_every_kernel_is_compiled():
    """Kernels that operators launch have names that end in _kernel."""
    found = set()
    for module in pkgutil.walk_packages(ops.__path__, f"{ops.__name__}."):
        members = inspect.getmembers(importlib.import_module(module.name))
        kernels = {name for name, member in members if name.endswith("_kernel") and hasattr(member, "warmup")}
        found |= {name for name in kernels if not name.startswith("_")}  # benchmarks have some of their own
    assert found == set(BY_CAPABILITY[90])


@pytest.mark.parametrize(
    ("capability", "kernel"),
    [marked(capability, kernel) for capability, kernels in BY_CAPABILITY.items() for kernel in kernels],
)
def test_compiles(capability, kernel):
    """Without warnings, and with the parameters that a repeated launch passes to the driver."""
    launch = BY_CAPABILITY[capability][kernel].launch(capability)
    assert launch.kernel.fn.__name__ == kernel
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # as of what a later version of Triton will do
        compiled = compile_launch(launch, capability)
    assert f".target sm_{capability}" in compiled.ptx
    assert compiled.shared <= SHARED_MEMORY[capability]
    parameters = cuda_driver.parameters_of(compiled.kernel, launch.arguments)
    assert [cuda_driver.size_of(value) for value in parameters] == declared(compiled.ptx)


def declared(ptx):
    """Bytes of the parameters that a kernel declares."""
    entry = ptx[ptx.index(".entry") :]
    sizes = []
    for line in re.findall(r"\.param ([^\n]*)", entry[: entry.index(")")]):
        array = re.search(r"\[(\d+)\]", line)
        kind = re.search(r"\.[usbf](8|16|32|64)\b", line)
        sizes.append(int(array[1]) if array else int(kind[1]) // 8)
    return sizes
