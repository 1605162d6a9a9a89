"""The registry entry of ring_attention."""

from mkernel.operators import Operator, Option, Signal, register

PACKAGE = "mkernel.ops.attention"

register(
    Operator(
        name="ring_attention",
        summary="attention of this rank's queries over the keys and values of all ranks",
        function=f"{PACKAGE}:ring_attention",
        explain=f"{PACKAGE}:explain",
        dimensions=("batch", "heads", "positions", "dim"),
        shared=("positions",),
        shapes=((4, 16, 12288, 128), (4, 16, 49152, 128)),
        small=((1, 16, 8192, 128),),
        signals=(Signal("mkernel.ops.attention.kinds:FREED", "freed", "rank {peer} to free round {index}"),),
        options=(
            Option("causal", "ring_attention: use a causal mask.", bench=True),
            Option("zigzag", "ring_attention: use the zigzag layout.", bench=True),
            Option("kv_heads", "ring_attention: number of key and value heads.", kind=int, default="heads"),
        ),
        workload=f"{PACKAGE}.workload:WORKLOAD",
        space=f"{PACKAGE}.tuning:space",
        demo=f"{PACKAGE}.demo:DEMO",
        bench=f"{PACKAGE}.bench:BENCHMARK",
    )
)
