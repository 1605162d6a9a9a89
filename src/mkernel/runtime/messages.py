"""What ranks in different processes tell each other, as bytes.

Only plain data travels: None, bool, int, float, str, bytes, torch.dtype, dense CPU tensors, and tuples, lists and
dicts of these. Reading a message builds such values and nothing else, so whoever can write to the process group's store
can not run code in a rank, as a pickle would let them. Each message carries a MAC under the job's secret
(`runtime/secret.py`) that also covers the name it was stored under: a stranger's message, or one that was copied from
elsewhere, is refused.

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
    """A message that no rank of this job can have written."""


def encode(value: Any, key: bytes, name: str) -> bytes:
    """The message that stands under `name` in the store."""
    blobs: list[bytes] = []
    text = json.dumps(_plain(value, blobs), separators=(",", ":")).encode()
    body = struct.pack("<Q", len(text)) + text + b"".join(blobs)
    return _mac(key, name, body) + body


def decode(message: bytes, key: bytes, name: str) -> Any:
    """What `encode` was given. Raises BadMessage if anything about the message is not as `encode` writes it."""
    body = message[MAC_BYTES:]
    if len(message) > MOST_BYTES or not hmac.compare_digest(message[:MAC_BYTES], _mac(key, name, body)):
        raise BadMessage("it does not carry the secret of this job")
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
    """A value in terms of JSON: what JSON has no word for is an object with one key that names its type."""
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
    raise TypeError(f"ranks can tell each other plain data and tensors, not a {type(value).__name__}")


class _Blobs:
    """The raw bytes behind the text of a message, taken in order."""

    def __init__(self, body: bytes, at: int):
        self.body, self.at = body, at

    def take(self, count: Any) -> bytes:
        if type(count) is not int or not 0 <= count <= len(self.body) - self.at:
            raise ValueError(f"{count} bytes are not there")
        self.at += count
        return self.body[self.at - count : self.at]


def _value(plain: Any, blobs: _Blobs) -> Any:
    """What `_plain` was given."""
    if isinstance(plain, list):
        return [_value(item, blobs) for item in plain]
    if not isinstance(plain, dict):
        if isinstance(plain, float):
            raise ValueError("a number that is not whole")
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
        flat = torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
        return flat.view(DTYPES[dtype]).reshape(shape)
    raise ValueError(f"no such type: {kind}")
