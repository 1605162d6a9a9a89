"""The host side of teams of CTAs (lang/team.py)."""

from __future__ import annotations

import torch

from mkernel.lang.context import READY
from mkernel.lang.team import Team
from mkernel.runtime.config import Settings
from mkernel.runtime.group import Group, Workspace
from mkernel.runtime.operands import constants


def team_of(group: Group, workspace: Workspace, config: Settings) -> Team:
    """The teams of a launch, for the kernel."""
    sums = None
    if config.team_ctas > 1:
        elements = config.ctas * config.tile_m * config.tile_n
        sums = group.world.memory.empty(group.world_rank, (elements,), torch.float32)
    return Team(workspace.state[READY.value :], sums, *constants(config.team_ctas))


def scratch_of(team: Team) -> tuple[torch.Tensor, ...]:
    """The memory that was allocated for the launch alone."""
    return () if team.sums is None else (team.sums,)
