"""Figures from nowhere, in the form of real ones, for tests of tables and pages."""


def result(op="all_gather_matmul", shape=(16384, 2048, 8192), **changes):
    figures = {
        "op": op,
        "m_total": shape[0],
        "n": shape[1],
        "k": shape[2],
        "dtype": "bfloat16",
        "ranks": 4,
        "nodes": 1,
        "gpus": 1,
        "link_gb_per_s": 112.5,
        "network_gb_per_s": None,
        "emulated": True,
        "fused_ms": 3.0,
        "library_ms": 2.7,
        "wire_ms": 1.8,
        "network_ms": 0.0,
        "host_driven_ms": 4.2,
        "speedup": 1.4,
        "floor_fraction": 0.9,
        "sustained_fused_ms": 3.3,
        "sustained_library_ms": 2.9,
        "sustained_host_driven_ms": 4.6,
        "sustained_floor_fraction": 0.88,
        "max_error": 0.5,
        "error_bound": 2.8,
        "network_bytes": [0, 0, 0, 0],
        "plan": "tiles 128x256x64\n- a reason </script> in it",
    }
    return figures | changes


MACHINE = {"gpu": "NVIDIA H200", "gpus": 1, "torch": "2.11.0", "triton": "3.6.0", "python": "3.12.1"}
