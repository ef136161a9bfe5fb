#!/usr/bin/env bash
# The proof on one real GPU, in under nine minutes, without a network: see scripts/gpu/__init__.py.
#
#     bash scripts/gpu/prove.sh OUT                       # results in OUT: a JSON file a stage, and table.md
#     bash scripts/gpu/prove.sh OUT --only sound kernels
#     PROOF_SMALL=1 PRETEND=2 bash scripts/gpu/prove.sh OUT     # a rehearsal on the pretended GPU
#
# Where something is missing, what scripts/gpu/wheels.sh gathered is laid in a folder before the machine's own packages,
# which stay as they are: its python may be one of a virtual environment, whose packages another one built on it would
# not see. lit_rl is taken from the checkout, conf/ with it. PYTHON names another interpreter, PROOF_COMMIT the commit of
# a checkout without history.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
python=${PYTHON:-python3}
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
needed="datasets hydra omegaconf jsonargparse jsonschema trl"
if compgen -G "$root/.wheels-gpu/*.whl" > /dev/null && ! $python -c "import importlib.util, sys
sys.exit(not all(map(importlib.util.find_spec, '$needed'.split())))"; then
  $python -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$site" "$root"/.wheels-gpu/*.whl
fi
export PYTHONPATH="$site:$root:$root/scripts${PRETEND:+:$root/tests/pretended_gpu/site}${PYTHONPATH:+:$PYTHONPATH}"
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
$python -m gpu.prove "$@"
