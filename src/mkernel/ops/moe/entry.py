"""The registry entries of the mixture of experts."""

from mkernel.operators import QUANTIZE, SCALING, Operator, Option, Signal, register

PACKAGE = "mkernel.ops.moe"

SIGNALS = (
    Signal("mkernel.ops.moe.kinds:ROUTED", "routed", "the routing table of rank {peer}"),
    Signal("mkernel.ops.moe.kinds:COUNTED", "counted", "the other CTAs of this rank to count rows"),
    Signal("mkernel.ops.moe.kinds:SCHEDULED", "scheduled", "the other CTAs of this rank to schedule blocks of rows"),
    Signal("mkernel.ops.moe.kinds:HELD", "held", "chunk {index} of rank {peer}'s tokens"),
    Signal("mkernel.ops.moe.kinds:PLACED", "placed", "the rows of block {index}"),
    Signal("mkernel.ops.moe.kinds:SETTLED", "settled", "the row numbers of chunk {index} of rank {peer}'s tokens"),
    Signal("mkernel.ops.moe.kinds:COMPUTED", "computed", "the tiles of block {index}"),
    Signal(
        "mkernel.ops.moe.kinds:NUMBERED", "numbered", "a send CTA of this rank to number the tokens for other nodes"
    ),
    Signal("mkernel.ops.moe.kinds:RETURNED", "returned", "rank {peer} to sum its rows of chunk {index}"),
    Signal("mkernel.ops.moe.kinds:BACK", "back", "the sums of rank {peer}'s node for chunk {index}"),
)
OPTIONS = (
    Option("experts", "Mixture of experts: experts per rank.", kind=int, default="16"),
    Option("topk", "Mixture of experts: experts per token.", kind=int, most=16, default="8"),
)

register(
    Operator(
        name="moe_dispatch_matmul",
        summary="sends tokens to the ranks of their experts and multiplies them there",
        function=f"{PACKAGE}:moe_dispatch_matmul",
        explain=f"{PACKAGE}.dispatch_matmul:explain",
        dimensions=("tokens", "out", "hidden"),
        shared=("tokens",),
        shapes=((8192, 2048, 7168), (32768, 2048, 7168)),
        small=((2048, 1024, 2048),),
        signals=SIGNALS,
        options=OPTIONS,
        workload=f"{PACKAGE}.workload:DISPATCH_MATMUL",
        space=f"{PACKAGE}.tuning:space",
        demo=f"{PACKAGE}.demo:DISPATCH_MATMUL",
        bench=f"{PACKAGE}.bench:DISPATCH_MATMUL",
        model=f"{PACKAGE}.model:DISPATCH_MATMUL",
        co_resident=True,
    )
)

register(
    Operator(
        name="moe_ffn",
        summary="a mixture-of-experts layer: tokens to their experts, SwiGLU there, weighted sums back",
        function=f"{PACKAGE}:moe_ffn",
        explain=f"{PACKAGE}.ffn:explain",
        dimensions=("tokens", "inter", "hidden"),
        shared=("tokens",),
        shapes=((8192, 2048, 7168), (32768, 2048, 7168)),
        small=((2048, 1024, 2048),),
        signals=SIGNALS,
        options=OPTIONS,
        workload=f"{PACKAGE}.workload:FFN",
        space=f"{PACKAGE}.tuning:space",
        demo=f"{PACKAGE}.demo:FFN",
        bench=f"{PACKAGE}.bench:FFN",
        model=f"{PACKAGE}.model:FFN",
        co_resident=True,
    )
)

register(
    Operator(
        name="moe_dispatch_scaled_matmul",
        summary="sends tokens in fp8, with their scales, to the ranks of their experts and multiplies them there",
        function=f"{PACKAGE}:moe_dispatch_scaled_matmul",
        explain=f"{PACKAGE}.scaled:explain",
        dimensions=("tokens", "out", "hidden"),
        shared=("tokens",),
        shapes=((8192, 2048, 7168), (32768, 2048, 7168)),
        small=((2048, 1024, 2048),),
        signals=SIGNALS,
        options=(*OPTIONS, *SCALING[1:], QUANTIZE),
        workload=f"{PACKAGE}.workload:DISPATCH_SCALED",
        space=f"{PACKAGE}.tuning:space_of_scaled",
        demo=f"{PACKAGE}.demo:DISPATCH_SCALED",
        part_of="moe_ffn",
        co_resident=True,
    )
)

register(
    Operator(
        name="scaled_moe_ffn",
        summary="a mixture-of-experts layer in fp8: tokens travel with their scales, sums in bf16",
        function=f"{PACKAGE}:scaled_moe_ffn",
        explain=f"{PACKAGE}.scaled_ffn:explain",
        dimensions=("tokens", "inter", "hidden"),
        shared=("tokens",),
        shapes=((8192, 2048, 7168), (32768, 2048, 7168)),
        small=((2048, 1024, 2048),),
        signals=SIGNALS,
        options=(*OPTIONS, SCALING[1], QUANTIZE),
        workload=f"{PACKAGE}.workload:SCALED_FFN",
        space=f"{PACKAGE}.tuning:space_of_scaled_ffn",
        demo=f"{PACKAGE}.demo:SCALED_FFN",
        part_of="moe_ffn",
        co_resident=True,
    )
)

# benchmarks and the demo show the others as parts of moe_ffn
register(
    Operator(
        name="moe_dispatch",
        summary="sends tokens to the ranks of their experts",
        function=f"{PACKAGE}:moe_dispatch",
        explain=f"{PACKAGE}.dispatch_rows:explain",
        dimensions=("tokens", "hidden"),
        shared=("tokens",),
        shapes=((8192, 7168), (32768, 7168)),
        small=((2048, 2048),),
        signals=SIGNALS,
        options=OPTIONS,
        workload=f"{PACKAGE}.workload:DISPATCH",
        space=f"{PACKAGE}.tuning:space_of_dispatch",
        demo=f"{PACKAGE}.demo:DISPATCH",
        part_of="moe_ffn",
        co_resident=True,
    )
)
register(
    Operator(
        name="moe_combine",
        summary="returns the experts' rows to the ranks of their tokens, as weighted sums",
        function=f"{PACKAGE}:moe_combine",
        explain=f"{PACKAGE}.combine:explain",
        dimensions=("tokens", "columns"),
        shared=("tokens",),
        shapes=((8192, 7168), (32768, 7168)),
        small=((2048, 2048),),
        signals=SIGNALS,
        options=OPTIONS,
        workload=f"{PACKAGE}.workload:COMBINE",
        space=f"{PACKAGE}.tuning:space_of_combine",
        demo=f"{PACKAGE}.demo:COMBINE",
        part_of="moe_ffn",
        co_resident=True,
    )
)
