#!/bin/sh
# Makes a CA and a certificate for each role of a mesh, for a trial of TLS:
#
#   deploy/certs.sh DIR [HOST...]
#
# DIR gets ca.crt, and ROLE.crt and ROLE.key for each role. HOST is a further name or address of the
# services. DAYS is the validity (30). Certificates that have each HOST and are valid for another
# week are kept, and others are replaced. The key of the CA is not kept: make all of them again
# before they expire.
set -eu
[ $# -ge 1 ] || { sed -n '2,9s/^# \{0,1\}//p' "$0" >&2; exit 2; }
dir=$1 days=${DAYS:-30}
shift
roles="operator trainer engine router gateway collector sidecar agent scorer"
umask 077
mkdir -p "$dir"

kept=yes
for name in ca $roles; do
  openssl x509 -in "$dir/$name.crt" -noout -checkend 604800 >/dev/null 2>&1 || kept=no
done

known=,$(openssl x509 -in "$dir/router.crt" -noout -ext subjectAltName 2>&1 | tail -n 1 | tr -d ' '),
names="DNS:rollmesh,DNS:localhost,IP:127.0.0.1,IP:::1"
for host in "$@"; do
  case $host in
    *:*) kind=IP ;;
    *[!0-9.]*) kind=DNS ;;
    *) kind=IP ;;
  esac
  names="$names,$kind:$host"
  if [ $kind = DNS ]; then
    case $known in *",DNS:$host,"*) ;; *) kept=no ;; esac
  else
    openssl x509 -in "$dir/router.crt" -noout -checkip "$host" 2>&1 | grep -q 'does match' || kept=no
  fi
done
[ $kept = no ] || exit 0

new=$(mktemp -d "$dir/.new-XXXXXX")
trap 'rm -rf "$new"' EXIT

# certificate NAME COMMON-NAME SIGNER-FLAGS... < EXTENSIONS
certificate() {
  name=$1 subject=$2
  shift 2
  cat >"$new/extensions"
  openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out "$new/$name.key"
  openssl req -new -key "$new/$name.key" -subj "/CN=$subject" -out "$new/request"
  openssl x509 -req -in "$new/request" -extfile "$new/extensions" -days "$days" -sha256 \
    -set_serial "0x$(openssl rand -hex 16)" -out "$new/$name.crt" "$@" 2>"$new/said" || {
    cat "$new/said" >&2
    exit 1
  }
}

certificate ca "rollmesh trial CA" -signkey "$new/ca.key" <<END
basicConstraints = critical, CA:TRUE, pathlen:0
keyUsage = critical, keyCertSign, cRLSign
subjectKeyIdentifier = hash
END
for role in $roles; do
  uri=URI:rollmesh://role/$role uses=clientAuth,serverAuth
  case $role in
    operator | trainer | agent) san=$uri uses=clientAuth ;; # they serve nothing
    scorer) san=$names ;;                                   # it calls nobody
    *) san=$uri,$names ;;
  esac
  certificate "$role" "rollmesh $role" -CA "$new/ca.crt" -CAkey "$new/ca.key" <<END
basicConstraints = critical, CA:FALSE
keyUsage = critical, digitalSignature
extendedKeyUsage = $uses
subjectAltName = $san
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
END
done
rm -f "$new/ca.key" "$new/extensions" "$new/request" "$new/said"
mv "$new"/*.crt "$new"/*.key "$dir"
echo "$dir: ca.crt, and ROLE.crt and ROLE.key, valid for $days days"
