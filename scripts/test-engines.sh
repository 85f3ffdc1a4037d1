#!/usr/bin/env bash
# The engines' tests, and kills on every path; arguments go to `tests.engines.recoveries`.
set -euo pipefail
cd "$(dirname "$0")/.."

python=$(scripts/engines-env.sh)/bin/python
offline=tests/engines/test_vllm_offline.py
# Whatever failed last in other tests stays known.
pytest=("$python" -m pytest -p no:cacheprovider --timeout 1200)
said=$(mktemp -d)

# On one core tests with vLLM; what only starts vLLM does not do so from a process with one in it.
set -m  # a group of its own, which can be ended as one
{
  failed=0
  "${pytest[@]}" tests/engines --ignore "$offline" || failed=$?
  "${pytest[@]}" "$offline" || failed=$?
  exit "$failed"
} >"$said/tests" 2>&1 &
tests=$!
set +m
trap 'kill -- "-$tests" 2>/dev/null || true; rm -rf "$said"' EXIT

# On the other those with SGLang, which cannot be imported beside vLLM, and the kills of which no time is compared.
failed=0
PYTHONPATH=$(dirname "$python")/../../sglang "${pytest[@]}" tests/engines || failed=$?
"$python" -m tests.engines.recoveries "$@" --parts tp2,observed | tee "$said/recoveries" || failed=$?
wait "$tests" || failed=$?
cat "$said/tests"
(( failed == 0 )) || exit "$failed"
# Alone: these are measured.
"$python" -m tests.engines.recoveries "$@" --parts off,shared --with "$said/recoveries"
