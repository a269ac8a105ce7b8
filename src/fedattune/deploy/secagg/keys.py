"""Keys of secure aggregation: the roster of nodes, signatures, agreed keys, and shares of secrets.

All of it is by two libraries: `cryptography` (ECDSA, X25519, HKDF, AES-GCM) and `pycryptodome` (Shamir's shares).
"""

import base64
import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from Crypto.Protocol.SecretSharing import Shamir
from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_der_public_key,
    load_ssh_private_key,
    load_ssh_public_key,
)

from ...core.errors import ConfigError
from . import BadSignatureError, SessionMismatchError

PREFIX = b"fedattune secure aggregation 1: "
"""Beginning of everything that is signed or that a key is made for, so that no other program's signature fits."""

KEY_BYTES, NONCE_BYTES, HALF_BYTES = 32, 12, 16


class Member(NamedTuple):
    """A node in the roster: its id, the name beside its key, and its public key."""

    id: str
    name: str
    key: ec.EllipticCurvePublicKey


def encode(content: bytes) -> str:
    """Encode bytes as text."""
    return base64.b64encode(content).decode()


def decode(text: object, n_bytes: int | None = None) -> bytes:
    """Decode the text of `encode`, which may come from outside."""
    try:
        content = base64.b64decode(str(text), validate=True)
    except ValueError as error:
        raise SessionMismatchError("a message holds no valid base64") from error
    if n_bytes is not None and len(content) != n_bytes:
        raise SessionMismatchError(f"a message holds {len(content)} bytes of a key, expected {n_bytes}")
    return content


def hash_text(*parts: bytes) -> str:
    """Return the SHA-256 of some parts, each with its length before it, as 64 hex digits."""
    hasher = hashlib.sha256()
    for part in parts:
        hasher.update(len(part).to_bytes(8, "big") + part)
    return hasher.hexdigest()


def load_node_key(file: Path) -> ec.EllipticCurvePrivateKey:
    """Load a node's private key, which `certificates.sh` made."""
    advice = "write the node's private key as `key` into its nodes/N.toml, such as keys/node-0"
    try:
        key = load_ssh_private_key(file.read_bytes(), password=None)
    except OSError as error:
        raise ConfigError(f"key: cannot read {file}: {error.strerror or error}; {advice}") from error
    except Exception as error:  # bytes from outside can fail in any way
        raise ConfigError(f"key: {file} is no private key without a password in OpenSSH's format; {advice}") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"key: {file} is not on a NIST curve; make one: ./certificates.sh key N")
    return key


def write_public(key: ec.EllipticCurvePublicKey) -> bytes:
    """Write a node's public key as bytes."""
    return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def make_id(key: ec.EllipticCurvePublicKey) -> str:
    """Return the id of a node: the SHA-256 of its public key."""
    return hash_text(write_public(key))


def read_member(content: bytes, name: str) -> Member:
    """Read a node's public key, which may come from outside."""
    try:
        key = load_der_public_key(content)
    except Exception as error:  # bytes from outside can fail in any way
        raise SessionMismatchError(f"{name} sent no public key") from error
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise SessionMismatchError(f"the public key of {name} is not on a NIST curve")
    return Member(make_id(key), name, key)


def read_roster(file: Path) -> dict[str, Member]:
    """Read the public keys of all nodes: id -> node.

    Each has one line of OpenSSH's format, with the node's name behind the key.
    """
    advice = "it has one line of a keys/node-N.pub for each node of the federation"
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"roster: cannot read {file}: {error}; {advice}") from error
    members: dict[str, Member] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            key = load_ssh_public_key(line.encode())
        except Exception as error:  # bytes from outside can fail in any way
            raise ConfigError(f"roster: line {number} of {file} is no public key; {advice}") from error
        if not isinstance(key, ec.EllipticCurvePublicKey):
            raise ConfigError(f"roster: line {number} of {file} is not on a NIST curve; {advice}")
        words = line.split(maxsplit=2)
        name = re.sub(r"[^\w.@-]", "?", words[2].strip())[:60] if len(words) > 2 else f"line {number}"
        id_ = make_id(key)
        if id_ in members or name in {one.name for one in members.values()}:
            raise ConfigError(f"roster: line {number} of {file} repeats a key or a name; {advice}")
        members[id_] = Member(id_, name, key)
    if not members:
        raise ConfigError(f"roster: {file} has no public key; {advice}")
    return members


def sign(key: ec.EllipticCurvePrivateKey, content: bytes) -> str:
    """Sign content by ECDSA with SHA-384."""
    return encode(key.sign(PREFIX + content, ec.ECDSA(hashes.SHA384())))


def verify(member: Member, signature: object, content: bytes) -> None:
    """Check a node's signature, or raise `BadSignatureError`."""
    try:
        member.key.verify(decode(signature), PREFIX + content, ec.ECDSA(hashes.SHA384()))
    except (InvalidSignature, SessionMismatchError) as error:
        raise BadSignatureError(
            f"the signature of {member.name} does not fit; its key in the roster is another one, or the server or "
            "somebody on the way changed the message"
        ) from error


def derive(secret: bytes, purpose: str, *parts: str) -> bytes:
    """Derive a key of 32 bytes for one purpose from a secret."""
    info = PREFIX + hash_text(purpose.encode(), *(part.encode() for part in parts)).encode()
    return HKDF(hashes.SHA256(), KEY_BYTES, salt=None, info=info).derive(secret)


def make_pair() -> tuple[bytes, bytes]:
    """Make an ephemeral pair of X25519 keys, private and public."""
    key = X25519PrivateKey.generate()
    return key.private_bytes_raw(), key.public_key().public_bytes_raw()


def find_public(private: bytes) -> bytes:
    """Return the public key of a private X25519 key."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def agree(private: bytes, public: bytes) -> bytes:
    """Return the secret that two nodes share, by X25519."""
    try:
        return X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError as error:
        raise SessionMismatchError("a node's ephemeral key is no usable point") from error


def encrypt(key: bytes, content: bytes, about: bytes) -> str:
    """Encrypt content by AES-256-GCM; `about` is authenticated with it."""
    nonce = os.urandom(NONCE_BYTES)
    return encode(nonce + AESGCM(key).encrypt(nonce, content, PREFIX + about))


def decrypt(key: bytes, text: str, about: bytes) -> bytes | None:
    """Decrypt the result of `encrypt`; None if content, key or `about` is another one."""
    try:
        content = decode(text)
        return AESGCM(key).decrypt(content[:NONCE_BYTES], content[NONCE_BYTES:], PREFIX + about)
    except (InvalidTag, ValueError, SessionMismatchError):
        return None


def split_secret(secret: bytes, threshold: int, n: int) -> list[bytes]:
    """Split 32 bytes into n shares of 32 bytes, of which `threshold` are enough (Shamir, over GF(2^128), by halves)."""
    halves = [Shamir.split(threshold, n, secret[i : i + HALF_BYTES], False) for i in (0, HALF_BYTES)]
    return [first + second for (_, first), (_, second) in zip(*halves, strict=True)]


def join_shares(shares: Mapping[int, bytes]) -> bytes:
    """Compute the secret of as many shares as are enough."""
    parts = ([(number, share[i : i + HALF_BYTES]) for number, share in shares.items()] for i in (0, HALF_BYTES))
    return b"".join(Shamir.combine(part, False) for part in parts)
