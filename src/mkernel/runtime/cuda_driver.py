"""Launches that the CUDA driver repeats with other pointers, without Triton.

Triton's launcher looks at every argument of every call, which takes 30 to 200 us, several times what the driver needs.
But the parameters of a kernel, as the driver gets them, follow from the arguments and from the signature of the
compiled kernel: pointers and numbers in order, and for a tensor descriptor its tensor map, shape and strides. So they
are laid out once. Later launches change only what depends on the caller's tensors: pointers, and the addresses in
tensor maps. The driver is asked how large the kernel's parameters are; if they are not what is expected, as in some
other version of Triton, Triton makes the launch as before.
"""

from __future__ import annotations

import ctypes
import functools
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from ctypes import byref, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any, NamedTuple

import torch

TENSOR_MAP_BYTES = 128
TENSOR_MAP_ALIGNMENT = 64
POINTER_BYTES = 8
INVALID_CONTEXT = 201
WARP_THREADS = 32
INTEGERS = {"i1": 1, "i8": 1, "i16": 2, "i32": 4, "i64": 8, "u1": 1, "u8": 1, "u16": 2, "u32": 4, "u64": 8}  # bytes
FLOATS = {"fp32": "<f", "f32": "<f", "fp64": "<d"}
NO_INTERLEAVE, PROMOTE_128_BYTES, FILL_WITH_ZEROS = 0, 2, 0  # of cuTensorMapEncodeTiled; Triton's choices
ENCODED = {8: 10, 9: 8, 10: 9}  # Triton's numbers of element types that differ from those of CUtensorMapDataType


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig"""

    _fields_ = [
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared_bytes", c_uint),
        ("stream", c_void_p),
        ("attributes", c_void_p),
        ("attribute_count", c_uint),
    ]


class Driver:
    """The functions of libcuda that this needs. Raises OSError or AttributeError where one is missing."""

    def __init__(self) -> None:
        # CDLL lets other threads run during a call: a launch may wait for room in the queue, which a kernel makes that
        # waits for a launch of another thread
        library = ctypes.CDLL("libcuda.so.1")
        self.parameter = library.cuFuncGetParamInfo
        self.make_tensor_map = library.cuTensorMapEncodeTiled
        self.move_tensor_map = library.cuTensorMapReplaceAddress
        self.launch = library.cuLaunchKernelEx
        self.current_context = library.cuCtxGetCurrent
        self.set_context = library.cuCtxSetCurrent
        self.exchange_capture_mode = library.cuThreadExchangeStreamCaptureMode
        self.capture_info = library.cuStreamGetCaptureInfo_v2
        self.error_string = library.cuGetErrorString

    def check(self, code: int) -> None:
        if code:
            text = ctypes.c_char_p()
            self.error_string(code, byref(text))
            raise RuntimeError(f"CUDA error {code}: {(text.value or b'unknown').decode()}")

    def parameter_sizes(self, function: int) -> list[int]:
        """Bytes of each parameter of a kernel."""
        sizes: list[int] = []
        offset, size = c_size_t(), c_size_t()
        while not self.parameter(c_void_p(function), c_size_t(len(sizes)), byref(offset), byref(size)):
            sizes.append(size.value)
        return sizes


@functools.cache
def driver() -> Driver | None:
    """The driver; None if it is too old (CUDA 12.4 is the first that has everything), so that Triton must launch."""
    try:
        return Driver()
    except (OSError, AttributeError):
        return None


class TensorMap(NamedTuple):
    """What a tensor map is made of. Sizes are in elements, the fastest dimension last."""

    address: int
    element_type: int  # as Triton numbers them
    element_bytes: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block: tuple[int, ...]
    swizzle: int

    def write(self, cuda: Driver, where: int) -> None:
        """Let the driver make it at this address."""
        rank = len(self.shape)
        strides = [stride * self.element_bytes for stride in self.strides[:-1]]
        code = cuda.make_tensor_map(
            c_void_p(where), c_uint(ENCODED.get(self.element_type, self.element_type)), c_uint(rank),
            c_void_p(self.address), (c_uint64 * rank)(*reversed(self.shape)), (c_uint64 * rank)(*reversed(strides)),
            (c_uint * rank)(*reversed(self.block)), (c_uint * rank)(*[1] * rank), c_uint(NO_INTERLEAVE),
            c_uint(self.swizzle), c_uint(PROMOTE_128_BYTES), c_uint(FILL_WITH_ZEROS),
        )  # fmt: skip
        cuda.check(code)


Parameter = bytes | TensorMap  # as the driver gets it
SCRATCH = bytes(POINTER_BYTES)  # Triton's last two parameters, which point to nothing


class Unknown(Exception):
    """A kernel is compiled in a way that is not known here."""


def parameters_of(compiled: Any, arguments: Mapping[str, Any]) -> list[Parameter]:
    """The parameters of a compiled kernel, for these arguments. Raises Unknown if that is not certain.

    Args:
        compiled: Triton's CompiledKernel.
        arguments: of the kernel, by name.
    """
    metadata = compiled.metadata
    plain = dict(num_ctas=1, launch_cooperative_grid=False, launch_pdl=False, global_scratch_size=0,
                 profile_scratch_size=0)  # fmt: skip
    for name, value in plain.items():
        if getattr(metadata, name, value) != value:
            raise Unknown(f"{name} is {getattr(metadata, name)}")
    signature = compiled.src.signature
    maps = iter(getattr(metadata, "tensordesc_meta", None) or ())
    found: list[Parameter] = []
    for name, kind in signature.items():
        for leaf_kind, value in _leaves(kind, arguments.get(name)):
            found += _parameters(leaf_kind, value, maps)
    if next(maps, None) is not None:
        raise Unknown("a tensor map has no descriptor")
    return [*found, SCRATCH, SCRATCH]


def _leaves(kind: Any, value: Any) -> Iterator[tuple[str, Any]]:
    """The types of a signature that stand for parameters, with their values."""
    if isinstance(kind, tuple):
        for inner, part in zip(kind, value, strict=True):
            yield from _leaves(inner, part)
    elif kind != "constexpr":
        yield kind, value


def _parameters(kind: str, value: Any, maps: Iterator[Any]) -> list[Parameter]:
    """The parameters that stand for one argument."""
    if kind.startswith("*"):
        address = value if isinstance(value, int) else 0 if value is None else value.data_ptr()
        return [struct.pack("<Q", address)]
    if kind in INTEGERS:
        return [int(value).to_bytes(INTEGERS[kind], "little", signed=kind[0] == "i" and kind != "i1")]
    if kind in FLOATS:
        return [struct.pack(FLOATS[kind], value)]
    if re.match(r"tensordesc<", kind):
        return _described(value, next(maps, None))
    raise Unknown(f"a parameter of type {kind}")


def _described(value: Any, meta: Any) -> list[Parameter]:
    """The parameters that stand for a tensor descriptor. meta: what Triton says about its tensor map."""
    if meta is None or meta["fp4_padded"] or meta.get("is_im2col", False):
        raise Unknown("a descriptor without a plain tensor map")
    if getattr(value, "padding", "zero") != "zero" or getattr(value, "round_f32_to_tf32", False):
        raise Unknown("a descriptor that changes elements")
    shape, strides = tuple(value.shape), tuple(value.strides)
    made = TensorMap(
        value.base.data_ptr(), meta["elem_type"], meta["elem_size"], shape, strides, tuple(meta["block_size"]),
        meta["swizzle"],
    )  # fmt: skip
    return [made, *(struct.pack("<i", size) for size in shape), *(struct.pack("<q", stride) for stride in strides)]


def size_of(parameter: Parameter) -> int:
    """Bytes of a parameter."""
    return TENSOR_MAP_BYTES if isinstance(parameter, TensorMap) else len(parameter)


class Kernel(NamedTuple):
    """What the driver launches."""

    function: int
    grid: int
    threads: int
    shared_bytes: int


class Patch(NamedTuple):
    """A parameter that depends on a tensor: it is the tensor's address plus an offset, or a tensor map of that."""

    parameter: int
    tensor: int
    offset: int


def find_patches(parameters: Sequence[Parameter], tensors: Sequence[tuple[int, int]]) -> list[Patch]:
    """The parameters that depend on tensors. Raises Unknown if that is not certain.

    Args:
        tensors: address and bytes of each tensor that may be another one in the next launch; 0 bytes if there is none.
    """
    spans = [(start, start + nbytes) for start, nbytes in tensors if nbytes]
    if any(one[0] < other[1] and other[0] < one[1] for i, one in enumerate(spans) for other in spans[:i]):
        raise Unknown("tensors overlap: an address could be of either")
    found = []
    for i, value in enumerate(parameters):
        if isinstance(value, TensorMap) or len(value) == POINTER_BYTES:
            address = value.address if isinstance(value, TensorMap) else int.from_bytes(value, "little")
            for tensor, (start, nbytes) in enumerate(tensors):
                if start <= address < start + nbytes:
                    found.append(Patch(i, tensor, address - start))
    return found


class Ready:
    """A launch on one stream that can be repeated for other tensors of the same layout.

    Args:
        kernel: what to launch.
        stream: the stream to launch on.
        parameters: of the kernel, with the tensors of one call.
        patches: which of them depend on the tensors.
        kept: what must live as long as the launch: the memory that its other parameters point to.
    """

    def __init__(
        self, kernel: Kernel, stream: torch.cuda.Stream, parameters: Sequence[Parameter], patches: Sequence[Patch],
        kept: Any,
    ):  # fmt: skip
        cuda = driver()
        assert cuda is not None
        self._cuda = cuda
        self.stream = stream
        self._kept = kept
        sizes = cuda.parameter_sizes(kernel.function)
        if sizes != [size_of(value) for value in parameters]:
            raise Unknown(f"the kernel's parameters have {sizes} bytes, not {[size_of(value) for value in parameters]}")
        context = c_void_p()
        cuda.check(cuda.current_context(byref(context)))
        self._context = context.value or 0
        offsets, end = [], 0
        for value in parameters:
            alignment = TENSOR_MAP_ALIGNMENT if isinstance(value, TensorMap) else POINTER_BYTES
            offsets.append(-(-end // alignment) * alignment)
            end = offsets[-1] + size_of(value)
        self._memory = ctypes.create_string_buffer(end + 2 * TENSOR_MAP_ALIGNMENT)
        base = -(-ctypes.addressof(self._memory) // TENSOR_MAP_ALIGNMENT) * TENSOR_MAP_ALIGNMENT
        for offset, value in zip(offsets, parameters):
            if isinstance(value, TensorMap):
                value.write(cuda, base + offset)
            else:
                ctypes.memmove(base + offset, value, len(value))
        self._words = (c_uint64 * (end // POINTER_BYTES + 1)).from_address(base)
        self._pointers, self._maps = [], []
        for i, tensor, offset in patches:
            if isinstance(parameters[i], TensorMap):
                self._maps.append((c_void_p(base + offsets[i]), tensor, offset))
            else:
                self._pointers.append((offsets[i] // POINTER_BYTES, tensor, offset))
        self._described = [-1] * len(self._maps)  # the addresses in the tensor maps
        self._addresses: Sequence[int] = ()  # the tensors of the last launch
        addresses = [base + offset for offset in offsets]
        self._parameters = (c_void_p * max(len(addresses), 1))(*addresses)
        self._config = _LaunchConfig(
            (kernel.grid, 1, 1), (kernel.threads, 1, 1), kernel.shared_bytes, stream.cuda_stream, None, 0
        )
        self._arguments = (byref(self._config), c_void_p(kernel.function), self._parameters, None)

    def start(self, addresses: Sequence[int]) -> None:
        """Launch with tensors at these addresses."""
        if addresses != self._addresses:
            self._patch(addresses)
        launch, arguments = self._cuda.launch, self._arguments
        code = launch(*arguments)
        if code:
            if code == INVALID_CONTEXT:  # a thread that has used no GPU yet
                self._cuda.check(self._cuda.set_context(c_void_p(self._context)))
                code = launch(*arguments)
            self._cuda.check(code)

    def _patch(self, addresses: Sequence[int]) -> None:
        """Change the parameters that depend on tensors."""
        self._addresses = ()  # if the driver fails, they are neither the old ones nor the new ones
        words = self._words
        for word, tensor, offset in self._pointers:
            words[word] = addresses[tensor] + offset
        described = self._described
        for i, (tensor_map, tensor, offset) in enumerate(self._maps):
            address = addresses[tensor] + offset
            if address != described[i]:
                self._cuda.check(self._cuda.move_tensor_map(tensor_map, c_void_p(address)))
                described[i] = address
        self._addresses = addresses
