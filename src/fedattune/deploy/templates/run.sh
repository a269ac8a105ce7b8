#!/bin/sh
# Start a run, show its log, and exit with code 0 if it completes: ./run.sh [--run-config 'KEY=VALUE ...']
# Follow a run that is going on, by default the newest: ./run.sh --attach [RUN_ID]
set -eu
cd "$(dirname "$0")"
. ./common.sh

if [ "${1-}" = --attach ]; then
    run=${2-}
    if [ -z "$run" ]; then
        runs=$(./flwr.sh list --format json) || fail "the SuperLink does not answer: $runs"
        run=$(printf '%s' "$runs" | python3 -c 'import json, sys
runs = [run for run in json.load(sys.stdin)["runs"] if not run["status"].startswith("finished")]
print(max(runs, key=lambda run: run["pending-at"])["run-id"] if runs else "")')
        [ -n "$run" ] || fail "no run is going on; ./flwr.sh list lists all"
    fi
else
    answer=$(./flwr.sh run app --format json "$@") || :
    run=$(printf '%s' "$answer" | python3 -c 'import json, sys; print(json.load(sys.stdin)["run-id"])' 2>/dev/null) ||
        fail "the run was not started: $answer"
fi

status_of_run() {
    ./flwr.sh list --run-id "$run" --format json 2>/dev/null |
        python3 -c 'import json, sys; print(json.load(sys.stdin)["runs"][0]["status"])' 2>/dev/null || echo unknown
}
[ "${1-}" != --attach ] || [ "$(status_of_run)" != unknown ] ||
    fail "no run $run, or the SuperLink does not answer; ./flwr.sh list lists all runs"
echo "run $run"
shown="state/cli/shown.$$"
trap 'rm -f "$shown"; echo "the run continues; ./run.sh --attach $run follows it again, ./flwr.sh stop $run stops it" >&2; exit 1' INT TERM HUP

# The log ends with the run, or with the SuperLink, which may restart. It then begins anew, without the lines shown already.
echo 0 > "$shown"
follow_log() {
    ./flwr.sh log "$run" | python3 -uc 'import pathlib, sys
shown = pathlib.Path(sys.argv[1])
n = int(shown.read_text())
for i, line in enumerate(sys.stdin, 1):
    if i > n:
        print(line, end="", flush=True)
        shown.write_text(str(i))' "$shown" || :
}
follow_log
status=
while :; do
    status=$(status_of_run)
    case $status in finished*) break ;; esac
    sleep 2
    [ "$status" = unknown ] || follow_log
done
rm "$shown"
echo "run $run: $status"
if [ "$status" != finished:completed ]; then
    # The log may have ended before the error.
    ./flwr.sh list --run-id "$run" --format json | python3 -c 'import json, sys
print("fedattune: the run failed:", json.load(sys.stdin)["runs"][0]["status-details"])' >&2 || :
    exit 1
fi
results=$(python3 -c 'import sys
from pathlib import Path
from fedattune.deploy.operate.kit import find_results
print(find_results(Path(sys.argv[1]), int(sys.argv[2])))' "$PWD" "$run")
echo "results: $results"
