#!/usr/bin/env bash
# What a machine with a GPU, torch, triton and transformers, but no network, lacks for `benchmarks.gpu`: one small archive.
#
#   benchmarks/gpu/packages.sh ARCHIVE.tar.xz [PYTHON_VERSION]      # there: tar xf it, and put the folder on PYTHONPATH
#
# Versions are those of pyproject.toml. Of NIXL it keeps what UCX needs between processes of one machine: the plugins for
# storage and other fabrics are most of its 56 MiB.
set -euo pipefail
archive=$(realpath "$1")
python=${2:-3.12}
root=$(realpath "$(dirname "$0")/../..")
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

platforms=()
for each in manylinux_2_39 manylinux_2_35 manylinux_2_34 manylinux_2_31 manylinux_2_28 manylinux_2_27 manylinux_2_26 manylinux_2_24 manylinux_2_17 manylinux2014 manylinux1; do
  platforms+=(--platform "${each}_x86_64")
done
install() {
  python3 -m pip install --quiet --no-deps --no-compile --only-binary=:all: --implementation cp \
    --python-version "$python" "${platforms[@]}" --target "$scratch/site" "$@"
}

# NIXL's wheel for CUDA 13 has the versions of nixl.
mapfile -t ranges < <(python3 - "$root/pyproject.toml" <<'PYTHON'
import re, sys, tomllib

with open(sys.argv[1], "rb") as file:
    project = tomllib.load(file)["project"]
wanted = project["dependencies"] + project["optional-dependencies"]["worker"] + project["optional-dependencies"]["dev"]
ranges = {re.match(r"[\w-]+", each)[0]: each for each in wanted}
for name in ("pydantic", "pydantic-settings", "llguidance", "pyzmq", "msgpack", "nixl", "pytest-asyncio"):
    print(ranges[name])
print(ranges["nixl"].replace("nixl", "nixl-cu13"))
PYTHON
)
install "${ranges[@]}" annotated-types typing-inspection typing-extensions python-dotenv
# The one version of pydantic-core that this pydantic wants.
core=$(grep -h '^Requires-Dist: pydantic-core==' "$scratch"/site/pydantic-*.dist-info/METADATA | sed 's/.*: //; s/;.*//')
install "$core"

cd "$scratch/site"
find .nixl_cu13.mesonpy.libs/plugins -name '*.so*' ! -name 'libplugin_UCX.so' -delete
find nixl_cu13.libs/ucx -name '*.so*' ! -name 'libuct_cuda*' ! -name 'libucm_cuda*' ! -name 'libuct_cma*' -delete
tar cJf "$archive" .
ls -l "$archive"
