"""The right answers, from plain transformers in a process of its own: nothing of readmit takes part in them.

``python -m readmit.demo.reference MODEL`` reads ``[[prompt, max_tokens], ...]`` as JSON from standard input.
"""

import json
import os
import subprocess
import sys
from pathlib import Path


def right_answers(model: Path, questions: list[tuple[str, int]]) -> list[str]:
    """What greedy decoding continues each prompt with, for as many tokens as are asked for."""
    command = [sys.executable, "-m", __name__, str(model)]
    asked = json.dumps(questions).encode()
    answers: list[str] = json.loads(subprocess.run(command, check=True, input=asked, stdout=subprocess.PIPE).stdout)
    return answers


def main() -> None:
    # Read by OpenMP when torch is imported: its threads would otherwise spin against whatever else runs here.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    import torch
    import transformers

    (model,) = sys.argv[1:]
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    engine = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    answers = []
    for prompt, max_tokens in json.load(sys.stdin):
        inputs = tokenizer(prompt, return_tensors="pt")
        output = engine.generate(**inputs, do_sample=False, max_new_tokens=max_tokens)
        answers.append(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
