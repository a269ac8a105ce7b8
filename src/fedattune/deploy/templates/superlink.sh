#!/bin/sh
# Run the server until SIGTERM or Ctrl-C: Flower's SuperLink, and the SuperExec that starts the server app.
# The app is a separate process, and the SuperLink's state is on disk, so a run survives a crash of the SuperLink.
set -eu
cd "$(dirname "$0")"
. ./common.sh
test -e certificates/server.pem || fail "no certificates/server.pem; run ./certificates.sh first"
mkdir -p state/superlink

# shellcheck disable=SC2086 # several words
keep superlink $flower flower-superlink --host 127.0.0.1 --port "$FEDATTUNE_PORT" \
    --ssl-ca-certfile certificates/ca.crt --ssl-certfile certificates/server.pem \
    --ssl-keyfile certificates/server.key --enable-supernode-auth --disable-runtime-dependency-installation \
    --isolation process --database state/superlink/state.db &
superlink=$!
# It starts a process for each run only, and each look for one costs the SuperLink's database some milliseconds.
export FLWR_SUPEREXEC_TASK_POLL_INTERVAL=1
# shellcheck disable=SC2086 # several words
keep superexec $flower flower-superexec --runtime-api-address "127.0.0.1:$FEDATTUNE_PORT" \
    --root-certificates certificates/ca.crt &
stop_with_me $! "$superlink"
