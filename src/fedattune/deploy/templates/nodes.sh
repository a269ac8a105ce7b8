#!/bin/sh
# The nodes of this federation, also while a run goes on:
#   ./nodes.sh                     list them: id, name, status, since when, and key
#   ./nodes.sh add KEY NAME        register the public key in the file KEY; a run of one method takes the node in
#   ./nodes.sh remove NAME         the server refuses the node from now on, and rounds go on without it
#   ./nodes.sh rotate NAME KEY     register a new key, wait for the node to come with it, then remove the old key
set -eu
cd "$(dirname "$0")"
. ./common.sh
usage="usage: ./nodes.sh [add KEY NAME | remove NAME | rotate NAME KEY]"

# The ids of all nodes with a name, one per line.
ids_of() {
    fedattune deploy nodes . | awk -v name="$1" '$2 == name && $3 != "removed" { print $1 }'
}

status_of() {
    fedattune deploy nodes . | awk -v id="$1" '$1 == id { print $3 }'
}

register() {
    check_name "$2" "choose another name"
    test -e "$1" || fail "no file $1; the node's operator makes it by ./certificates.sh key N"
    answer=$(./flwr.sh supernode register "$1" --name "$2" 2>&1) && return
    case $answer in
        *"already in use"*)
            answer="it is registered already"
            [ "$(status_of_key "$1" "$(fedattune deploy nodes .)")" != removed ] || answer="it $removed"
            ;;
    esac
    fail "the key in $1 was not registered as $2: $answer"
}

remove() {
    for id in $1; do
        ./flwr.sh supernode unregister "$id" > /dev/null || fail "node $id was not removed"
    done
}

case ${1-list} in
    list) fedattune deploy nodes . ;;
    add)
        [ $# -eq 3 ] || fail "$usage"
        test -z "$(ids_of "$3")" || fail "a node $3 is registered already; ./nodes.sh rotate replaces its key"
        register "$2" "$3"
        echo "$3 is registered; start its ./node.sh. A run of one method takes it in after the round; a comparison goes on without it"
        ;;
    remove)
        [ $# -eq 2 ] || fail "$usage"
        ids=$(ids_of "$2")
        test -n "$ids" || fail "no node $2; ./nodes.sh lists them"
        remove "$ids"
        echo "$2 is removed, and its key for ever; also remove its file in keys/"
        ;;
    rotate)
        [ $# -eq 3 ] || fail "$usage"
        old=$(ids_of "$2")
        test -n "$old" || fail "no node $2; ./nodes.sh lists them"
        register "$3" "$2"
        new=
        for id in $(ids_of "$2"); do
            case " $(echo $old) " in *" $id "*) ;; *) new=$id ;; esac
        done
        echo "$2: put the new private key in the place of the old one at the node, and restart its ./node.sh; waiting"
        trap 'echo "the old key of $2 is still registered; run ./flwr.sh supernode unregister for: $(echo $old)" >&2; exit 1' INT TERM HUP
        until [ "$(status_of "$new")" = online ]; do sleep 2; done
        remove "$old"
        echo "$2 is online with its new key, and the old key is removed"
        ;;
    *) fail "$usage" ;;
esac
