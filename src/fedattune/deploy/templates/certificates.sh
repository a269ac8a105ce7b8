#!/bin/sh
# Make a certificate authority, the server's certificate and a key for each node, for a trial:
#   ./certificates.sh [HOST...]    HOST: more names or addresses of the server, as nodes know it
#   ./certificates.sh key N        only the key of node N; in real use, on the machine of that node
#   ./certificates.sh renew        a new server certificate of the same authority and names; restarts the SuperLink
#   ./certificates.sh authority    a new authority, trusted beside the old one; bring ca.crt to all nodes, then renew
set -eu
cd "$(dirname "$0")"
. ./common.sh
days=365
authority_days=3650

node_key() {
    mkdir -p keys
    test ! -e "keys/node-$1" || fail "keys/node-$1 exists already; remove it to replace it"
    # Flower accepts keys on NIST curves, and documents P-384.
    ssh-keygen -q -t ecdsa -b 384 -N '' -C "node-$1" -f "keys/node-$1"
}

# Run openssl; show what it says only if it fails.
ssl() {
    said=$(openssl "$@" 2>&1) || fail "openssl $1 failed: $said"
}

# Make an authority in $new. Its name is its own, so that an old one and a new one can be in one ca.crt.
make_authority() {
    ssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days "$authority_days" \
        -subj "/CN=FedAttune CA $(openssl rand -hex 4)" -keyout "$new/ca.key" -out "$new/ca.crt" \
        -addext "basicConstraints=critical,CA:TRUE" -addext "keyUsage=critical,keyCertSign,cRLSign"
}

# Sign a certificate of the server for $names in $new, by the authority in the folder $1.
sign_server() {
    ssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj "/CN=FedAttune server" \
        -keyout "$new/server.key" -out "$new/server.csr"
    printf 'subjectAltName=%s\nbasicConstraints=CA:FALSE\nextendedKeyUsage=serverAuth\n' "$names" > "$new/server.ext"
    ssl x509 -req -in "$new/server.csr" -CA "$1/ca.crt" -CAkey "$1/ca.key" \
        -set_serial "0x$(openssl rand -hex 16)" -days "$days" -extfile "$new/server.ext" -out "$new/server.pem"
    rm "$new/server.csr" "$new/server.ext"
}

# Send a signal to the program of a pid file, unless the number belongs to another program by now: signal FILE SIGNAL NAME.
signal() {
    pid=$(cat "$1" 2>/dev/null) || return 1
    case $(ps -o args= -p "$pid" 2>/dev/null) in
        *"$3"*) kill "-$2" "$pid" ;;
        *) return 1 ;;
    esac
}

case ${1-} in
    key)
        node_key "${2:?which node? ./certificates.sh key N}"
        echo "keys/node-$2 stays here; send keys/node-$2.pub to the operators of the server"
        exit 0
        ;;
    renew | authority)
        test -e certificates/server.pem || fail "no certificates/server.pem; run ./certificates.sh first"
        test "$1" = authority || test -e certificates/ca.key ||
            fail "no certificates/ca.key; bring the authority's key back for this command"
        ;;
    -*) fail "unknown option $1; usage: ./certificates.sh [HOST...], key N, renew or authority" ;;
    *)
        test ! -e certificates || fail "certificates/ exists already; remove it to replace all certificates"
        names=$(python3 -c 'import ipaddress, re, sys
names = ["DNS:localhost", "IP:127.0.0.1", "IP:::1"]
for host in sys.argv[1:]:
    try:
        names.append(f"IP:{ipaddress.ip_address(host)}")
    except ValueError:
        if re.fullmatch("[0-9.]*", host) or not re.fullmatch(r"[A-Za-z0-9_*-]+(\.[A-Za-z0-9_-]+)*", host):
            sys.exit(f"./certificates.sh: got {host!r}, expected a name or an address, without a port")
        names.append(f"DNS:{host}")
print(",".join(names))' "$@") || exit 1
        ;;
esac

# Files come into place whole, when all of them are made.
new=certificates.new
rm -rf "$new"
mkdir "$new"
trap 'rm -rf "$new"' EXIT

if [ "${1-}" = authority ]; then
    make_authority
    cat certificates/ca.crt >> "$new/ca.crt"
    mv "$new/ca.key" certificates/ca.key
    mv "$new/ca.crt" certificates/ca.crt
    echo "certificates/ca.crt: the new authority and the old one. Bring it to all nodes and restart them, restart the server's"
    echo "programs, then run ./certificates.sh renew. After that, the old authority's part at the end of ca.crt can go."
    exit 0
fi

if [ "${1-}" = renew ]; then
    openssl x509 -in certificates/ca.crt -noout -checkend $((days * 86400)) > /dev/null ||
        fail "certificates/ca.crt ends before a new certificate would; run ./certificates.sh authority first"
    names=$(openssl x509 -in certificates/server.pem -noout -ext subjectAltName | sed -n '2{s/IP Address:/IP:/g;s/ //g;p;}')
    sign_server certificates
    mv "$new/server.key" certificates/server.key
    mv "$new/server.pem" certificates/server.pem
    echo "certificates/server.pem: renewed for $names"
    # At SIGTERM the SuperLink waits up to a minute for open connections, and runs that miss it for so long are ended. Its
    # database is on disk, so it may be killed.
    if signal state/superlink/pid KILL flower-superlink; then
        echo "the SuperLink restarts in $FEDATTUNE_PAUSE seconds; runs continue, and nodes connect again"
    else
        echo "no SuperLink of ./superlink.sh runs here. If another service runs it, restart it:"
        echo "    systemctl kill -s KILL fedattune-superlink; systemctl reload fedattune-proxy"
        echo "    docker compose up -d --force-recreate superlink proxy     (it ends a run: pause it before)"
    fi
    if signal state/nginx.pid HUP nginx; then
        echo "nginx reads the new certificate"
    fi
    exit 0
fi

make_authority
sign_server "$new"
mv "$new" certificates
echo "certificates/: for $names"

node=0
while [ "$node" -lt {{ nodes }} ]; do
    test -e "keys/node-$node" || node_key "$node"
    node=$((node + 1))
done
echo "keys/: for {{ nodes }} nodes"
{% if roster %}
# In real use, the nodes' operators write this file among themselves: the server must not choose whom nodes trust.
cat keys/node-*.pub > {{ roster }}
echo "{{ roster }}: the public keys of all nodes"
{% endif %}
