"""The registry entries of matmul_reduce_scatter and matmul_all_reduce, and of the same for fp8."""

from mkernel.operators import BACKWARD, SCALING, Operator, Signal, register

PACKAGE = "mkernel.ops.reduce"

partial = Signal("mkernel.ops.reduce.kinds:PARTIAL", "partial", "rank {peer}'s partial of tile {index}")
finished_tile = Signal(
    "mkernel.ops.reduce.kinds:FINISHED_TILE", "finished tile", "tile {index}, which rank {peer} reduces"
)

register(
    Operator(
        name="matmul_reduce_scatter",
        summary="multiplies, adds the products of all ranks, and gives each rank its rows of the sum",
        function=f"{PACKAGE}.reduce_scatter:matmul_reduce_scatter",
        explain=f"{PACKAGE}.reduce_scatter:explain",
        dimensions=("m_total", "n", "k"),
        shared=("m_total", "k"),
        shapes=((16384, 8192, 8192), (4096, 8192, 8192)),
        small=((4096, 2048, 2048),),
        signals=(partial,),
        options=(BACKWARD,),
        workload=f"{PACKAGE}.workload:REDUCE_SCATTER",
        space=f"{PACKAGE}.tuning:space",
        demo=f"{PACKAGE}.demo:REDUCE_SCATTER",
        bench=f"{PACKAGE}.reduce_scatter.bench:BENCHMARK",
        model=f"{PACKAGE}.model:REDUCE_SCATTER",
    )
)

register(
    Operator(
        name="matmul_all_reduce",
        summary="multiplies, and adds the products of all ranks on every rank",
        function=f"{PACKAGE}.all_reduce:matmul_all_reduce",
        explain=f"{PACKAGE}.all_reduce:explain",
        dimensions=("m_total", "n", "k"),
        shared=("k",),
        shapes=((16384, 8192, 8192), (128, 8192, 8192)),
        small=((4096, 2048, 2048),),
        signals=(partial, finished_tile),
        workload=f"{PACKAGE}.workload:ALL_REDUCE",
        space=f"{PACKAGE}.tuning:space",
        demo=f"{PACKAGE}.demo:ALL_REDUCE",
        bench=f"{PACKAGE}.all_reduce.bench:BENCHMARK",
        model=f"{PACKAGE}.model:ALL_REDUCE",
    )
)

register(
    Operator(
        name="scaled_matmul_reduce_scatter",
        summary="multiplies fp8 matrices with scales, adds the products of all ranks, and gives each rank its rows",
        function=f"{PACKAGE}.reduce_scatter.scaled:scaled_matmul_reduce_scatter",
        explain=f"{PACKAGE}.reduce_scatter.scaled:explain",
        dimensions=("m_total", "n", "k"),
        shared=("m_total", "k"),
        shapes=((16384, 8192, 8192), (4096, 8192, 8192)),
        small=((4096, 2048, 2048),),
        signals=(partial,),
        options=SCALING,
        workload=f"{PACKAGE}.workload:SCALED_REDUCE_SCATTER",
        space=f"{PACKAGE}.tuning:scaled_space",
        demo=f"{PACKAGE}.demo:SCALED_REDUCE_SCATTER",
        bench=f"{PACKAGE}.reduce_scatter.bench:SCALED_BENCHMARK",
    )
)

register(
    Operator(
        name="scaled_matmul_all_reduce",
        summary="multiplies fp8 matrices with scales, and adds the products of all ranks on every rank",
        function=f"{PACKAGE}.all_reduce.scaled:scaled_matmul_all_reduce",
        explain=f"{PACKAGE}.all_reduce.scaled:explain",
        dimensions=("m_total", "n", "k"),
        shared=("k",),
        shapes=((16384, 8192, 8192), (128, 8192, 8192)),
        small=((4096, 2048, 2048),),
        signals=(partial, finished_tile),
        options=SCALING,
        workload=f"{PACKAGE}.workload:SCALED_ALL_REDUCE",
        space=f"{PACKAGE}.tuning:scaled_space",
        demo=f"{PACKAGE}.demo:SCALED_ALL_REDUCE",
        bench=f"{PACKAGE}.all_reduce.bench:SCALED_BENCHMARK",
    )
)
