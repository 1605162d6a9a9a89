"""The device library: the structures and small Triton functions that every operator is written with."""
