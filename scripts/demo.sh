#!/usr/bin/env bash
# The main job on a fresh machine: SFT, reward model and PPO of SmolLM2-135M on the demo data, CPU or GPU, no hub.
# Arguments are Hydra overrides, e.g. scripts/demo.sh zero=3
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${VENV:-.venv}
scripts/setup.sh "$venv"
. "$venv/bin/activate"
# bf16 where the processor or a GPU computes in it (three times as fast there), fp32 elsewhere
precision=fp32
if grep -qE 'avx512_bf16|amx_bf16' /proc/cpuinfo || command -v nvidia-smi > /dev/null; then precision=bf16; fi
run=outputs/demo/$(date +%Y-%m-%d_%H-%M-%S)
python train.py experiment=demo precision=$precision hydra.run.dir="$run" "$@"
python scripts/summary.py "$run"
