# The gateway: no torch, no CUDA, no compiler. From the root of the repository:
#   docker build -f k8s/images/gateway.Dockerfile -t baton-gateway:0.1.0 .
# To pin what it is built on: --build-arg PYTHON_IMAGE=python:3.12-slim-trixie@sha256:...
ARG PYTHON_IMAGE=python:3.12-slim-trixie

FROM ${PYTHON_IMAGE} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
COPY k8s/images/build.lock k8s/images/gateway.lock /locks/
# A lock that lacks anything fails here, and so does what has no wheel.
RUN python -m venv --without-pip /opt/baton \
    && pip install --require-hashes --only-binary :all: -r /locks/build.lock \
    && pip --python /opt/baton/bin/python install --require-hashes --only-binary :all: --no-compile -r /locks/gateway.lock
WORKDIR /baton
COPY pyproject.toml README.md LICENSE ./
COPY common common
COPY kv_transfer kv_transfer
COPY prefill_worker prefill_worker
COPY decode_worker decode_worker
COPY gateway gateway
COPY benchmarks benchmarks
# Compiled now, as nothing can be written there later; unchecked, as no source changes either.
RUN pip wheel --no-deps --no-index --no-build-isolation --wheel-dir /wheels . \
    && pip --python /opt/baton/bin/python install --no-deps --no-index --no-compile /wheels/*.whl \
    && pip --python /opt/baton/bin/python check \
    && /opt/baton/bin/python -m compileall -q --invalidation-mode unchecked-hash /opt/baton/lib

FROM ${PYTHON_IMAGE}
RUN apt-get update \
    && apt-get install --yes --no-install-recommends tini \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 65532 baton \
    && useradd --uid 65532 --gid 65532 --home-dir /tmp --no-create-home --shell /usr/sbin/nologin baton \
    && install --directory --owner 65532 --group 65532 /models
COPY --from=build /opt/baton /opt/baton
# Written to are /tmp and /models alone.
ENV PATH=/opt/baton/bin:$PATH HOME=/tmp HF_HOME=/models PYTHONDONTWRITEBYTECODE=1
USER 65532:65532
ENTRYPOINT ["/usr/bin/tini", "--", "baton"]
