#!/bin/sh
# Register the public keys in keys/; the server refuses nodes with other keys. Run it again after adding a key.
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
        # The SuperLink may still be starting.
        tries=$((tries - 1))
        [ "$tries" -gt 0 ] || fail "$name was not registered; is ./superlink.sh running? $answer"
        sleep 1
    done
    echo "$name is registered"
done
