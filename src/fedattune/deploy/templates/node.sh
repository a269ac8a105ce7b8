#!/bin/sh
# Run nodes until SIGTERM or Ctrl-C: ./node.sh N...
# A node that ends for any reason is restarted. After a crash, the server believes the old session to be alive for about a
# minute, and refuses the node until then (exit code 305 in its messages).
set -eu
cd "$(dirname "$0")"
. ./common.sh
[ $# -gt 0 ] || fail "which nodes? ./node.sh 0 1 2"

for node in "$@"; do
    test -e "nodes/$node.toml" || fail "no nodes/$node.toml"
    test -e "keys/node-$node" || fail "no keys/node-$node; run ./certificates.sh key $node"
    test -e certificates/ca.crt || fail "no certificates/ca.crt; get it from the operators of the server"
done
running=
# shellcheck disable=SC2086 # several words
for node in "$@"; do
    keep "node-$node" $flower flower-supernode --superlink "$FEDATTUNE_SUPERLINK" \
        --root-certificates certificates/ca.crt --auth-supernode-private-key "keys/node-$node" \
        --host 127.0.0.1 --port $((FEDATTUNE_NODE_PORT + node)) --node-config "nodes/$node.toml" &
    running="$running $!"
done
# shellcheck disable=SC2086 # one word for each node
stop_with_me $running
