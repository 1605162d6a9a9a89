"""The registry entries of ring_attention and of its gradient."""

from mkernel.operators import Operator, Option, Signal, register

PACKAGE = "mkernel.ops.attention"

FREED = Signal("mkernel.ops.attention.kinds:FREED", "freed", "rank {peer} to free round {index}")
OPTIONS = (
    Option("causal", "ring_attention: use a causal mask.", bench=True),
    Option("zigzag", "ring_attention: use the zigzag layout.", bench=True),
    Option("kv_heads", "ring_attention: number of key and value heads.", kind=int, default="heads"),
)

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
        signals=(FREED,),
        options=OPTIONS,
        workload=f"{PACKAGE}.workload:WORKLOAD",
        space=f"{PACKAGE}.tuning:space",
        demo=f"{PACKAGE}.demo:DEMO",
        bench=f"{PACKAGE}.bench:BENCHMARK",
        model=f"{PACKAGE}.model:MODEL",
    )
)

register(
    Operator(
        name="ring_attention_backward",
        summary="the gradients of this rank's queries, keys and values in ring_attention",
        function=f"{PACKAGE}.backward:ring_attention_backward",
        explain=f"{PACKAGE}.backward:explain",
        dimensions=("batch", "heads", "positions", "dim"),
        shared=("positions",),
        shapes=((4, 16, 12288, 128), (4, 16, 49152, 128)),
        small=((1, 16, 8192, 128),),
        signals=(
            FREED,
            Signal("mkernel.ops.attention.kinds:ADDED", "added", "rank {peer} to add up the partials of round {index}"),
            Signal(
                "mkernel.ops.attention.kinds:PARTIAL_GRADIENTS",
                "partial gradients",
                "the partial gradients of rank {peer} of block {index}",
            ),
            Signal(
                "mkernel.ops.attention.kinds:NODE_SUM",
                "node sum",
                "the partial gradients of rank {peer}'s node of block {index}",
            ),
            Signal("mkernel.ops.attention.kinds:PREPARED", "prepared", "the other CTAs of this rank to prepare rows"),
        ),
        options=OPTIONS,
        workload=f"{PACKAGE}.backward.workload:WORKLOAD",
        space=f"{PACKAGE}.backward.tuning:space",
        demo=f"{PACKAGE}.backward.demo:DEMO",
        bench=f"{PACKAGE}.backward.bench:BENCHMARK",
        model=f"{PACKAGE}.backward.model:MODEL",
        co_resident=True,
    )
)
