"""What the tools know of ring_attention."""

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
        signals=(Signal("mkernel.ops.attention.kinds:FREED", "freed", "rank {peer} to be done with round {index}"),),
        options=(
            Option("causal", "ring_attention: with the causal mask.", bench=True),
            Option("zigzag", "ring_attention: the sequence laid out in zigzag.", bench=True),
            Option("kv_heads", "ring_attention: heads of keys and values.", kind=int, default="heads"),
        ),
        workload=f"{PACKAGE}.workload:WORKLOAD",
        space=f"{PACKAGE}.tuning:space",
        demo=f"{PACKAGE}.demo:DEMO",
        bench=f"{PACKAGE}.bench:BENCHMARK",
    )
)
