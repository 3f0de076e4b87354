#!/bin/sh
# Makes the locks of the images anew from pyproject.toml, with uv on the path: k8s/images/lock.sh [--upgrade]
# Without --upgrade a version stays as long as pyproject.toml admits it. Commit what comes out.
set -eu
cd "$(dirname "$0")/../.."
# No settings of whoever runs it.
export UV_NO_CONFIG=1 UV_CUSTOM_COMPILE_COMMAND=k8s/images/lock.sh

lock() {
    uv pip compile --quiet --python-version 3.12 --python-platform x86_64-manylinux_2_28 --generate-hashes \
        --annotation-style line "$@"
}

lock "$@" pyproject.toml --extra worker --output-file k8s/images/worker.lock
# What both have is of one version: they speak to each other, and read the same tokenizer.
lock "$@" pyproject.toml --extra kubernetes --extra otel \
    --constraints k8s/images/worker.lock --output-file k8s/images/gateway.lock
# What builds Baton's wheel.
python3 -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"], sep="\n")' |
    lock "$@" - --constraints k8s/images/worker.lock --output-file k8s/images/build.lock
