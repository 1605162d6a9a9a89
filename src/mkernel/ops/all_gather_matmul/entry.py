"""The registry entry of all_gather_matmul."""

from mkernel.operators import Operator, register

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
        space=f"{PACKAGE}.tuning:space",
        demo=f"{PACKAGE}.demo:DEMO",
        bench=f"{PACKAGE}.bench:BENCHMARK",
    )
)
