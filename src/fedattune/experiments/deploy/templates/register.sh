#!/bin/sh
# Let the nodes in whose public keys are in keys/; others are refused. Run it again when a key is added.
set -eu
cd "$(dirname "$0")"
. ./common.sh

tries=30
for key in keys/*.pub; do
    test -e "$key" || fail "no public key in keys/"
    name=$(basename "$key" .pub)
    while ! answer=$(./flwr.sh supernode register "$key" --name "$name" 2>&1); do
        case $answer in
            *"already in use"*) break ;; # it was registered before
        esac
        # The SuperLink may have been started a moment ago.
        tries=$((tries - 1))
        [ "$tries" -gt 0 ] || fail "$name was not registered; is ./superlink.sh running? $answer"
        sleep 1
    done
    echo "$name is registered"
done
