"""The simulator: a whole cluster, deterministic, in one process with no GPU."""
