# Settings and functions of the scripts beside it. Variables of the environment replace the settings.
# shellcheck shell=sh

# Port of the SuperLink, on loopback only: anybody who reaches its control API can run code on all nodes.
: "${FEDATTUNE_PORT:={{ port }}}"
# The nodes' address of the server: the SuperLink in a trial on one machine, otherwise the proxy's public name and port.
: "${FEDATTUNE_SUPERLINK:=127.0.0.1:$FEDATTUNE_PORT}"
# Node N talks to its own client processes at this port + N, on loopback.
: "${FEDATTUNE_NODE_PORT:={{ node_port }}}"
# Seconds before a program that ended is restarted.
: "${FEDATTUNE_PAUSE:=10}"
# Seconds between a node's questions for work; more nodes or fewer cores at the server need more.
: "${FEDATTUNE_POLL:=0.5}"
# Flower's programs with shorter pauses; a node forks its app, which has imported PyTorch, for each message.
flower="python3 -m fedattune.deploy.operate.programs"

export FEDATTUNE_POLL FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1
# A company's proxy must not get the calls on loopback. Programs read no_proxy before NO_PROXY, or only one of the two.
no_proxy=${no_proxy:-${NO_PROXY-}}
no_proxy="127.0.0.1,localhost${no_proxy:+,$no_proxy}"
NO_PROXY=$no_proxy
export NO_PROXY no_proxy
umask 077

fail() {
    echo "$0: $*" >&2
    exit 1
}

# Refuse a node's name that ./nodes.sh could not find in its list, whose columns are words: check_name NAME ADVICE
check_name() {
    case $1 in
        *[!A-Za-z0-9._-]* | "") fail "the name '$1' has other characters than letters, digits, ., _ and -; $2" ;;
    esac
}

# The status of the public key in a file, such as online or removed, in the list of `fedattune deploy nodes`; empty if it
# is not there: status_of_key KEY LIST
status_of_key() {
    fingerprint=$(python3 -c 'import base64, hashlib, sys
key = base64.b64decode(open(sys.argv[1]).read().split()[1])
print("SHA256:" + base64.b64encode(hashlib.sha256(key).digest()).decode().rstrip("="))' "$1")
    printf '%s\n' "$2" | awk -v key="$fingerprint" '$NF == key { print $3 }'
}

removed="was removed, and the server never takes a removed key again. The node's operator makes a new one: remove the files of \
the old key there, run ./certificates.sh key N, and send keys/node-N.pub. It takes the place of the old file here"

# Ctrl-C and `kill %1` signal a whole group of processes. Flower's programs end properly at the first signal, but the second one
# cuts them off, and the server refuses such a node for a minute. So they run in a group of their own, and get one signal.
apart='import os, sys; os.setsid(); os.execvp(sys.argv[1], sys.argv[1:])'

# Run a command, and restart it whenever it ends, until SIGTERM: keep NAME COMMAND...
# The process id is in state/NAME/pid. Flower's files and FedAttune's go to state/NAME.
keep() {
    state="$PWD/state/$1"
    name=$1
    shift
    mkdir -p "$state"
    # $! is the running command or pause.
    # A signal to the whole group arrives twice, from outside and from `stop_with_me`; pass on only the first.
    trap 'trap "" TERM; kill "$!" 2>/dev/null; wait; rm -f "$state/pid"; exit 0' TERM
    while :; do
        env FLWR_HOME="$state" FEDATTUNE_STATE="$state" python3 -c "$apart" "$@" &
        echo "$!" > "$state/pid"
        code=0
        wait "$!" || code=$?
        rm -f "$state/pid"
        echo "$name ended with code $code; it restarts in $FEDATTUNE_PAUSE seconds" >&2
        sleep "$FEDATTUNE_PAUSE" &
        wait "$!" || :
    done
}

# Wait for background jobs, by process id; at a signal, stop them in this order.
stop_with_me() {
    jobs_to_stop=$*
    job=
    trap 'trap "" TERM INT HUP; for job in $jobs_to_stop; do kill "$job" 2>/dev/null; wait "$job"; done; exit 0' TERM INT HUP
    wait
}
