"""Check a written deployment: certificates, keys, ports, configuration, disk, versions and clock."""

import importlib.metadata
import ipaddress
import re
import shutil
import socket
import tomllib
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core.errors import ConfigError, FedAttuneError, RunError, summarize_error
from ...experiments.doctor import Finding
from ..config import DeploymentPlan
from .nodes import list_nodes, read_port

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

APP_FILE = "app/pyproject.toml"
"""The Flower app of a deployment, with the configuration of its runs."""

CONFIG_KEYS = ("tool", "flwr", "app", "config")
"""Keys on the way to the configuration of the run in the Flower app."""

TRIAL_DATA = re.compile(r"data/node-\d+")
"""Folder of a node's data that `fedattune deploy` wrote for a trial."""

RENEW_DAYS = 30
"""Days before its end from which a certificate should be renewed."""

MIN_FREE_BYTES = 2**30
"""Free bytes of disk that a run should find."""

MAX_CLOCK_ERROR_S = 5.0
"""Seconds that the clock of a node may be ahead of the server's, as Flower checks the signatures of nodes."""


def read_app(folder: Path) -> dict[str, Any]:
    """Read the Flower app of a deployment.

    Raises:
        RunError: the folder holds no deployment.
        ConfigError: the file is damaged.

    """
    file = folder / APP_FILE
    if not file.is_file():
        raise RunError(
            f"{folder} holds no deployment: no {file}; give the folder that fedattune deploy wrote"
        )
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is no TOML: {error}; fix it") from error


def find_run_folder(folder: Path) -> Path:
    """Find the run folder of a deployment; any other folder is taken for a run folder itself."""
    if not (folder / APP_FILE).is_file():
        return folder
    config = find_run_config(read_app(folder), folder / APP_FILE)
    return folder / str(config.get("run-folder", "runs/deployment"))


def find_run_config(app: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Find the configuration of the run in a Flower app; empty if there is none.

    Args:
        app: content of the app's pyproject.toml.
        file: that file, for messages.

    Raises:
        ConfigError: a key on the way holds no table.

    """
    found: Any = app
    for depth, key in enumerate(CONFIG_KEYS, start=1):
        found = found.get(key, {})
        if not isinstance(found, dict):
            raise ConfigError(
                f"{file}: {'.'.join(CONFIG_KEYS[:depth])} is {found!r:.40}, expected the table "
                f"[{'.'.join(CONFIG_KEYS)}] with keys such as rounds = 10"
            )
    return dict(found)


def check_kit(folder: Path) -> list[Finding]:
    """Check the folder that `fedattune deploy` wrote.

    Args:
        folder: the folder.

    Returns:
        What was found; what is broken has an advice.

    Raises:
        RunError: the folder holds no deployment.
        ConfigError: its Flower app is no TOML.

    """
    app = read_app(folder)
    superlink, n_registered = _check_superlink(folder)
    return [
        *_check_configuration(app),
        *_check_nodes(folder),
        *_check_certificates(folder / "certificates"),
        *_check_keys(folder / "keys", _count_nodes(app), n_registered or 0),
        superlink,
        *([] if n_registered is not None else _check_port(read_port(folder))),
        _check_disk(folder),
        *_check_versions(app),
        *_check_clock(folder),
    ]


def _broken(name: str, value: str, advice: str) -> Finding:
    return Finding(name, "broken", value, advice)


def _check_configuration(app: dict[str, Any]) -> Iterator[Finding]:
    """Check the configuration of the run, and its schema."""
    try:
        config = find_run_config(app, Path(APP_FILE))
        if not config:
            yield _broken(
                "configuration", f"no table [{'.'.join(CONFIG_KEYS)}] in {APP_FILE}", "write the folder anew"
            )
            return
        plan = DeploymentPlan(config)
    except FedAttuneError as error:
        yield _broken("configuration", str(error), f"fix {APP_FILE}")
    else:
        methods = ", ".join(plan.algorithms)
        yield Finding("configuration", "ok", f"{methods}, {plan.experiment.rounds} rounds")
        if plan.deployment.secure_aggregation:
            n = plan.deployment.nodes
            found = f"the server learns sums over {n} nodes; each node's own rules say how many are enough"
            yield Finding("secure aggregation", "ok", found)
        schema = plan.deployment.data_schema
        if schema is None:
            yield Finding("schema", "note", "none", "write data-schema, so that nodes cannot disagree")
        else:
            what = f"{len(schema.columns)} columns" if schema.columns else f"inputs of {schema.input_shape}"
            yield Finding("schema", "ok", f"{what}, {len(schema.classes)} classes")


def _check_nodes(folder: Path) -> Iterator[Finding]:
    """Check that each node's configuration can be read and names its data."""
    for file in sorted((folder / "nodes").glob("*.toml")):
        name = f"nodes/{file.name}"
        try:
            data = str(tomllib.loads(file.read_text(encoding="utf-8")).get("data", ""))
        except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            yield _broken(name, str(error), "fix the file")
            continue
        if not data or data.startswith("CHANGE ME"):
            yield Finding(
                name, "note", "names no data", "its operator writes there where the node's data are"
            )
        elif TRIAL_DATA.fullmatch(data) and not (folder / data).exists():
            advice = "bring the folder back, or name other data, or write the trial anew"
            yield _broken(name, f"the trial's data in {data} are missing", advice)
        else:
            yield Finding(name, "ok", f"data in {data}")


def _check_certificates(folder: Path) -> Iterator[Finding]:
    """Check the server's certificate: dates, names, authority and key."""
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization

    try:
        authorities = x509.load_pem_x509_certificates((folder / "ca.crt").read_bytes())
        chain = x509.load_pem_x509_certificates((folder / "server.pem").read_bytes())
        key = serialization.load_pem_private_key((folder / "server.key").read_bytes(), None)
    except OSError as error:
        where = Path(str(error.filename)).name
        yield _broken("certificates", f"{where}: {error.strerror}", "run ./certificates.sh")
        return
    except (ValueError, TypeError) as error:
        yield _broken("certificates", summarize_error(error), "replace the file that is no PEM")
        return
    server = chain[0]
    yield _check_dates("server certificate", server, "run ./certificates.sh renew")
    signers = _find_signers(chain, authorities)
    # Other authorities do no harm: during a change of the authority, ca.crt holds the old and the new one.
    latest = max(signers or authorities, key=lambda one: one.not_valid_after_utc)
    yield _check_dates("authority", latest, "make a new authority, and send its ca.crt to all nodes first")
    if missing := sorted({"localhost", "127.0.0.1"} - _list_names(server)):
        yield _broken(
            "names", f"the certificate lacks {', '.join(missing)}", "sign one that is also valid for these"
        )
    else:
        yield Finding("names", "ok", ", ".join(sorted(_list_names(server))))
    if signers:
        yield Finding("chain", "ok", f"signed by {latest.subject.rfc4514_string()}")
    else:
        yield _broken(
            "chain", "no authority in ca.crt signed server.pem", "put the authority of server.pem into ca.crt"
        )
    form = serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    if key.public_key().public_bytes(*form) == server.public_key().public_bytes(*form):
        yield Finding("server key", "ok", "fits the certificate")
    else:
        yield _broken("server key", "server.key is of another certificate", "run ./certificates.sh renew")
    yield from _check_modes([folder / "server.key", *folder.glob("ca.key")])


def _check_dates(name: str, certificate: "Certificate", advice: str) -> Finding:
    now, end = datetime.now(UTC), certificate.not_valid_after_utc
    if certificate.not_valid_before_utc > now:
        start = certificate.not_valid_before_utc
        return _broken(name, f"valid only from {start:%Y-%m-%d %H:%M} UTC", "set this machine's clock")
    if end < now:
        return _broken(name, f"expired on {end:%Y-%m-%d}", advice)
    state = f"valid until {end:%Y-%m-%d}"
    is_late = end - now < timedelta(days=RENEW_DAYS)
    return Finding(name, "note" if is_late else "ok", state, advice if is_late else "")


def _list_names(certificate: "Certificate") -> set[str]:
    from cryptography import x509

    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return set()
    addresses: list[ipaddress.IPv4Address | Any] = names.get_values_for_type(x509.IPAddress)
    return {*names.get_values_for_type(x509.DNSName), *map(str, addresses)}


def _find_signers(chain: "list[Certificate]", authorities: "list[Certificate]") -> "list[Certificate]":
    """Find the authorities that signed the end of a chain in which each certificate signed the one before."""
    last = chain[0]
    for other in chain[1:]:
        if not _has_signed(other, last):
            break
        last = other
    return [one for one in authorities if one == last or _has_signed(one, last)]


def _has_signed(issuer: "Certificate", certificate: "Certificate") -> bool:
    from cryptography.exceptions import InvalidSignature

    try:
        certificate.verify_directly_issued_by(issuer)
    except (InvalidSignature, ValueError, TypeError):
        return False
    return True


def _count_nodes(app: dict[str, Any]) -> int | None:
    """Count the nodes that the run waits for; None if the configuration is broken, which is another finding."""
    try:
        return DeploymentPlan(find_run_config(app, Path(APP_FILE))).deployment.nodes
    except FedAttuneError:
        return None


def _check_keys(folder: Path, n_nodes: int | None, n_registered: int) -> Iterator[Finding]:
    """Check the nodes' public keys, and that nobody else reads the private ones.

    Args:
        folder: the folder of the keys.
        n_nodes: nodes that the run waits for.
        n_registered: nodes that the SuperLink knows; their keys need not be here any more.

    """
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_ssh_public_key

    files = sorted(folder.glob("*.pub"))
    n_known = max(n_registered, sum(file.is_file() for file in files))
    if files and n_nodes is not None and n_known < n_nodes:
        advice = "get the others from the nodes; the first round waits for all nodes"
        yield _broken("keys", f"{n_known} public keys for {n_nodes} nodes", advice)
    if not files:
        yield _broken("keys", "no public key in keys/", "get them from the nodes, or run ./certificates.sh")
    owners: dict[bytes, str] = {}
    n_good = 0
    for file in files:
        text = b""
        try:
            text = file.read_bytes()
            is_curve = isinstance(load_ssh_public_key(text), ec.EllipticCurvePublicKey)
        except Exception:  # the text of a file can fail in any way
            is_curve = False
        if not is_curve:
            yield _broken(
                f"keys/{file.name}", "no public key that Flower accepts", "use ./certificates.sh key N"
            )
        elif (other := owners.setdefault(b" ".join(text.split()[:2]), file.name)) != file.name:
            yield _broken(f"keys/{file.name}", f"the same key as {other}", "each node needs a key of its own")
        else:
            n_good += 1
    if n_good and (n_nodes is None or n_known >= n_nodes):
        yield Finding("keys", "ok", f"{n_good} public keys")
    yield from _check_modes([file.with_suffix("") for file in files if file.with_suffix("").is_file()])


def _check_modes(files: list[Path]) -> Iterator[Finding]:
    """Check that only their owner can read private keys."""
    for file in files:
        mode = file.stat().st_mode & 0o777
        if mode & 0o077:
            where = f"{file.parent.name}/{file.name}"
            yield _broken(
                where, f"others may read it (mode {mode:o})", f"chmod 600 {where}, or make a new key"
            )


def _check_superlink(folder: Path) -> tuple[Finding, int | None]:
    """Check how many nodes are online; the number of registered nodes is None if the SuperLink does not answer."""
    try:
        nodes = list_nodes(folder)
    except RunError:
        return Finding("SuperLink", "note", "does not answer", "start ./superlink.sh"), None
    n_online = sum(node.status == "online" for node in nodes)
    text = f"answers; {n_online} of {len(nodes)} registered nodes are online"
    return Finding("SuperLink", "ok", text), len(nodes)


def _check_port(port: int) -> Iterator[Finding]:
    with socket.socket() as probe:
        probe.settimeout(2)
        is_taken = probe.connect_ex(("127.0.0.1", port)) == 0
    if is_taken:
        advice = "end the other program, set FEDATTUNE_PORT, or look at the SuperLink's log"
        yield _broken("port", f"{port} is taken by a program that is not our SuperLink", advice)
    else:
        yield Finding("port", "ok", f"{port} is free")


def _check_disk(folder: Path) -> Finding:
    free = shutil.disk_usage(folder).free
    text = f"{free / 2**30:.1f} GiB free"
    if free < MIN_FREE_BYTES:
        return _broken("disk", text, "make room: models and the SuperLink's database grow")
    return Finding("disk", "ok", text)


def _check_versions(app: dict[str, Any]) -> Iterator[Finding]:
    """Compare the installed Flower with the pinned one."""
    project = app.get("project")
    needed = project.get("dependencies") if isinstance(project, dict) else None
    pins = [str(one) for one in needed] if isinstance(needed, list) else []
    pinned = next((found[1] for one in pins if (found := re.fullmatch(r"flwr==([\w.]+)", one))), "")
    installed = importlib.metadata.version("flwr")
    if installed == pinned:
        yield Finding("Flower", "ok", installed)
    else:
        advice = f"pip install flwr=={pinned}" if pinned else f"write flwr=={installed} into {APP_FILE}"
        yield _broken("Flower", f"installed is {installed}, the app needs {pinned or 'no version'}", advice)


def _check_clock(folder: Path) -> Iterator[Finding]:
    """Compare the clock with the files of the folder: a clock that was set back makes them later than now."""
    files = [file for file in (folder / "certificates").glob("*") if file.is_file()]
    ahead = max((file.stat().st_mtime for file in files), default=0.0) - datetime.now(UTC).timestamp()
    if ahead > MAX_CLOCK_ERROR_S:
        advice = (
            "synchronise the clock, as by chronyd: a node may be 5 s ahead of the server and 305 s behind"
        )
        yield _broken("clock", f"files are {ahead:.0f} s ahead of this machine's clock", advice)
    else:
        now = datetime.now(UTC)
        yield Finding(
            "clock", "ok", f"{now:%Y-%m-%d %H:%M:%S} UTC, no file is later; compare it with the nodes'"
        )
