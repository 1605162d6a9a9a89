"""The host side of teams of CTAs (lang/team.py)."""

from __future__ import annotations

import torch

from mkernel.lang.team import Team
from mkernel.runtime.config import Settings
from mkernel.runtime.group import Group, Workspace
from mkernel.runtime.layout import Layout
from mkernel.runtime.operands import constants


def team_of(group: Group, memory: Layout, workspace: Workspace, config: Settings) -> Team:
    """The teams of a launch, for the kernel. The workspace has signals `ready` for all its CTAs."""
    sums = None
    if config.team_ctas > 1:
        elements = config.ctas * config.tile_m * config.tile_n
        sums = group.world.memory.empty(group.world_rank, (elements,), torch.float32)
    segment = workspace.segment.memory.view(torch.int64)
    return Team(segment, memory.words_in(workspace, "ready"), sums, *constants(config.team_ctas))


def scratch_of(team: Team) -> tuple[torch.Tensor, ...]:
    """The memory that was allocated for the launch alone."""
    return () if team.sums is None else (team.sums,)
