"""Check that a node is ready: its configuration, data, key, server, clock and disk."""

import importlib.metadata
import os
import shutil
import ssl
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

from ..._version import __version__
from ...core.errors import ConfigError, FedAttuneError, RunError, summarize_error
from ...data import Schema
from ...data.node import find_node_problems
from ...experiments.config import Experiment
from ...experiments.doctor import MIN_FREE_BYTES, Finding
from ..config import DeploymentPlan
from ..node.files import find_base, find_state, read_node_file
from ..node.policy import NodePolicy
from .check import find_run_config

MAX_AHEAD_S, MAX_BEHIND_S = 5, 305
"""Seconds by which Flower lets a node's clock be ahead of the server's, or behind it."""

DATE_LAG_S = 2
"""Seconds by which a Date header may lag: it has whole seconds, and uvicorn renews it once a second."""

WARN_DAYS = 30
"""Days before the end of a certificate within which the check warns."""

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
        file: the node's configuration.
        superlink: address of the server, `HOST:PORT`; None leaves the connection out.
        certificates: file of the authority that the node trusts; by default the deployment's.
        key: file of the node's private key; by default the deployment's.
        schema_file: file with the schema; by default the schema in the deployment's `app/pyproject.toml`.

    Raises:
        ConfigError: the configuration or the schema cannot be read.

    """
    config, base = read_node_file(file), find_base(file)
    run = _read_run_config(base / "app" / "pyproject.toml")
    findings = list(_check_versions())
    findings += _check_config(config, run)
    findings += _check_data(config, base, run, schema_file)
    findings += _check_secure(config, base, run)
    findings += _check_key(key or base / "keys" / f"node-{file.stem}")
    authority = certificates or base / "certificates" / "ca.crt"
    findings += _check_authority(authority)
    if superlink is None:
        findings.append(Finding("server", "note", "not checked", "give --superlink HOST:PORT"))
    else:
        findings += _check_server(superlink, authority)
    findings += _check_state(find_state(file))
    return findings


def _read_run_config(file: Path) -> dict[str, Any]:
    """Read the run's configuration from the deployment's app; empty if the node has no copy of the app."""
    if not file.exists():
        return {}
    return find_run_config(read_node_file(file), file)


def _check_versions() -> Iterator[Finding]:
    from packaging.requirements import Requirement

    yield Finding("FedAttune", "ok", f"version {__version__}; the server may be one minor version apart")
    version = importlib.metadata.version("flwr")
    for text in importlib.metadata.requires("fedattune") or ():
        wanted = Requirement(text)
        if wanted.name == "flwr" and version not in wanted.specifier:
            advice = f"install flwr{wanted.specifier}"
            yield Finding("Flower", "broken", f"version {version}, expected {wanted.specifier}", advice)
            return
    yield Finding("Flower", "ok", f"version {version}")


def _check_config(config: Mapping[str, Any], run: Mapping[str, Any]) -> Iterator[Finding]:
    """Check the node's rules, and whether they allow the run of the deployment."""
    try:
        rules = NodePolicy.read(config)
    except ConfigError as error:
        yield Finding("configuration", "broken", str(error), "correct these keys")
        return
    if run:
        try:
            plan = DeploymentPlan(run)
        except FedAttuneError as error:  # such as a method of the operators' own, which only their app knows
            advice = "ask the server's operators for the methods and rounds of the run"
            yield Finding("run", "note", f"the rules were not compared with the app: {error}", advice)
        else:
            refusals = list(_find_refusals(rules, plan))
            yield from refusals
            if refusals:
                return
    secure = {"secure_aggregation", "min_participants", "threshold", "key", "roster"}  # of these, see below
    limits = rules.model_dump(by_alias=True, exclude_none=True, exclude={"log_format", *secure})
    yield Finding("rules", "ok", ", ".join(f"{key} = {value}" for key, value in limits.items()))


def _check_secure(config: Mapping[str, Any], base: Path, run: Mapping[str, Any]) -> Iterator[Finding]:
    from ..secagg.checks import check_secure_node

    try:
        policy = NodePolicy.read(config)
    except ConfigError:  # told with the configuration
        return
    is_asked = bool(run.get("secure-aggregation", False)) if run else None
    yield from check_secure_node(policy, base, is_asked=is_asked)


def _find_refusals(rules: NodePolicy, plan: DeploymentPlan) -> Iterator[Finding]:
    """Find the methods, and the number of rounds, for which the node would refuse a run."""
    asked: list[tuple[tuple[str, ...], int]] = [((name,), 0) for name in plan.algorithms]
    for methods, rounds in [*asked, ((), plan.experiment.rounds)]:
        try:
            rules.check_run(methods, rounds)
        except RunError as error:
            yield Finding("rules", "broken", str(error), "or leave this run out")


def _check_data(
    config: Mapping[str, Any], base: Path, run: Mapping[str, Any], schema_file: Path | None
) -> Iterator[Finding]:
    text = run.get("data-schema")
    schema = Schema.read(schema_file) if schema_file else Schema.from_json(str(text)) if text else None
    for key in ("test", "validation"):
        if not isinstance(run.get(key, 0), int | float):
            found = f"{base / 'app' / 'pyproject.toml'}: {key} is {run[key]!r:.40}, expected a number"
            yield Finding("configuration", "broken", found, "get the app from the server's operators again")
            return
    values = dict(config)
    if "data" in values and (base / str(values["data"])).exists():
        values["data"] = str(base / str(values["data"]))
    defaults = Experiment.model_fields
    problems = find_node_problems(
        values,
        schema,
        test=float(run.get("test", defaults["test"].default)),
        validation=float(run.get("validation", defaults["validation"].default)),
    )
    for problem in problems:
        yield Finding(
            "configuration" if problem.startswith("the node's configuration") else "data", "broken", problem
        )
    if schema is None:
        advice = "give --schema-file with the schema of the federation"
        yield Finding("schema", "note", "not known, so the data were not compared with it", advice)
    if not problems:
        yield Finding("data", "ok", f"{values['data']} can be read{' and fits the schema' if schema else ''}")


def _check_key(file: Path) -> Iterator[Finding]:
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key
    from flwr.supercore.primitives.asymmetric import uses_nist_ec_curve

    make = "make one: ./certificates.sh key N, and send the file .pub to the server's operators"
    try:
        key = load_ssh_private_key(file.read_bytes(), password=None)
    except OSError as error:
        yield Finding("key", "broken", f"cannot read {file}: {error.strerror or error}", make)
        return
    except Exception as error:  # bytes from outside can fail in any way
        found = f"{file} is no private key without a password in OpenSSH's format ({type(error).__name__})"
        yield Finding("key", "broken", found, make)
        return
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not uses_nist_ec_curve(key.public_key()):
        kind = key.curve.name if isinstance(key, ec.EllipticCurvePrivateKey) else type(key).__name__
        found = f"{file} is a key of the kind {kind}, expected one on a NIST curve such as P-384"
        yield Finding("key", "broken", found, make)
        return
    mode = file.stat().st_mode & 0o777
    if os.name == "posix" and mode & 0o077:
        found = f"other users may use {file} (its mode is {mode:03o}, expected 600)"
        yield Finding("key", "broken", found, f"chmod 600 {file}")
        return
    yield Finding("key", "ok", f"{file} is a key for Flower ({key.curve.name}) that only its owner can read")


def _check_authority(file: Path) -> Iterator[Finding]:
    from cryptography import x509

    advice = "get it from the server's operators, over a channel that you trust"
    try:
        found = x509.load_pem_x509_certificates(file.read_bytes())
    except OSError as error:
        yield Finding("authority", "broken", f"cannot read {file}: {error.strerror or error}", advice)
        return
    except ValueError:
        yield Finding("authority", "broken", f"{file} holds no certificate in PEM format", advice)
        return
    # An expired authority beside a valid one does no harm, and both are there while the authority changes.
    end = max(one.not_valid_after_utc for one in found)
    yield _judge_end("authority", str(file), end, "get the new one from the server's operators")


def _judge_end(name: str, what: str, end: datetime, advice: str) -> Finding:
    """Judge the end of a certificate."""
    left = end - datetime.now(UTC)
    if left < timedelta(0):
        return Finding(name, "broken", f"{what} has expired on {end:%Y-%m-%d}", advice)
    if left < timedelta(days=WARN_DAYS):
        return Finding(name, "note", f"{what} expires on {end:%Y-%m-%d}, in {left.days} days", advice)
    return Finding(name, "ok", f"{what} is valid until {end:%Y-%m-%d}")


@dataclass(frozen=True)
class ServerAnswer:
    """What the server says about itself.

    Attributes:
        date: its clock, if it tells it; whole seconds.
        certificate_end: end of its certificate.
        sent, received: this machine's clock when the question left and when the answer came, seconds since 1970.

    """

    date: datetime | None
    certificate_end: datetime
    sent: float
    received: float


def _ask_server(superlink: str, authority: Path) -> ServerAnswer:
    """Connect as the node does: TCP, and TLS that trusts the authority alone."""
    import httpx

    context = ssl.create_default_context(cafile=str(authority))
    sent = time.time()
    with (
        httpx.Client(verify=context, timeout=TIMEOUT_S, trust_env=False) as client,
        client.stream("GET", f"https://{superlink}/") as answer,
    ):
        received = time.time()
        certificate = answer.extensions["network_stream"].get_extra_info("ssl_object").getpeercert()
        date = parsedate_to_datetime(answer.headers["date"]) if "date" in answer.headers else None
    end = datetime.fromtimestamp(ssl.cert_time_to_seconds(certificate["notAfter"]), UTC)
    return ServerAnswer(date, end, sent, received)


def _check_server(superlink: str, authority: Path) -> Iterator[Finding]:
    try:
        answer = _ask_server(superlink, authority)
    except Exception as error:  # the network and TLS fail in many ways
        text = str(error) or type(error).__name__
        if "CERTIFICATE_VERIFY_FAILED" in text:
            reason = text.partition("certificate verify failed: ")[2].partition(" (_ssl")[0] or text
            advice = next(
                (one for words, one in TLS_ADVICE.items() if words in reason), "ask the server's operators"
            )
            yield Finding("server", "broken", f"{superlink} answers, but its certificate: {reason}", advice)
            return
        advice = "see that the address is right, that the server runs, and that no firewall is between"
        yield Finding("server", "broken", f"{superlink} cannot be reached: {summarize_error(error)}", advice)
        return
    yield Finding("server", "ok", f"{superlink} answers over TLS, and the node trusts it")
    advice = "the server's operators must renew it"
    yield _judge_end("certificate", "the server's certificate", answer.certificate_end, advice)
    yield _check_clock(answer)


def _check_clock(answer: ServerAnswer) -> Finding:
    """Compare this machine's clock with the server's, as exactly as the Date header allows."""
    accepted = f"Flower accepts a node at most {MAX_AHEAD_S} s ahead and {MAX_BEHIND_S} s behind"
    if answer.date is None:
        return Finding("clock", "note", f"the server does not tell its time; {accepted}", "compare by hand")
    server = answer.date.timestamp()
    # The header was right at some moment while the question was under way, or up to DATE_LAG_S earlier.
    least, most = answer.sent - (server + DATE_LAG_S), answer.received - server
    if least > MAX_AHEAD_S or most < -MAX_BEHIND_S:
        side, seconds = ("ahead of", least) if least > 0 else ("behind", -most)
        found = f"this machine's clock is {seconds:.0f} s or more {side} the server's; {accepted}"
        return Finding("clock", "broken", found, "synchronise it, such as with chrony")
    found = f"between {least:+.1f} and {most:+.1f} s ahead of the server's; {accepted}"
    return Finding("clock", "ok", found)


def _check_state(folder: Path) -> Iterator[Finding]:
    place = next(one for one in (folder, *folder.absolute().parents) if one.exists())
    try:
        with tempfile.NamedTemporaryFile(dir=place):
            pass
    except OSError as error:
        advice = "make the folder writable for the user of the node"
        yield Finding("state", "broken", f"cannot write into {place}: {error.strerror or error}", advice)
        return
    free = shutil.disk_usage(place).free
    size = f"{free / 2**30:.1f} GiB are free for {folder}"
    if free < MIN_FREE_BYTES:
        yield Finding("state", "broken", f"only {size}", "free some space; states and models are kept there")
        return
    yield Finding("state", "ok", size)
