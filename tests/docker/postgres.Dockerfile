# PostgreSQL from Debian's packages, with the variables of the official image that the compose file
# sets: for the tests, which pull no image.
ARG BASE_IMAGE=python:3.11-slim
FROM ${BASE_IMAGE}
RUN apt-get update && apt-get install -y --no-install-recommends postgresql && rm -rf /var/lib/apt/lists/* \
 && ln -s /usr/lib/postgresql/*/bin/* /usr/local/bin/ \
 && install -d -o postgres -g postgres /var/lib/postgresql/data
COPY postgres.sh /
USER postgres
VOLUME /var/lib/postgresql/data
STOPSIGNAL SIGINT
ENTRYPOINT ["sh", "/postgres.sh"]
