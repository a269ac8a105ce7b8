#!/bin/sh
# Start a run, show its log, and exit with code 0 if it completes: ./run.sh [--run-config 'KEY=VALUE ...']
set -eu
cd "$(dirname "$0")"
. ./common.sh

answer=$(./flwr.sh run app --format json "$@") || :
run=$(printf '%s' "$answer" | python3 -c 'import json, sys; print(json.load(sys.stdin)["run-id"])' 2>/dev/null) ||
    fail "the run was not started: $answer"
echo "run $run"
trap 'echo "the run continues; stop it with ./flwr.sh stop $run" >&2; exit 1' INT TERM HUP

# The log ends with the run, or with the SuperLink, which may restart.
./flwr.sh log "$run" || :
status=
while :; do
    status=$(./flwr.sh list --run-id "$run" --format json 2>/dev/null |
        python3 -c 'import json, sys; print(json.load(sys.stdin)["runs"][0]["status"])' 2>/dev/null) || status=unknown
    case $status in finished*) break ;; esac
    sleep 2
done
echo "run $run: $status"
if [ "$status" != finished:completed ]; then
    ./flwr.sh list --run-id "$run" >&2
    exit 1
fi
echo "results: $PWD/{{ results }}"
