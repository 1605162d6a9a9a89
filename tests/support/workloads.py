"""Workloads of operators by name; without the simulator, which tests on a GPU do without."""

from mkernel import operators


def workload_of(op):
    return operators.find(op, "workload").load("workload")
