"""The secret of a job, which authenticates messages in the store and connections between nodes.

The process group's store listens on the network without authentication, so the secret never passes through it in the
clear. Every rank publishes a Diffie-Hellman public value (group ffdhe2048 of RFC 7919); rank 0 draws the secret and
sends it to each rank, masked with the key that the two share. Read access to the store reveals nothing. With write
access while a group is being made, a man in the middle is possible. A secret from the launcher, in MKERNEL_SECRET,
prevents that, too: public values then carry a proof that their author knows it, and the masks depend on it.
"""

from __future__ import annotations

import hmac
import os
import secrets
from collections.abc import Sequence

from mkernel.runtime.errors import ArgumentError, MKernelError

VARIABLE = "MKERNEL_SECRET"
SHORTEST = 16  # characters of a launcher's secret
OPEN = b"no secret yet"  # signs messages before there is a secret
PRIME = int(
    "FFFFFFFFFFFFFFFFADF85458A2BB4A9AAFDC5620273D3CF1D8B9C583CE2D3695A9E13641146433FBCC939DCE249B3EF97D2FE363630C75D8"
    "F681B202AEC4617AD3DF1ED5D5FD65612433F51F5F066ED0856365553DED1AF3B557135E7F57C935984F0C70E0E68B77E2A689DAF3EFE872"
    "1DF158A136ADE73530ACCA4F483A797ABC0AB182B324FB61D108A94BB2C8E3FBB96ADAB760D7F4681D4F42A3DE394DF4AE56EDE76372BB19"
    "0B07A7C8EE0A6D709E02FCE1CDF7E2ECC03404CD28342F619172FE9CE98583FF8E4F1232EEF28183C3FE3B1B4C6FAD733BB5FCBC2EC22005"
    "C58EF1837D1683B2C6F34A26C1B2EFFA886B423861285C97FFFFFFFFFFFFFFFF",
    16,
)
GENERATOR = 2
NUMBER_BYTES = (PRIME.bit_length() + 7) // 8


def given() -> bytes | None:
    """The launcher's secret as a key; None if there is none."""
    text = os.environ.get(VARIABLE)
    if not text:
        return None
    if len(text) < SHORTEST:
        raise ArgumentError(f"{VARIABLE} has {len(text)} characters; it needs {SHORTEST} or more, chosen at random")
    return derived(text.encode(), "launcher")


def derived(secret: bytes, purpose: str) -> bytes:
    """A separate key for each purpose."""
    return hmac.digest(secret, f"mkernel {purpose}".encode(), "sha256")


class Agreement:
    """One rank's side of the key agreement, in two rounds: everybody's `offer`, then rank 0's `masked`."""

    def __init__(self, job: str, rank: int):
        self._job, self._rank = job, rank
        self._given = given()
        self._exponent = secrets.randbits(8 * 32)
        self._public = pow(GENERATOR, self._exponent, PRIME).to_bytes(NUMBER_BYTES, "big")

    def offer(self) -> tuple[bytes, bytes]:
        """This rank's public value, and the proof that it knows the launcher's secret (empty if there is none)."""
        return self._public, self._proof(self._rank, self._public)

    def take(self, offers: Sequence[tuple[bytes, bytes]]) -> None:
        """Check and keep the offers of all ranks."""
        for rank, offer in enumerate(offers):
            shape = isinstance(offer, tuple) and len(offer) == 2 and all(isinstance(part, bytes) for part in offer)
            if not shape or not 1 < int.from_bytes(offer[0], "big") < PRIME - 1:
                raise MKernelError(f"the entry for rank {rank} in the store was not written by a rank")
        having = [rank for rank, (_, proof) in enumerate(offers) if proof]
        if 0 < len(having) < len(offers):
            raise ArgumentError(
                f"{VARIABLE} must be set on every rank or on none; it is set on ranks {having} of {len(offers)}"
            )
        for rank, (public, proof) in enumerate(offers):
            if not hmac.compare_digest(proof, self._proof(rank, public)):
                raise MKernelError(
                    f"rank {rank} has another {VARIABLE} than rank {self._rank}, or somebody else wrote its entry"
                )
        self._offers = offers
        self._transcript = b"".join(public for public, _ in offers)

    def masked(self) -> list[bytes]:
        """On rank 0: draw the secret, and mask it for each rank with their shared key; with a tag."""
        self.secret = secrets.token_bytes(32)
        return [self._mask(rank, public, self.secret) for rank, (public, _) in enumerate(self._offers)]

    def unmask(self, masked: Sequence[bytes]) -> bytes:
        """The secret, from what rank 0 has masked."""
        if self._rank == 0:
            return self.secret
        mine = masked[self._rank] if isinstance(masked, list) and len(masked) == len(self._offers) else None
        if isinstance(mine, bytes) and len(mine) == 64:
            pad = self._key(self._rank, self._offers[0][0], "mask")
            found = bytes(one ^ other for one, other in zip(mine[:32], pad))
            if hmac.compare_digest(self._mask(self._rank, self._offers[0][0], found), mine):
                return found
        raise MKernelError("rank 0 did not write its entry in the store: somebody is interfering with the job")

    def _proof(self, rank: int, public: bytes) -> bytes:
        if self._given is None:
            return b""
        return derived(self._given, f"offer of rank {rank} for {self._job}: {public.hex()}")

    def _key(self, rank: int, public: bytes, purpose: str) -> bytes:
        shared = pow(int.from_bytes(public, "big"), self._exponent, PRIME).to_bytes(NUMBER_BYTES, "big")
        return derived(shared + (self._given or b"") + self._transcript, f"{purpose} for rank {rank} of {self._job}")

    def _mask(self, rank: int, public: bytes, secret: bytes) -> bytes:
        hidden = bytes(one ^ other for one, other in zip(secret, self._key(rank, public, "mask")))
        return hidden + hmac.digest(self._key(rank, public, "tag"), hidden, "sha256")
