"""Which ranks share a node."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Topology:
    """A group as nodes x GPUs. Ranks are numbered node by node."""

    nodes: int
    gpus_per_node: int

    @property
    def size(self) -> int:
        return self.nodes * self.gpus_per_node

    def node_of(self, rank: int) -> int:
        return rank // self.gpus_per_node

    def local_rank_of(self, rank: int) -> int:
        return rank % self.gpus_per_node

    @staticmethod
    def of(node_ids: Sequence[int]) -> Topology:
        """The topology of a group whose rank i lives on physical node `node_ids[i]`.

        Operators need consecutive blocks of equally many ranks, one block per node. If the nodes of the group differ
        in size, they are split into smaller nodes of equal size (down to one rank each): always correct, with as much
        traffic over NVLink as the split allows. Ranks of a node that are not adjacent in the group count as different
        nodes.
        """
        runs: list[int] = []
        previous = None
        for node in node_ids:
            if node == previous:
                runs[-1] += 1
            else:
                runs.append(1)
            previous = node
        block = math.gcd(*runs) if runs else 1
        return Topology(len(node_ids) // block, block)
