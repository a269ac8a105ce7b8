#!/bin/sh
# Flower's command line for this deployment: ./flwr.sh supernode list, ./flwr.sh log RUN_ID, ./flwr.sh stop RUN_ID
set -eu
cd "$(dirname "$0")"
. ./common.sh

export FLWR_HOME="$PWD/state/cli"
mkdir -p "$FLWR_HOME"
# Flower needs an absolute path to the certificate. Write it each time, because the folder may have moved.
printf '[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "%s"\nroot-certificates = "%s"\n' \
    "127.0.0.1:$FEDATTUNE_PORT" "$PWD/certificates/ca.crt" > "$FLWR_HOME/config.toml.$$"
mv "$FLWR_HOME/config.toml.$$" "$FLWR_HOME/config.toml"
exec flwr "$@"
