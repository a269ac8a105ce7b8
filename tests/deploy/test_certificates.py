"""Certificates and keys: made whole, never overwritten, renewed, and changed for another authority."""

import subprocess
import time
from pathlib import Path

from deploy.test_kit import run_script, written


def test_certificates_name_the_hosts_and_are_for_the_owner_alone(tmp_path: Path) -> None:
    folder = written(tmp_path / "it's here", nodes=[{}, {}])
    made = run_script(folder, "certificates.sh", "fed.example.org", "192.0.2.7", "2001:db8::7")
    assert made.returncode == 0, made.stderr
    certificate = str(folder / "certificates/server.pem")
    text = subprocess.run(
        ["openssl", "x509", "-in", certificate, "-noout", "-ext", "subjectAltName"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for name in ("DNS:localhost", "IP Address:127.0.0.1", "DNS:fed.example.org", "IP Address:192.0.2.7"):
        assert name in text
    assert "2001:DB8:0:0:0:0:0:7" in text.upper()
    subprocess.run(["openssl", "verify", "-CAfile", str(folder / "certificates/ca.crt"), certificate], check=True)
    secrets = [*(folder / "certificates").iterdir(), *(folder / "keys").iterdir()]
    assert len(secrets) == 4 + 2 * 2
    assert not any(file.stat().st_mode & 0o077 for file in secrets)


def openssl(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["openssl", *arguments], cwd=folder / "certificates", capture_output=True, text=True, check=False
    )


def test_an_authority_is_changed_while_nodes_trust_both(tmp_path: Path) -> None:
    folder = written(tmp_path, nodes=[{}])
    assert run_script(folder, "certificates.sh").returncode == 0
    old = (folder / "certificates/ca.crt").read_text()
    in_nine_years = str(int(time.time()) + 9 * 365 * 86400)
    assert openssl(folder, "verify", "-CAfile", "ca.crt", "ca.crt").returncode == 0
    assert openssl(folder, "verify", "-attime", in_nine_years, "-CAfile", "ca.crt", "ca.crt").returncode == 0
    done = run_script(folder, "certificates.sh", "authority")
    assert done.returncode == 0, done.stderr
    both = (folder / "certificates/ca.crt").read_text()
    assert both.endswith(old)
    assert openssl(folder, "verify", "-CAfile", "ca.crt", "server.pem").returncode == 0
    done = run_script(folder, "certificates.sh", "renew")
    assert done.returncode == 0, done.stderr
    assert "docker compose up -d --force-recreate superlink proxy" in done.stdout
    assert openssl(folder, "verify", "-CAfile", "ca.crt", "server.pem").returncode == 0
    (folder / "certificates/new.crt").write_text(both.removesuffix(old))
    assert openssl(folder, "verify", "-CAfile", "new.crt", "server.pem").returncode == 0
    (folder / "certificates/old.crt").write_text(old)
    assert openssl(folder, "verify", "-CAfile", "old.crt", "server.pem").returncode != 0


def test_an_authority_that_ends_soon_signs_nothing(tmp_path: Path) -> None:
    folder = written(tmp_path, nodes=[{}])
    script = folder / "certificates.sh"
    script.write_text(script.read_text().replace("authority_days=3650", "authority_days=300"))
    assert run_script(folder, "certificates.sh").returncode == 0
    before = (folder / "certificates/server.pem").read_bytes()
    done = run_script(folder, "certificates.sh", "renew")
    assert done.returncode == 1
    assert "run ./certificates.sh authority first" in done.stderr
    assert (folder / "certificates/server.pem").read_bytes() == before
    assert not (folder / "certificates.new").exists()


def test_certificates_and_keys_are_never_overwritten(tmp_path: Path) -> None:
    folder = written(tmp_path, nodes=[{}, {}])
    assert run_script(folder, "certificates.sh", "key", "1").returncode == 0
    key = (folder / "keys/node-1").read_bytes()
    again = run_script(folder, "certificates.sh", "key", "1")
    assert again.returncode == 1
    assert "keys/node-1 exists already" in again.stderr
    assert run_script(folder, "certificates.sh").returncode == 0  # makes what is missing
    assert (folder / "keys/node-1").read_bytes() == key
    again = run_script(folder, "certificates.sh")
    assert again.returncode == 1
    assert "certificates/ exists already" in again.stderr
