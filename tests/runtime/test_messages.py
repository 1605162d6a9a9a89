"""What ranks tell each other, and who cannot make them believe something."""

import pickle
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mkernel.runtime import messages, secret
from mkernel.runtime.errors import ArgumentError, MKernelError

KEY, NAME = b"k" * 32, "job/call/0"

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
    | st.sampled_from([torch.bfloat16, torch.float8_e4m3fn, torch.int64]),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=20,
)  # fmt: skip


@given(plain)
def test_plain_data_comes_as_it_was(value):
    assert messages.decode(messages.encode(value, KEY, NAME), KEY, NAME) == value


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.bool, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3, 4)])
def test_tensors_come_as_they_were(dtype, shape):
    tensor = torch.randn(shape).to(dtype)
    found, nan = messages.decode(messages.encode((tensor, float("nan")), KEY, NAME), KEY, NAME)
    assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(found.float(), tensor.float())
    assert nan != nan
    turned = torch.arange(6).view(2, 3).t()
    assert torch.equal(messages.decode(messages.encode(turned, KEY, NAME), KEY, NAME), turned)


def test_other_objects_are_not_sent():
    with pytest.raises(TypeError, match="plain data and tensors, not a object"):
        messages.encode([object()], KEY, NAME)


class Trap:
    """What unpickles it runs code."""

    def __reduce__(self):
        return exec, ("raise SystemExit('code ran')",)


def test_a_pickle_is_no_message():
    for data in (pickle.dumps(Trap()), bytes(32) + pickle.dumps(Trap())):
        with pytest.raises(messages.BadMessage, match="not signed with the secret"):
            messages.decode(data, KEY, NAME)


def test_a_message_is_good_for_one_key_and_one_place():
    message = messages.encode((1, b"two"), KEY, NAME)
    for wrong in (
        (message, b"x" * 32, NAME),
        (message, KEY, "job/call/1"),
        (message[:-1], KEY, NAME),
        (b"", KEY, NAME),
    ):
        with pytest.raises(messages.BadMessage):
            messages.decode(*wrong)


@given(st.data())
def test_a_changed_message_is_refused(data):
    message = bytearray(messages.encode((1, b"two", [3.0]), KEY, NAME))
    place = data.draw(st.integers(0, len(message) - 1))
    message[place] ^= data.draw(st.integers(1, 255))
    with pytest.raises(messages.BadMessage):
        messages.decode(bytes(message), KEY, NAME)


def signed(text: bytes, blobs: bytes = b"", length: int | None = None) -> bytes:
    """What a rank that lies could send: a good MAC, and anything behind it."""
    body = struct.pack("<Q", len(text) if length is None else length) + text + blobs
    return messages._mac(KEY, NAME, body) + body


@pytest.mark.parametrize(
    "message",
    [
        signed(b"{"),
        signed(b"[" * 100_000),
        signed(b'{"bytes": 5}', b"1234"),
        signed(b'{"bytes": -1}', b"1234"),
        signed(b'{"bytes": true}', b"1"),
        signed(b'{"bytes": 1e9}'),
        signed(b"1", b"left over"),
        signed(b"1", length=2**63),
        signed(b'{"dtype": "torch.nn"}'),
        signed(b'{"object": 1}'),
        signed(b'{"bytes": 0, "tuple": []}'),
        signed(b'{"tensor": ["torch.float32", [1000000000000], 4]}', b"1234"),
        signed(b'{"tensor": ["torch.float32", [-1, 0], 4]}', b"1234"),
        signed(b'{"dict": [[[], 1]]}'),
        signed(b"1.5"),
        signed(b'{"float": "one"}'),
    ],
)
def test_what_no_rank_writes_is_refused(message):
    with pytest.raises(messages.BadMessage):
        messages.decode(message, KEY, NAME)


# -- the secret


def agreed(agreements):
    """What ranks tell each other to agree on a secret, all of it, and what each of them comes to."""
    offers = [agreement.offer() for agreement in agreements]
    for agreement in agreements:
        agreement.take(offers)
    masked = agreements[0].masked()
    return (offers, masked), [agreement.unmask(masked) for agreement in agreements]


@pytest.mark.parametrize("launchers", [None, "a secret of the launcher's"])
def test_all_ranks_come_to_a_secret_that_was_not_sent(monkeypatch, launchers):
    monkeypatch.delenv(secret.VARIABLE, raising=False)
    if launchers:
        monkeypatch.setenv(secret.VARIABLE, launchers)
    told, secrets = agreed([secret.Agreement("job", rank) for rank in range(4)])
    assert len(set(secrets)) == 1
    assert len(secrets[0]) == 32
    everything = b"".join(part for offer in told[0] for part in offer) + b"".join(told[1])
    assert secrets[0] not in everything
    assert not launchers or launchers.encode() not in everything
    assert agreed([secret.Agreement("job", rank) for rank in range(4)])[1][0] != secrets[0]


def test_the_prime_is_safe():
    """Both it and its half, by Fermat's test; the group is ffdhe2048 of RFC 7919."""
    for number in (secret.PRIME, secret.PRIME // 2):
        assert all(pow(base, number - 1, number) == 1 for base in (2, 3, 5, 7))
    assert secret.PRIME.bit_length() == 2048


def test_a_short_secret_is_refused(monkeypatch):
    monkeypatch.setenv(secret.VARIABLE, "short")
    with pytest.raises(ArgumentError, match=r"MKERNEL_SECRET has 5 characters; it needs 16"):
        secret.given()


def test_ranks_with_different_secrets_are_named(monkeypatch):
    agreements = []
    for rank, text in enumerate(["the same secret for all"] * 2 + ["another secret than that"]):
        monkeypatch.setenv(secret.VARIABLE, text)
        agreements.append(secret.Agreement("job", rank))
    offers = [agreement.offer() for agreement in agreements]
    with pytest.raises(MKernelError, match="rank 2 has another MKERNEL_SECRET than rank 0"):
        agreements[0].take(offers)
    monkeypatch.delenv(secret.VARIABLE)
    without = secret.Agreement("job", 1)
    for agreement in (agreements[0], without):
        with pytest.raises(ArgumentError, match=r"every rank or on none; it is set on ranks \[0, 2\] of 3"):
            agreement.take([offers[0], without.offer(), offers[2]])


@pytest.mark.parametrize("public", [0, 1, secret.PRIME - 1, secret.PRIME, 2**4096])
def test_public_values_that_give_the_secret_away_are_refused(public):
    mine = secret.Agreement("job", 0)
    with pytest.raises(MKernelError, match="entry for rank 1 in the store was not written by a rank"):
        mine.take([mine.offer(), (public.to_bytes(600, "big"), b"")])


def test_what_rank_0_wrote_can_not_be_changed():
    agreements = [secret.Agreement("job", rank) for rank in range(2)]
    offers = [agreement.offer() for agreement in agreements]
    for agreement in agreements:
        agreement.take(offers)
    masked = agreements[0].masked()
    for wrong in (
        [masked[0]] * 2,
        [],
        None,
        [b"", b"x" * 64],
        [masked[0], masked[1][:-1] + bytes([masked[1][-1] ^ 1])],
    ):
        with pytest.raises(MKernelError, match="somebody is interfering"):
            agreements[1].unmask(wrong)
