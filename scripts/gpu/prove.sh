#!/usr/bin/env bash
# The proof on one real GPU, in under nine minutes, without a network: see scripts/gpu/__init__.py.
#
#     PROOF_COMMIT=$(git rev-parse HEAD) bash scripts/gpu/prove.sh OUT
#     bash scripts/gpu/prove.sh OUT --only sound kernels
#     PROOF_SMALL=1 PRETEND=2 bash scripts/gpu/prove.sh OUT     # a rehearsal on the pretended GPU
#
# Results are OUT/*.json, one file a stage, and OUT/table.md: eight files. What a failure printed stands in its stage's.
#
# Where something is missing, what scripts/gpu/wheels.sh gathered is laid in a folder before the machine's own packages,
# which stay as they are: its python may be one of a virtual environment, whose packages another one built on it would
# not see. lit_rl is taken from the checkout, conf/ with it. PYTHON names another interpreter. A machine whose checkout
# came without its history is told the commit by PROOF_COMMIT; else it is "unknown".
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
# Files are read from a cold disk here, so that no stage's time is spent on it.
began=$SECONDS
timeout 25 $python -c "import torch, lightning
from transformers import AutoModelForCausalLM
from trl import GRPOTrainer" 2>&1 | tail -n 3 || true
echo "imports before the first stage: $((SECONDS - began)) s of at most 25"
$python -m gpu.prove "$@"
