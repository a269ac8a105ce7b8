"""Certificates that are their own authorities, and the keys of nodes."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.x509.oid import NameOID


def write_certificate(folder: Path, name: str = "localhost", days: int = 365) -> ec.EllipticCurvePrivateKey:
    """Write a certificate that is its own authority, valid for `name`, as ca.crt and, with its key, server.pem."""
    key = ec.generate_private_key(ec.SECP384R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    end = datetime.now(UTC) + timedelta(days=days)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(end - timedelta(days=400))
        .not_valid_after(end)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    folder.mkdir(parents=True, exist_ok=True)
    text = certificate.public_bytes(Encoding.PEM)
    (folder / "ca.crt").write_bytes(text)
    (folder / "server.pem").write_bytes(text + key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return key


def write_node_keys(folder: Path, n: int) -> list[dict[str, str]]:
    """Write the keys of n nodes and their roster; return what the configuration of each node names."""
    folder.mkdir(parents=True, exist_ok=True)
    roster = folder / "roster.pub"
    lines, named = [], []
    for i in range(n):
        key, file = ec.generate_private_key(ec.SECP384R1()), folder / f"node-{i}"
        file.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
        public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
        lines.append(f"{public} node-{i}\n")
        named.append({"key": str(file), "roster": str(roster)})
    roster.write_text("".join(lines))
    return named
