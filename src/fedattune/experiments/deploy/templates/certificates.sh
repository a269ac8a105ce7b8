#!/bin/sh
# Make a certificate authority, the server's certificate and a key for each node, for a trial:
#   ./certificates.sh [HOST...]    HOST: more names or addresses of the server, as nodes know it
#   ./certificates.sh key N        only the key of node N; in real use, on the machine of that node
#   ./certificates.sh renew        a new server certificate of the same authority and names; restarts the SuperLink
set -eu
cd "$(dirname "$0")"
. ./common.sh

node_key() {
    mkdir -p keys
    test ! -e "keys/node-$1" || fail "keys/node-$1 exists already; remove it to replace it"
    # Flower accepts keys on NIST curves, and documents P-384.
    ssh-keygen -q -t ecdsa -b 384 -N '' -C "node-$1" -f "keys/node-$1"
}

if [ "${1-}" = key ]; then
    node_key "${2:?which node? ./certificates.sh key N}"
    echo "keys/node-$2 stays here; send keys/node-$2.pub to the operators of the server"
    exit 0
fi

# Sign a certificate of the server for $names, and put it into place whole.
server_certificate() {
    openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj "/CN=FedAttune server" \
        -keyout certificates/new.key -out certificates/server.csr 2>/dev/null
    printf 'subjectAltName=%s\nbasicConstraints=CA:FALSE\nextendedKeyUsage=serverAuth\n' "$names" > certificates/server.ext
    openssl x509 -req -in certificates/server.csr -CA certificates/ca.crt -CAkey certificates/ca.key -CAcreateserial \
        -days 365 -extfile certificates/server.ext -out certificates/new.pem 2>/dev/null
    rm certificates/server.csr certificates/server.ext
    mv certificates/new.key certificates/server.key
    mv certificates/new.pem certificates/server.pem
}

if [ "${1-}" = renew ]; then
    test -e certificates/server.pem || fail "no certificates/server.pem to renew; run ./certificates.sh first"
    test -e certificates/ca.key || fail "no certificates/ca.key; bring the authority's key back for this command"
    names=$(openssl x509 -in certificates/server.pem -noout -ext subjectAltName | sed -n '2{s/IP Address:/IP:/g;s/ //g;p;}')
    server_certificate
    echo "certificates/server.pem: renewed for $names"
    # At SIGTERM the SuperLink waits up to a minute for open connections, and runs that miss it for so long are ended. Its
    # database is on disk, so it may be killed.
    if pid=$(cat state/superlink/pid 2>/dev/null) && kill -KILL "$pid" 2>/dev/null; then
        echo "the SuperLink restarts in $FEDATTUNE_PAUSE seconds; runs continue, and nodes connect again"
    fi
    if pid=$(cat state/nginx.pid 2>/dev/null) && kill -HUP "$pid" 2>/dev/null; then
        echo "nginx reads the new certificate"
    fi
    exit 0
fi

test ! -e certificates || fail "certificates/ exists already; remove it to replace all certificates"
names=DNS:localhost,IP:127.0.0.1,IP:::1
for host in "$@"; do
    case $host in
        -*) fail "unknown option $host; usage: ./certificates.sh [HOST...], ./certificates.sh key N or ./certificates.sh renew" ;;
        *:* ) names=$names,IP:$host ;;
        *[!0-9.]*) names=$names,DNS:$host ;;
        *) names=$names,IP:$host ;;
    esac
done

mkdir certificates
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 365 -subj "/CN=FedAttune trial CA" \
    -keyout certificates/ca.key -out certificates/ca.crt \
    -addext "basicConstraints=critical,CA:TRUE" -addext "keyUsage=critical,keyCertSign,cRLSign" 2>/dev/null
server_certificate
echo "certificates/: for $names"

node=0
while [ "$node" -lt {{ nodes }} ]; do
    test -e "keys/node-$node" || node_key "$node"
    node=$((node + 1))
done
echo "keys/: for {{ nodes }} nodes"
