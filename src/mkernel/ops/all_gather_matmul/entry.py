"""The registry entries of all_gather_matmul, of the gradient of its weight, and of the same for fp8."""

from mkernel.operators import BACKWARD, QUANTIZE, SCALING, Operator, register

PACKAGE = "mkernel.ops.all_gather_matmul"

register(
    Operator(
        name="all_gather_matmul",
        summary="gathers every rank's rows and multiplies them by this rank's matrix",
        function=f"{PACKAGE}:all_gather_matmul",
        explain=f"{PACKAGE}:explain",
        dimensions=("m_total", "n", "k"),
        shared=("m_total",),
        shapes=((16384, 2048, 8192), (8192, 2048, 8192), (8192, 8192, 8192)),
        small=((4096, 1024, 2048),),
        workload=f"{PACKAGE}.workload:WORKLOAD",
        options=(BACKWARD,),
        space=f"{PACKAGE}.tuning:space",
        demo=f"{PACKAGE}.demo:DEMO",
        bench=f"{PACKAGE}.bench:BENCHMARK",
        model=f"{PACKAGE}.model:MODEL",
    )
)

register(
    Operator(
        name="all_gather_matmul_weight_grad",
        summary="gathers every rank's rows and multiplies their transpose by this rank's matrix",
        function=f"{PACKAGE}.weight_grad:all_gather_matmul_weight_grad",
        explain=f"{PACKAGE}.weight_grad:explain",
        dimensions=("m_total", "n", "k"),
        shared=("m_total",),
        shapes=((16384, 2048, 8192), (8192, 2048, 8192), (8192, 8192, 8192)),
        small=((4096, 1024, 2048),),
        workload=f"{PACKAGE}.weight_grad.workload:WORKLOAD",
        space=f"{PACKAGE}.weight_grad.tuning:space",
        demo=f"{PACKAGE}.weight_grad.demo:DEMO",
        bench=f"{PACKAGE}.weight_grad.bench:BENCHMARK",
        co_resident=True,
    )
)

register(
    Operator(
        name="all_gather_scaled_matmul",
        summary="gathers every rank's fp8 rows and their scales, and multiplies them by this rank's matrix",
        function=f"{PACKAGE}.scaled:all_gather_scaled_matmul",
        explain=f"{PACKAGE}.scaled:explain",
        dimensions=("m_total", "n", "k"),
        shared=("m_total",),
        shapes=((16384, 2048, 8192), (8192, 8192, 8192)),
        small=((4096, 1024, 2048),),
        options=(*SCALING, QUANTIZE),
        workload=f"{PACKAGE}.scaled.workload:WORKLOAD",
        space=f"{PACKAGE}.scaled.tuning:space",
        demo=f"{PACKAGE}.scaled.demo:DEMO",
        bench=f"{PACKAGE}.scaled.bench:BENCHMARK",
    )
)
