"""The network between nodes: the proxy that serves a rank's request ring, and its transports."""

from mkernel.net.config import Efa, Tcp, Verbs
from mkernel.net.library import LoopbackTransport, Proxy, Statistics, TcpTransport, Transport
from mkernel.net.rdma import EfaTransport, VerbsTransport

__all__ = [
    "Efa",
    "EfaTransport",
    "LoopbackTransport",
    "Proxy",
    "Statistics",
    "Tcp",
    "TcpTransport",
    "Transport",
    "Verbs",
    "VerbsTransport",
]
