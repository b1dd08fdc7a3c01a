# Makes the database in an empty folder, then serves it.
set -eu
data=/var/lib/postgresql/data
if [ ! -e "$data/PG_VERSION" ]; then
  printf %s "$POSTGRES_PASSWORD" >/tmp/password
  initdb --pgdata="$data" --username="$POSTGRES_USER" --pwfile=/tmp/password \
    --auth=scram-sha-256 --encoding=utf8
  rm /tmp/password
  echo "host all all all scram-sha-256" >>"$data/pg_hba.conf"
  printf 'CREATE DATABASE "%s"' "$POSTGRES_DB" | postgres --single -D "$data" postgres
fi
exec postgres -D "$data" -c "listen_addresses=*"
