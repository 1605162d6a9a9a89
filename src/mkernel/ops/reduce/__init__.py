"""Products that are summed over ranks: matmul_reduce_scatter and matmul_all_reduce."""

from mkernel.ops.reduce.all_reduce import matmul_all_reduce
from mkernel.ops.reduce.reduce_scatter import matmul_reduce_scatter

__all__ = ["matmul_all_reduce", "matmul_reduce_scatter"]
