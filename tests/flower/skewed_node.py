"""Run a SuperNode whose clock is ahead: `python skewed_node.py SECONDS ARGUMENTS`."""

import sys
from datetime import datetime, timedelta
from typing import Any

from fedattune.deploy.operate import programs


def main(seconds: float, arguments: list[str]) -> Any:
    import flwr.supernode.node_auth_http_interceptor as signing

    now = signing.now

    def later() -> datetime:
        return now() + timedelta(seconds=seconds)

    signing.now = later  # type: ignore[assignment]
    return programs.main("flower-supernode", arguments)


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2:]))
