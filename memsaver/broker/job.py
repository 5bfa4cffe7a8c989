"""A job: the processes that have one secret, ``MEMSAVER_JOB``, and the brokers that serve these processes alone.

Broker and client prove to each other that they have the secret, and do not send it. A proof is an HMAC-SHA256 of the
client's number, its pid and the device, for one direction. So a process that listens at a broker's path cannot use the
proof that it gets from a client: a broker compares the pid with the one that the kernel reports.
"""

from __future__ import annotations

import hmac
import os
import secrets
import struct
from collections.abc import Mapping

from memsaver.errors import ConfigError

VARIABLE = "MEMSAVER_JOB"
SHORTEST = 16  # characters of a secret
LONGEST = 256

_WORDS = ("proof_1", "proof_2", "proof_3", "proof_4")  # optional fields of `hello` and `welcome`
_PROOF = struct.Struct("<4Q")
_IDENTITY = struct.Struct("<QQ")  # the client's number, its pid
_NAME_BYTES = 8
_SECRET_BYTES = 24


class Job:
    """The job of a secret. ``name``: derived from the secret, and public: it is part of the path of the sockets."""

    def __init__(self, secret: str) -> None:
        self._secret = secret.encode()
        self.name = self._mac(b"name").hex()[: 2 * _NAME_BYTES]

    def client_proof(self, client: int, pid: int, uuid: str) -> dict[str, int]:
        """The optional fields of the ``hello`` of a client: its number, its pid, and the device's UUID."""
        return self._proof(b"client", client, pid, uuid)

    def broker_proof(self, client: int, pid: int, uuid: str) -> dict[str, int]:
        """The optional fields of the ``welcome`` for this client."""
        return self._proof(b"broker", client, pid, uuid)

    def _proof(self, side: bytes, client: int, pid: int, uuid: str) -> dict[str, int]:
        words = _PROOF.unpack(self._mac(side + _IDENTITY.pack(client, pid) + uuid.encode()))
        return dict(zip(_WORDS, words))

    def _mac(self, text: bytes) -> bytes:
        return hmac.digest(self._secret, b"memsaver " + text, "sha256")


def current() -> Job | None:
    """The job of this process. None: it has none, and uses brokers without a job.

    Raises ConfigError if ``MEMSAVER_JOB`` is no secret. The error does not contain its value.
    """
    secret = os.environ.get(VARIABLE)
    if secret is None:
        return None
    if not SHORTEST <= len(secret) <= LONGEST or not secret.isascii() or not secret.isprintable() or " " in secret:
        raise ConfigError(
            f"the value of {VARIABLE} has {len(secret)} characters, expected {SHORTEST} to {LONGEST} printable "
            "characters of ASCII without spaces: `memsaver job` prints a secret",
            option="job",
            value=None,
        )
    return Job(secret)


def contains(fields: Mapping[str, int], proof: Mapping[str, int]) -> bool:
    """Whether the optional fields of a message contain this proof. The time tells nothing about a difference."""
    return hmac.compare_digest(_packed(fields), _packed(proof))


def new_secret() -> str:
    return secrets.token_hex(_SECRET_BYTES)


def _packed(fields: Mapping[str, int]) -> bytes:
    return _PROOF.pack(*(fields.get(name, 0) for name in _WORDS))
