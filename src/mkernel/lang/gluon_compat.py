"""The names that Gluon changed from one version of Triton to another. Kernels import them from here.

| here | Triton 3.6 | Triton 3.9 |
|---|---|---|
| `async_load` | `tma.async_copy_global_to_shared` | `tma.async_load` |
| `async_store` | `tma.async_copy_shared_to_global` | `tma.async_store` |
| `reinterpret` | `shared_memory_descriptor._reinterpret` | `shared_memory_descriptor.reinterpret` |

The arguments are the same.
"""

from typing import Any

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma


def _one_of(owner: Any, *names: str) -> Any:
    """The first of these names that the installed version has. Newer names come first: where an old one is still
    there, it may only raise an error."""
    return next(getattr(owner, name) for name in names if hasattr(owner, name))


async_load = _one_of(tma, "async_load", "async_copy_global_to_shared")
async_store = _one_of(tma, "async_store", "async_copy_shared_to_global")
reinterpret = _one_of(gl.shared_memory_descriptor, "reinterpret", "_reinterpret")
