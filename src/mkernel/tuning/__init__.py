"""Tuning: measure configurations of an operator for a shape, and store the best one (see runtime/tuned.py).

`spaces` defines which configurations to try, `search` decides which of them to measure and when to stop, `measuring`
measures them on the ranks of a group, and `command` implements `mkernel tune`.
"""

from mkernel.tuning.measuring import Found, tune

__all__ = ["Found", "tune"]
