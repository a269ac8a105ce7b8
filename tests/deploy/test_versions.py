"""The rule about versions of FedAttune."""

import pytest

from fedattune import RunError
from fedattune.deploy.server.registration import check_versions


@pytest.mark.parametrize("theirs", ["1.4.1", "1.3.9", "1.5.0.dev1"])
def test_a_minor_version_apart_is_noted(theirs: str) -> None:
    note = check_versions("1.4.2", theirs, "node 'a'")
    assert note == f"node 'a' has FedAttune {theirs} and the server has 1.4.2; upgrade the older one soon"


@pytest.mark.parametrize("theirs", ["1.6.0", "1.2.0", "2.4.2", "0.4.2", "1.40.0"])
def test_versions_further_apart_are_refused(theirs: str) -> None:
    with pytest.raises(RunError, match=rf"node 'a' has FedAttune {theirs} .* install FedAttune 1\.4\.2 there"):
        check_versions("1.4.2", theirs, "node 'a'")
