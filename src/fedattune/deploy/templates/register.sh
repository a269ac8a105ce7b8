#!/bin/sh
# Register the public keys in keys/; the server refuses nodes with other keys. Run it again after adding a key.
set -eu
cd "$(dirname "$0")"
. ./common.sh

tries=30
code=0
nodes=
for key in keys/*.pub; do
    test -e "$key" || fail "no public key in keys/"
    name=$(basename "$key" .pub)
    check_name "$name" "rename $key"
    status=registered
    while ! answer=$(./flwr.sh supernode register "$key" --name "$name" 2>&1); do
        case $answer in
            *"already in use"*) # it was registered before
                [ -n "$nodes" ] || nodes=$(fedattune deploy nodes .) || :
                status=$(status_of_key "$key" "$nodes")
                ;;
            *) status= ;;
        esac
        [ -z "$status" ] || break
        # The SuperLink may still be starting.
        tries=$((tries - 1))
        [ "$tries" -gt 0 ] || fail "$name was not registered; is ./superlink.sh running? $answer"
        sleep 1
    done
    if [ "$status" = removed ]; then
        echo "$0: $name is not registered: its key $removed" >&2
        code=1
    else
        echo "$name is registered"
    fi
done
exit "$code"
