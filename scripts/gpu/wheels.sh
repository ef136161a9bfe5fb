#!/usr/bin/env bash
# Gathers what a bare machine with a GPU lacks into .wheels-gpu/ (ignored by git), for prove.sh, which has no index there.
#
#     bash scripts/gpu/wheels.sh                        # Python 3.12 on x86-64
#     PYTHON_VERSION=3.11 bash scripts/gpu/wheels.sh    # for a rehearsal
#
# That machine has torch, transformers, lightning, peft, accelerate, triton, pyarrow, pandas, rich, tensorboard,
# safetensors, jaxtyping, and what these need. lit_rl itself is taken from the checkout. PIP_ARGS goes to pip.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
version=${PYTHON_VERSION:-3.12}
folder=.wheels-gpu
packages=(
  datasets dill multiprocess xxhash               # xxhash: where the machine has none
  filelock                                        # an older one may be there
  hydra-core omegaconf
  'jsonargparse' docstring-parser typeshed-client importlib-resources
  jsonschema jsonschema-specifications referencing rpds-py
  trl==1.16.0 liger-kernel
)
platforms=()
for number in 28 27 17 5; do platforms+=(--platform "manylinux_2_${number}_x86_64"); done
rm -rf "$folder"
mkdir "$folder"
$python -m pip download -q ${PIP_ARGS:-} --no-deps --only-binary=:all: --python-version "$version" --implementation cp \
  "${platforms[@]}" --platform manylinux2014_x86_64 -c constraints.txt -d "$folder" "${packages[@]}"
# Of this one there is no wheel; its code is Python's alone, so any Python 3 builds the one for all.
$python -m pip wheel -q ${PIP_ARGS:-} --no-deps -c constraints.txt -w "$folder" antlr4-python3-runtime
bytes=$(du -sb "$folder" | cut -f1)
echo "$folder: $(ls "$folder" | grep -c whl) wheels for Python $version, $((bytes / 1000000)) MB"
test "$bytes" -lt 50000000
