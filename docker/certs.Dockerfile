# `rollmesh certs`: makes certificates for a trial of TLS, and ends.
# Build from the root of the repository: docker build -f docker/certs.Dockerfile .
ARG BASE_IMAGE=python:3.11-slim

FROM ${BASE_IMAGE} AS packages
ARG PIP_INDEX_URL
COPY docker/packages.sh requirements/certs.txt /tmp/
RUN /tmp/packages.sh /tmp/certs.txt

FROM ${BASE_IMAGE}
RUN useradd --uid 10001 --create-home rollmesh \
 && install -d -m 0700 -o rollmesh -g rollmesh /locks
COPY --from=packages /venv /venv
COPY services/runtime/rollmesh/runtime /app/rollmesh/runtime/
COPY clients/rollmesh/cli /app/rollmesh/cli/
ENV PATH=/venv/bin:$PATH PYTHONPATH=/app
WORKDIR /app
USER rollmesh
ENTRYPOINT ["python", "-m", "rollmesh.cli.certs"]
