"""Makes the byte-level tokenizer that fits the tiny checkpoints: 320 ids, BOS 0, EOS 1, the released special names.

python -m scripts.tiny_tokenizer tests/data/tokenizer
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

VOCAB_SIZE = 320
BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
ROLES = ["<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "｜DSML｜", "<｜latest_reminder｜>"]
TASKS = [
    "<｜action｜>",
    "<｜query｜>",
    "<｜authority｜>",
    "<｜domain｜>",
    "<｜title｜>",
    "<｜read_url｜>",
    "<｜extracted_url｜>",
]
# Pairs in the order they merge, in the byte-level alphabet (Ġ is a space): frequent English ones, and two that build
# a part of a multi-byte character, so that characters really are split over tokens.
MERGES = (
    "t h|th e|Ġ the|i n|e r|a n|r e|o n|a t|e n|n d|o r|e s|i s|i t|o u|Ġ a|in g|an d|Ġ and|o f|Ġ of|Ġ t|Ġt o|a l|l e"
    "|h e|s t|c o|d e|Ġ in|Ġ is|e d|Ġ w|Ġ b|Ġ s|l l|o w|r o|Ġ c|Ġ m|u r|v e|ou r|Ġ y|Ġy ou|ð Ł|ðŁ ĺ|ä ¸"
)


def alphabet() -> list[str]:
    """The 256 byte symbols, in byte order of their code points."""
    return sorted(pre_tokenizers.ByteLevel.alphabet())


def build() -> Tokenizer:
    """A tokenizer of exactly VOCAB_SIZE ids."""
    vocabulary = {name: i for i, name in enumerate([BOS, EOS, *alphabet()])}
    merges = [(left, right) for left, right in (pair.split(" ") for pair in MERGES.split("|"))]
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in (BOS, EOS)])
    tokenizer.add_tokens([AddedToken(name, special=False, normalized=False) for name in (*ROLES, *TASKS)])
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise SystemExit(f"made {tokenizer.get_vocab_size()} ids, not {VOCAB_SIZE}")
    return tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m scripts.tiny_tokenizer", description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, help="where tokenizer.json is written; made if it is not there")
    folder: Path = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    build().save(str(folder / "tokenizer.json"))


if __name__ == "__main__":
    main()
