#!/usr/bin/env bash
# The engines' tests, then kills on every path; arguments go to `tests.engines.recoveries`.
set -euo pipefail
cd "$(dirname "$0")/.."

python=$(scripts/engines-env.sh)/bin/python
offline=tests/engines/test_vllm_offline.py
# Whatever failed last in other tests stays known.
pytest=("$python" -m pytest -p no:cacheprovider)
said=$(mktemp -d)

# SGLang, which cannot be imported beside vLLM, and what waits for processes of vLLM run on the second core.
set -m  # a group of its own, which can be ended as one
{
  failed=0
  PYTHONPATH=$(dirname "$python")/../../sglang "${pytest[@]}" tests/engines || failed=$?
  "${pytest[@]}" "$offline" || failed=$?
  exit "$failed"
} >"$said/beside" 2>&1 &
beside=$!
set +m
trap 'kill -- "-$beside" 2>/dev/null || true; rm -rf "$said"' EXIT

failed=0
"${pytest[@]}" tests/engines --ignore "$offline" || failed=$?
# Of these no time is compared with another, so they need not be alone.
"$python" -m tests.engines.recoveries "$@" --parts tp2,observed | tee "$said/recoveries" || failed=$?
wait "$beside" || failed=$?
cat "$said/beside"
(( failed == 0 )) || exit "$failed"
# Alone: these are measured.
"$python" -m tests.engines.recoveries "$@" --parts off,shared --with "$said/recoveries"
