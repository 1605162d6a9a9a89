"""What a running CTA provides to the interpreted language, and which one is running.

`running` is a context variable, and each greenlet has a context of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Protocol

import numpy as np


class Cta(Protocol):
    """What a running CTA must provide; the simulator's tasks do."""

    program_id: int
    num_programs: int
    unused_from: dict[Any, int]  # descriptor -> the first of its rows that is not used, see lang/hints.py
    replaced: set[Any]  # functions that another one was called in place of, see `Options.replace`

    def constant(self, address: np.uint64, dtype: np.dtype) -> Any: ...
    def load(
        self, addresses: np.ndarray, mask: np.ndarray, other: np.ndarray, dtype: np.dtype, descriptor: bool,
        volatile: bool = False,
    ) -> np.ndarray: ...  # fmt: skip
    def store(self, addresses: np.ndarray, values: np.ndarray, mask: np.ndarray, descriptor: bool = False) -> None: ...
    def barrier(self) -> None: ...
    def atomic(
        self, addresses: np.ndarray, mask: np.ndarray, size: int, acquire: bool, release: bool, one_gpu: bool,
        only_looks: bool, act: Callable[[], Any],
    ) -> Any: ...  # fmt: skip
    def clock(self) -> int: ...
    def acquire_for_descriptors(self) -> None: ...
    def complete_descriptor_stores(self) -> None: ...
    def store_everywhere(self, addresses: np.ndarray, values: np.ndarray) -> None: ...
    def load_from_all(self, addresses: np.ndarray, dtype: np.dtype) -> list[np.ndarray]: ...
    def fence_aliases(self) -> None: ...
    def waited_for(self, addresses: np.ndarray, mask: np.ndarray, expected: np.ndarray) -> None: ...
    def trace_time(self) -> int: ...
    def on_dot(self, products: int) -> None: ...


running: ContextVar[Cta] = ContextVar("running")
