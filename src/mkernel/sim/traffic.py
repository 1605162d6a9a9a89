"""What moves between simulated ranks."""

from __future__ import annotations

from collections.abc import Callable


class Traffic:
    """How much moved between which ranks, and how much was computed meanwhile."""

    def __init__(self, size: int):
        self.nvlink = [[0] * size for _ in range(size)]  # bytes from rank to rank, inside a node
        self.network = [[0] * size for _ in range(size)]  # bytes from rank to rank, between nodes
        self.to_switch = [0] * size  # bytes that a rank sends for multicast stores and reductions
        self.from_switch = [0] * size  # and receives
        self.on_progress: Callable[[], None] | None = None  # called now and then while a launch runs
        self.multiplications = [0] * size  # tile steps that a rank has computed
        self.before_last_arrival = [0] * size  # how many of them before its last byte arrived

    def progress(self) -> None:
        if self.on_progress is not None:
            self.on_progress()

    def arrived(self, rank: int) -> None:
        self.before_last_arrival[rank] = self.multiplications[rank]
