"""Tuning: measure configurations of an operator for a shape, and keep the best (see runtime/tuned.py).

`spaces` says which configurations are worth a try, `search` decides which of them to measure and when to stop,
`measuring` measures them on the ranks of a group, `command` is `mkernel tune`.
"""

from mkernel.tuning.measuring import Found, tune

__all__ = ["Found", "tune"]
