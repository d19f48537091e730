"""Greedy continuations by Hugging Face transformers, an implementation that is not ours.

Runs under the clients' python from another folder (transformers would take our `kernels` for a package of its own):
``python oracle_transformers.py MODEL_DIR`` with ``{"prompts": [[ids]], "new_tokens": n}`` on stdin; prints
``{"tokens": [[ids]], "last_logits": [[floats]]}``.
"""

import json
import sys
from typing import Any


def main() -> None:
    import torch
    from transformers import AutoModelForCausalLM  # type: ignore[import-not-found,unused-ignore]

    request = json.load(sys.stdin)
    torch.set_num_threads(1)
    model: Any = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32, attn_implementation="eager")
    model.eval()
    tokens, last_logits = [], []
    with torch.no_grad():
        for prompt in request["prompts"]:
            ids = list(prompt)
            for step in range(request["new_tokens"]):
                logits = model(torch.tensor([ids])).logits[0, -1]  # a full forward each time: no cache of theirs to trust
                if step == 0:
                    last_logits.append(logits.tolist())
                ids.append(int(logits.argmax()))
            tokens.append(ids[len(prompt) :])
    json.dump({"tokens": tokens, "last_logits": last_logits}, sys.stdout)


if __name__ == "__main__":
    main()
