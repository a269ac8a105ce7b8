# Read by the scripts beside it. Every value can also be given in the environment.
# shellcheck shell=sh

# The SuperLink listens here, on loopback only: whoever reaches its control API can run code on all nodes.
: "${FEDATTUNE_PORT:={{ port }}}"
# What nodes connect to: the SuperLink itself in a trial on one machine; else the proxy's public name and port.
: "${FEDATTUNE_SUPERLINK:=127.0.0.1:$FEDATTUNE_PORT}"
# Node N talks to its own client processes at this port + N, on loopback.
: "${FEDATTUNE_NODE_PORT:={{ node_port }}}"
# Seconds before something that ended is started again.
: "${FEDATTUNE_PAUSE:=10}"

export FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1
umask 077

fail() {
    echo "$0: $*" >&2
    exit 1
}

# Ctrl-C and `kill %1` signal a whole group of processes. Flower's programs end in order at the first signal and are cut off
# by the second, and a node that was cut off is refused for a minute; so they get a group of their own, and one signal.
apart='import os, sys; os.setsid(); os.execvp(sys.argv[1], sys.argv[1:])'

# Run a command, and start it again whenever it ends, until SIGTERM: keep NAME COMMAND...
# Its process id is in state/NAME/pid; Flower's own files, and ours, go to state/NAME.
keep() {
    state="$PWD/state/$1"
    name=$1
    shift
    mkdir -p "$state"
    # $! is the command or the pause, whichever runs.
    # A signal to the whole group comes twice, from outside and from `stop_with_me`; only one may be handed on.
    trap 'trap "" TERM; kill "$!" 2>/dev/null; wait; exit 0' TERM
    while :; do
        env FLWR_HOME="$state" FEDATTUNE_STATE="$state" python3 -c "$apart" "$@" &
        echo "$!" > "$state/pid"
        code=0
        wait "$!" || code=$?
        echo "$name ended with code $code; it starts again in $FEDATTUNE_PAUSE seconds" >&2
        sleep "$FEDATTUNE_PAUSE" &
        wait "$!" || :
    done
}

# Wait for the background jobs given by process id, in the order in which they are to be stopped.
stop_with_me() {
    jobs_to_stop=$*
    job=
    trap 'trap "" TERM INT HUP; for job in $jobs_to_stop; do kill "$job" 2>/dev/null; wait "$job"; done; exit 0' TERM INT HUP
    wait
}
