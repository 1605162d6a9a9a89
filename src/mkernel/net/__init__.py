"""The network between nodes: the proxy that serves a rank's request ring, and its transports."""

from mkernel.net.native import LoopbackTransport, Proxy, Statistics, TcpTransport, Transport

__all__ = ["LoopbackTransport", "Proxy", "Statistics", "TcpTransport", "Transport"]
