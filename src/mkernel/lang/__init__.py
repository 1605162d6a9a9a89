"""The device vocabulary: small Triton functions that every operator is written with."""
