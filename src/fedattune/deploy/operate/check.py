"""Checks of a written deployment, at its server, and of a node: files, keys, certificates, server, clock and disk."""

import importlib.metadata
import ipaddress
import os
import re
import socket
import ssl
import time
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..._version import __version__
from ...core.checks import (
    NODE_CHECKS,
    Check,
    Finding,
    broken,
    check_free_space,
    find_nearest,
    find_write_error,
    note,
    ok,
    run_checks,
)
from ...core.errors import ConfigError, FedAttuneError, RunError, summarize_error
from ...data import Schema
from ...data.node import find_node_problems
from ...experiments.config import Experiment
from .. import FLOWER_VERSIONS, check_flower_version
from ..config import DeploymentOptions, DeploymentPlan
from ..node.files import find_base, find_state, read_node_file
from ..node.policy import OTHER_KEYS, NodePolicy
from .kit import (
    APP_FILE,
    CONFIG_KEYS,
    SERVER_APP,
    find_run_config,
    find_server_app,
    keep_loopback_direct,
    list_nodes,
    read_app,
    read_port,
)

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

TRIAL_DATA = re.compile(r"data/node-\d+")
"""Folder of a node's data that `fedattune deploy write` wrote for a trial."""

RENEW_DAYS = 30
"""Days before its end from which a certificate should be renewed."""

MAX_AHEAD_S, MAX_BEHIND_S = 5, 305
"""Seconds by which Flower lets a node's clock be ahead of the server's, or behind it."""

CLOCK_RULE = f"Flower accepts a node at most {MAX_AHEAD_S} s ahead and {MAX_BEHIND_S} s behind"

DATE_LAG_S = 2
"""Seconds by which a Date header may lag: it has whole seconds, and uvicorn renews it once a second."""

TIMEOUT_S = 10.0
"""Seconds to wait for the server."""

TLS_ADVICE = {
    "has expired": "the server's operators must renew it; see that this machine's date is right, too",
    "not yet valid": "set this machine's clock, or ask the server's operators",
    "match": "use an address that the certificate names, or ask the server's operators for a certificate with this one",
    "self-signed": "get certificates/ca.crt from the server's operators again, over a channel that you trust",
    "unable to get local issuer": "get certificates/ca.crt from the server's operators again, over a trusted channel",
}
"""Words of OpenSSL's message -> what to do."""


def check_kit(folder: Path) -> list[Finding]:
    """Check the folder that `fedattune deploy write` wrote."""
    app = read_app(folder)
    certificates = folder / "certificates"
    advice = "make room: models and the SuperLink's database grow"
    try:
        statuses = [node.status for node in list_nodes(folder) if node.status != "removed"]
    except RunError:
        statuses = None
    keys, n_registered = folder / "keys", len(statuses or ())
    checks = (
        Check("configuration", lambda: _check_run(app), f"fix {APP_FILE}"),
        Check("nodes", lambda: _check_node_files(folder), "fix the files in nodes"),
        Check("certificates", lambda: _check_certificates(certificates), "run ./certificates.sh"),
        Check("keys", lambda: _check_keys(keys, app, n_registered), "make the keys anew"),
        Check("SuperLink", lambda: _check_superlink(folder, statuses), "start ./superlink.sh, and look at its log"),
        Check("disk", lambda: [check_free_space("disk", folder, "", "broken", advice)], advice),
        Check("Flower", lambda: _check_pin(app), "pip install 'fedattune[flower]'"),
        Check("clock", lambda: _check_file_times(certificates), "compare the clock with the nodes'"),
    )
    return run_checks(checks)


def check_node(
    file: Path,
    *,
    superlink: str | None = None,
    certificates: Path | None = None,
    key: Path | None = None,
    schema_file: Path | None = None,
) -> list[Finding]:
    """Check a node, and find everything that is wrong at once.

    Args:
        superlink: address of the server, `HOST:PORT`; None leaves the connection out.
        certificates, key: files of the authority that the node trusts and of its private key; by default the
            deployment's, as the schema.
    """
    config, base = read_node_file(file), find_base(file)
    app = base / APP_FILE
    run = find_run_config(read_node_file(app), app) if app.exists() else {}
    schema = Schema.read(schema_file) if schema_file else None
    if schema is None and (text := run.get("data-schema")):
        schema = Schema.from_json(str(text))
    key, authority = (key or base / "keys" / f"node-{file.stem}", certificates or base / "certificates" / "ca.crt")
    state = find_state(file)
    checks = (
        Check("Flower", _check_versions, "pip install 'fedattune[flower]'"),
        Check("configuration", lambda: _check_policy(config, run, base), "correct the node's configuration"),
        Check("data", lambda: _check_data(config, base, run, schema), "correct the node's data"),
        Check("key", lambda: _check_key(key), "make one: ./certificates.sh key N"),
        Check("authority", lambda: _check_authority(authority), "get it from the server's operators"),
        Check("server", lambda: _check_server(superlink, authority), "ask the server's operators"),
        Check("state", lambda: _check_state(state), "make the folder writable for the user of the node"),
    )
    return run_checks(checks)


def _check_run(app: dict[str, Any]) -> Iterator[Finding]:
    try:
        config = find_run_config(app, Path(APP_FILE))
    except FedAttuneError as error:
        yield broken("configuration", str(error), f"fix {APP_FILE}")
        return
    if not config:
        yield broken("configuration", f"no table [{'.'.join(CONFIG_KEYS)}] in {APP_FILE}", "write the folder anew")
        return
    try:
        plan = DeploymentPlan(config)
    except FedAttuneError as error:
        if (server := find_server_app(app)) in ("", SERVER_APP):
            yield broken("configuration", str(error), f"fix {APP_FILE}")
        else:  # such as a custom method, which only the operators' app knows
            found = f"was not checked with {server}, and FedAttune alone says: {error}"
            yield note("configuration", found, f"see that {server} has what is missing, or fix {APP_FILE}")
    else:
        yield from plan.describe()


def _check_node_files(folder: Path) -> Iterator[Finding]:
    """Check that each node's configuration can be read and names its data."""
    for file in sorted((folder / "nodes").glob("*.toml")):
        name = f"nodes/{file.name}"
        try:
            data = str(tomllib.loads(file.read_text(encoding="utf-8")).get("data", ""))
        except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            yield broken(name, str(error), "fix the file")
            continue
        if not data or data.startswith("CHANGE ME"):
            yield note(name, "names no data", "its operator writes there where the node's data are")
        elif TRIAL_DATA.fullmatch(data) and not (folder / data).exists():
            advice = "bring the folder back, or name other data, or write the trial anew"
            yield broken(name, f"the trial's data in {data} are missing", advice)
        else:
            yield ok(name, f"data in {data}")


def _check_certificates(folder: Path) -> Iterator[Finding]:
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization

    try:
        authorities = x509.load_pem_x509_certificates((folder / "ca.crt").read_bytes())
        chain = x509.load_pem_x509_certificates((folder / "server.pem").read_bytes())
        key = serialization.load_pem_private_key((folder / "server.key").read_bytes(), None)
    except OSError as error:
        where = Path(str(error.filename)).name
        yield broken("certificates", f"{where}: {error.strerror}", "run ./certificates.sh")
        return
    except (ValueError, TypeError) as error:
        yield broken("certificates", summarize_error(error), "replace the file that is no PEM")
        return
    server = chain[0]
    yield _check_dates("server certificate", "server.pem", server, "run ./certificates.sh renew")
    signers = _find_signers(chain, authorities)
    # Other authorities do no harm: during a change of the authority, ca.crt holds the old and the new one.
    latest = max(signers or authorities, key=lambda one: one.not_valid_after_utc)
    advice = "make a new authority, and send its ca.crt to all nodes first"
    yield _check_dates("authority", "the latest authority in ca.crt", latest, advice)
    if missing := sorted({"localhost", "127.0.0.1"} - _list_names(server)):
        yield broken("names", f"the certificate lacks {', '.join(missing)}", "sign one that is also valid for these")
    else:
        yield ok("names", ", ".join(sorted(_list_names(server))))
    if signers:
        yield ok("chain", f"signed by {latest.subject.rfc4514_string()}")
    else:
        yield broken("chain", "no authority in ca.crt signed server.pem", "put the authority of server.pem into ca.crt")
    form = serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    if key.public_key().public_bytes(*form) == server.public_key().public_bytes(*form):
        yield ok("server key", "fits the certificate")
    else:
        yield broken("server key", "server.key is of another certificate", "run ./certificates.sh renew")
    yield from _check_modes([folder / "server.key", *folder.glob("ca.key")])


def _check_dates(name: str, what: str, certificate: "Certificate", advice: str) -> Finding:
    start = certificate.not_valid_before_utc
    if start > datetime.now(UTC):
        return broken(name, f"{what} is valid only from {start:%Y-%m-%d %H:%M} UTC", "set this machine's clock")
    return _judge_end(name, what, certificate.not_valid_after_utc, advice)


def _judge_end(name: str, what: str, end: datetime, advice: str) -> Finding:
    left = end - datetime.now(UTC)
    if left < timedelta(0):
        return broken(name, f"{what} has expired on {end:%Y-%m-%d}", advice)
    if left < timedelta(days=RENEW_DAYS):
        return note(name, f"{what} expires on {end:%Y-%m-%d}, in {left.days} days", advice)
    return ok(name, f"{what} is valid until {end:%Y-%m-%d}")


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


def _check_keys(folder: Path, app: dict[str, Any], n_registered: int) -> Iterator[Finding]:
    """Check the nodes' public keys, and that nobody else reads the private ones.

    The keys of registered nodes, which the SuperLink knows, need not be here any more.
    """
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_ssh_public_key

    n_nodes: int | None = None
    with suppress(FedAttuneError):  # another finding, as is a number that is none
        found = find_run_config(app, Path(APP_FILE)).get("nodes", DeploymentOptions.model_fields["nodes"].default)
        n_nodes = found if isinstance(found, int) else None
    files = sorted(folder.glob("*.pub"))
    n_known = max(n_registered, sum(file.is_file() for file in files))
    if files and n_nodes is not None and n_known < n_nodes:
        advice = "get the others from the nodes; the first round waits for all nodes"
        yield broken("keys", f"{n_known} public keys for {n_nodes} nodes", advice)
    if not files:
        yield broken("keys", "no public key in keys/", "get them from the nodes, or run ./certificates.sh")
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
            yield broken(f"keys/{file.name}", "no public key that Flower accepts", "use ./certificates.sh key N")
        elif (other := owners.setdefault(b" ".join(text.split()[:2]), file.name)) != file.name:
            yield broken(f"keys/{file.name}", f"the same key as {other}", "each node needs a key of its own")
        else:
            n_good += 1
    if n_good and (n_nodes is None or n_known >= n_nodes):
        yield ok("keys", f"{n_good} public keys")
    yield from _check_modes([file.with_suffix("") for file in files if file.with_suffix("").is_file()])


def _check_modes(files: list[Path]) -> Iterator[Finding]:
    for file in files:
        where = f"{file.parent.name}/{file.name}"
        if found := _find_open_mode(file):
            yield broken(where, found, f"chmod 600 {where}, or make a new key")


def _find_open_mode(file: Path) -> str:
    """Say if other users may read a private key; empty if only its owner can."""
    mode = file.stat().st_mode & 0o777
    if os.name == "posix" and mode & 0o077:
        return f"other users may read {file.name} (mode {mode:03o}, expected 600)"
    return ""


def _check_superlink(folder: Path, statuses: list[str] | None) -> Iterator[Finding]:
    """Tell how many nodes are online, or whether the port is free for a SuperLink that does not answer."""
    if statuses is not None:
        n_online = statuses.count("online")
        yield ok("SuperLink", f"answers; {n_online} of {len(statuses)} registered nodes are online")
        return
    yield note("SuperLink", "does not answer", "start ./superlink.sh")
    port = read_port(folder)
    with socket.socket() as probe:
        probe.settimeout(2)
        is_free = probe.connect_ex(("127.0.0.1", port)) != 0
    if is_free:
        yield ok("port", f"{port} is free")
    else:
        advice = "end the other program, set FEDATTUNE_PORT, or look at the SuperLink's log"
        yield broken("port", f"{port} is taken by a program that is not our SuperLink", advice)


def _check_pin(app: dict[str, Any]) -> Iterator[Finding]:
    from packaging.specifiers import SpecifierSet

    yield from _check_flower()
    project = app.get("project")
    needed = project.get("dependencies") if isinstance(project, dict) else None
    pins = [str(one) for one in needed] if isinstance(needed, list) else []
    pin = next((found[1] for one in pins if (found := re.fullmatch(r"flwr([=<>!~][=<>!~\w.*, ]+)", one))), "")
    installed = importlib.metadata.version("flwr")
    if not pin:
        yield broken("app", "it names no version of Flower", f"write flwr{FLOWER_VERSIONS} into {APP_FILE}")
    elif installed not in SpecifierSet(pin):
        says = f"installed is Flower {installed}, the app needs {pin}"
        yield broken("app", says, f"pip install 'flwr{pin}', or write flwr{FLOWER_VERSIONS} into {APP_FILE}")


def _check_file_times(folder: Path) -> Iterator[Finding]:
    """Compare the clock with files: a clock that was set back makes them later than now."""
    now = datetime.now(UTC)
    times = [file.stat().st_mtime for file in folder.glob("*") if file.is_file()]
    ahead = max(times, default=0.0) - now.timestamp()
    if ahead > MAX_AHEAD_S:
        advice = f"synchronise the clock, as by chronyd: {CLOCK_RULE}"
        yield broken("clock", f"files are {ahead:.0f} s ahead of this machine's clock", advice)
    else:
        yield ok("clock", f"{now:%Y-%m-%d %H:%M:%S} UTC, no file is later; compare it with the nodes'")


def _check_versions() -> Iterator[Finding]:
    yield ok("FedAttune", f"version {__version__}; the server may be one minor version apart")
    yield from _check_flower()


def _check_flower() -> Iterator[Finding]:
    try:
        check_flower_version()
    except ConfigError as error:
        yield broken("Flower", str(error))
    else:
        yield ok("Flower", f"version {importlib.metadata.version('flwr')}")


def _check_policy(config: Mapping[str, Any], run: Mapping[str, Any], base: Path) -> Iterator[Finding]:
    """Check the node's rules, and whether they allow the run of the deployment."""
    try:
        rules = NodePolicy.read(config)
    except ConfigError as error:
        yield broken("configuration", str(error), "correct these keys")
        return
    refusals = []
    if run:
        try:
            plan = DeploymentPlan(run)
        except FedAttuneError as error:  # such as a custom method, which only the operators' app knows
            advice = "ask the server's operators for the methods and rounds of the run"
            yield note("run", f"the rules were not compared with the app: {error}", advice)
        else:
            refusals = list(_find_refusals(rules, plan))
    if not refusals:
        yield ok("rules", rules.describe())
    yield from refusals
    for check in NODE_CHECKS:
        yield from check(rules, base, run)


def _find_refusals(rules: NodePolicy, plan: DeploymentPlan) -> Iterator[Finding]:
    """Find the methods, and the number of rounds, for which the node would refuse a run."""
    for methods, rounds in [*(([name], 0) for name in plan.algorithms), ([], plan.experiment.rounds)]:
        try:
            rules.check_run(methods, rounds)
        except RunError as error:
            yield broken("rules", str(error), "or leave this run out")


def _check_data(
    config: Mapping[str, Any], base: Path, run: Mapping[str, Any], schema: Schema | None
) -> Iterator[Finding]:
    for key in ("test", "validation"):
        if not isinstance(run.get(key, 0), int | float):
            found = f"{base / APP_FILE}: {key} is {run[key]!r:.40}, expected a number"
            yield broken("configuration", found, "get the app from the server's operators again")
            return
    values = dict(config)
    if "data" in values and (base / str(values["data"])).exists():
        values["data"] = str(base / str(values["data"]))
    defaults = Experiment.flat_fields()
    test, validation = (float(run.get(key, defaults[key].default)) for key in ("test", "validation"))
    problems = find_node_problems(values, schema, test=test, validation=validation, other_keys=OTHER_KEYS)
    for problem in problems:
        yield broken(problem.kind, problem.text)
    if schema is None:
        advice = "give --schema-file with the schema of the federation"
        yield note("schema", "not known, so the data were not compared with it", advice)
    if not problems:
        yield ok("data", f"{values['data']} can be read{' and fits the schema' if schema else ''}")


def _check_key(file: Path) -> Iterator[Finding]:
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key

    make = "make one: ./certificates.sh key N, and send the file .pub to the server's operators"
    try:
        key = load_ssh_private_key(file.read_bytes(), password=None)
    except OSError as error:
        yield broken("key", f"cannot read {file}: {error.strerror or error}", make)
        return
    except Exception as error:  # bytes from outside can fail in any way
        found = f"{file} is no private key without a password in OpenSSH's format ({type(error).__name__})"
        yield broken("key", found, make)
        return
    if not isinstance(key, ec.EllipticCurvePrivateKey):  # in OpenSSH's format, all of these are on NIST curves
        found = f"{file} is a key of the kind {type(key).__name__}, expected one on a NIST curve such as P-384"
        yield broken("key", found, make)
        return
    if found := _find_open_mode(file):
        yield broken("key", found, f"chmod 600 {file}")
    else:
        yield ok("key", f"{file} is a key for Flower ({key.curve.name}) that only its owner can read")


def _check_authority(file: Path) -> Iterator[Finding]:
    from cryptography import x509

    advice = "get it from the server's operators, over a channel that you trust"
    try:
        found = x509.load_pem_x509_certificates(file.read_bytes())
    except OSError as error:
        yield broken("authority", f"cannot read {file}: {error.strerror or error}", advice)
    except ValueError:
        yield broken("authority", f"{file} holds no certificate in PEM format", advice)
    else:
        # An expired authority beside a valid one does no harm, and both are there while the authority changes.
        end = max(one.not_valid_after_utc for one in found)
        yield _judge_end("authority", str(file), end, "get the new one from the server's operators")


def _ask_server(superlink: str, authority: Path) -> tuple[datetime | None, datetime, float, float]:
    """Connect as the node does: TCP, by the company's proxy if there is one, and TLS that trusts the authority alone.

    Returns:
        The server's clock in whole seconds, if it tells it; the end of its certificate; and this machine's clock when
        the question left and when the answer came, seconds since 1970.
    """
    import httpx

    context = ssl.create_default_context(cafile=str(authority))
    sent = time.time()
    with keep_loopback_direct():
        client = httpx.Client(verify=context, timeout=TIMEOUT_S)
    with client, client.stream("GET", f"https://{superlink}/") as answer:
        received = time.time()
        certificate = answer.extensions["network_stream"].get_extra_info("ssl_object").getpeercert()
        date = parsedate_to_datetime(answer.headers["date"]) if "date" in answer.headers else None
    end = datetime.fromtimestamp(ssl.cert_time_to_seconds(certificate["notAfter"]), UTC)
    return date, end, sent, received


def _check_server(superlink: str | None, authority: Path) -> Iterator[Finding]:
    if superlink is None:
        yield note("server", "not checked", "give --superlink HOST:PORT")
        return
    try:
        date, end, sent, received = _ask_server(superlink, authority)
    except Exception as error:  # the network and TLS fail in many ways
        text = str(error) or type(error).__name__
        if "CERTIFICATE_VERIFY_FAILED" in text:
            reason = text.partition("certificate verify failed: ")[2].partition(" (_ssl")[0] or text
            advice = next((one for words, one in TLS_ADVICE.items() if words in reason), "ask the server's operators")
            yield broken("server", f"{superlink} answers, but its certificate: {reason}", advice)
            return
        advice = "see that the address is right, that the server runs, and that no firewall is between"
        yield broken("server", f"{superlink} cannot be reached: {summarize_error(error)}", advice)
        return
    yield ok("server", f"{superlink} answers over TLS, and the node trusts it")
    yield _judge_end("certificate", "the server's certificate", end, "the server's operators must renew it")
    if date is None:
        yield note("clock", f"the server does not tell its time; {CLOCK_RULE}", "compare by hand")
        return
    server = date.timestamp()
    # The header was right at some moment while the question was under way, or up to DATE_LAG_S earlier.
    least, most = sent - (server + DATE_LAG_S), received - server
    if least > MAX_AHEAD_S or most < -MAX_BEHIND_S:
        side, seconds = ("ahead of", least) if least > 0 else ("behind", -most)
        found = f"this machine's clock is {seconds:.0f} s or more {side} the server's; {CLOCK_RULE}"
        yield broken("clock", found, "synchronise it, such as with chrony")
    else:
        yield ok("clock", f"between {least:+.1f} and {most:+.1f} s ahead of the server's; {CLOCK_RULE}")


def _check_state(folder: Path) -> Iterator[Finding]:
    if reason := find_write_error(folder):
        advice = "make the folder writable for the user of the node"
        yield broken("state", f"cannot write into {find_nearest(folder)}: {reason}", advice)
    else:
        advice = "free some space; states and models are kept there"
        yield check_free_space("state", folder, f" for {folder}", "broken", advice)
