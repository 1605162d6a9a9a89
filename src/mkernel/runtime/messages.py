"""The encoding of messages between ranks in different processes.

Messages hold plain data only: None, bool, int, float, str, bytes, torch.dtype, dense CPU tensors, and tuples, lists and
dicts of these. Decoding builds such values and nothing else, so that write access to the process group's store does not
let anyone run code in a rank, as it would with pickle. Each message carries a MAC under the job's secret
(`runtime/secret.py`) that also covers the name it is stored under: a message from outside the job, or one copied from
another name, is refused.

A message is the MAC, the length of a JSON text, the JSON text, then the raw bytes that the text refers to.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import struct
from typing import Any

import torch

from mkernel.runtime.errors import MKernelError

MAC_BYTES = hashlib.sha256().digest_size
MOST_BYTES = 2**32  # of one message
DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


class BadMessage(MKernelError, RuntimeError):
    """A message that no rank of this job has written."""


def encode(value: Any, key: bytes, name: str) -> bytes:
    """The message to store under `name`."""
    blobs: list[bytes] = []
    text = json.dumps(_plain(value, blobs), separators=(",", ":")).encode()
    body = struct.pack("<Q", len(text)) + text + b"".join(blobs)
    return _mac(key, name, body) + body


def decode(message: bytes, key: bytes, name: str) -> Any:
    """The value that was encoded. Raises BadMessage for anything that `encode` would not write."""
    body = message[MAC_BYTES:]
    if len(message) > MOST_BYTES or not hmac.compare_digest(message[:MAC_BYTES], _mac(key, name, body)):
        raise BadMessage("it is not signed with the secret of this job")
    try:
        (length,) = struct.unpack_from("<Q", body)
        blobs = _Blobs(body, 8 + length)
        value = _value(json.loads(body[8 : 8 + length]), blobs)
    except (ValueError, TypeError, KeyError, IndexError, RecursionError, RuntimeError, struct.error) as problem:
        raise BadMessage(f"it is damaged ({type(problem).__name__}: {problem})") from problem
    if blobs.at != len(body):
        raise BadMessage(f"{len(body) - blobs.at} bytes are left over")
    return value


def _mac(key: bytes, name: str, body: bytes) -> bytes:
    return hmac.digest(key, struct.pack("<Q", len(name.encode())) + name.encode() + body, "sha256")


def _plain(value: Any, blobs: list[bytes]) -> Any:
    """A value as JSON. A type that JSON does not have is an object whose only key names the type."""
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return {"float": value.hex()}  # JSON has no NaN and no infinity
    if isinstance(value, (bytes, bytearray)):
        blobs.append(bytes(value))
        return {"bytes": len(value)}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value)}
    if isinstance(value, torch.Tensor):
        raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        blobs.append(raw)
        return {"tensor": [str(value.dtype), list(value.shape), len(raw)]}
    if isinstance(value, tuple):
        return {"tuple": [_plain(item, blobs) for item in value]}
    if isinstance(value, list):
        return [_plain(item, blobs) for item in value]
    if isinstance(value, dict):
        return {"dict": [[_plain(name, blobs), _plain(item, blobs)] for name, item in value.items()]}
    raise TypeError(f"ranks can exchange plain data and tensors, not a {type(value).__name__}")


class _Blobs:
    """The raw bytes after the text of a message, consumed in order."""

    def __init__(self, body: bytes, at: int):
        self.body, self.at = body, at

    def take(self, count: Any) -> bytes:
        if type(count) is not int or not 0 <= count <= len(self.body) - self.at:
            raise ValueError(f"{count} bytes are missing")
        self.at += count
        return self.body[self.at - count : self.at]


def _value(plain: Any, blobs: _Blobs) -> Any:
    """The inverse of `_plain`."""
    if isinstance(plain, list):
        return [_value(item, blobs) for item in plain]
    if not isinstance(plain, dict):
        if isinstance(plain, float):
            raise ValueError("a number that is not an integer")
        return plain
    ((kind, what),) = plain.items()
    if kind == "float":
        return float.fromhex(what)
    if kind == "bytes":
        return blobs.take(what)
    if kind == "dtype":
        return DTYPES[what]
    if kind == "tuple":
        return tuple(_value(item, blobs) for item in what)
    if kind == "dict":
        return {_value(name, blobs): _value(item, blobs) for name, item in what}
    if kind == "tensor":
        dtype, shape, count = what
        raw = bytearray(blobs.take(count))
        flat = torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8, device="cpu")
        return flat.view(DTYPES[dtype]).reshape(shape)
    raise ValueError(f"no such type: {kind}")
