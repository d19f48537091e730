"""Log probabilities as JSON text, written piece by piece.

A prompt's may be a million numbers. Then a thread writes them, and it has to let go of the interpreter all the time: so
nothing here hands the whole of a list to one call of `json.dumps`.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from json.encoder import encode_basestring_ascii as quote

from wire.messages import PromptLogprobs

Top = Iterable[tuple[int, float]]
Scored = tuple[int, float | None, Top | None]  # id, logprob, most likely ones
TokenText = Callable[[int], str]
LEAST = -9999.0  # JSON has no infinity


@dataclass(frozen=True, slots=True)
class ScoreLists:
    """The lists of a legacy logprobs object, each without its brackets; empty: no tokens."""

    tokens: str
    logprobs: str
    tops: str
    offsets: str


def score_lists(scores: Iterable[Scored], offsets: Iterable[int], token_text: TokenText) -> ScoreLists:
    tokens, logprobs, tops = [], [], []
    for token_id, logprob, top in scores:
        text = quote(token_text(token_id))
        tokens.append(text)
        if logprob is None or top is None:
            logprobs.append("null")
            tops.append("null")
            continue
        number = _number(logprob)
        logprobs.append(number)
        # different ids may have the same text; the chosen one's number counts
        alternatives = {quote(token_text(other)): _number(value) for other, value in top} | {text: number}
        tops.append("{" + ",".join([f"{key}:{value}" for key, value in alternatives.items()]) + "}")
    return ScoreLists(",".join(tokens), ",".join(logprobs), ",".join(tops), ",".join(map(str, offsets)))


def legacy_logprobs(parts: Sequence[ScoreLists], with_tops: bool) -> str:
    """The logprobs object of /v1/completions."""
    tokens, logprobs, tops, offsets = (
        ",".join(filter(None, texts)) for texts in zip(*[(p.tokens, p.logprobs, p.tops, p.offsets) for p in parts], strict=True)
    )
    shown = f"[{tops}]" if with_tops else "null"
    return f'{{"tokens":[{tokens}],"token_logprobs":[{logprobs}],"top_logprobs":{shown},"text_offset":[{offsets}]}}'


def chat_logprobs(scores: Iterable[Scored], token_text: TokenText, token_bytes: Callable[[int], bytes]) -> str:
    """The logprobs object of /v1/chat/completions."""

    def entry(token_id: int, logprob: float) -> str:
        raw = list(token_bytes(token_id))
        return f'"token":{quote(token_text(token_id))},"logprob":{_number(logprob)},"bytes":{raw}'

    content = []
    for token_id, logprob, top in scores:
        tops = ",".join([f"{{{entry(*pair)}}}" for pair in top or ()])
        content.append(f'{{{entry(token_id, logprob or 0.0)},"top_logprobs":[{tops}]}}')
    return f'{{"content":[{",".join(content)}],"refusal":null}}'


def prompt_scores(ids: Sequence[int], message: PromptLogprobs) -> Iterator[Scored]:
    """Scores of all prompt tokens; the first has none."""
    k = message.top_k
    logprobs, top_ids, top_logprobs = array("f"), array("I"), array("f")
    for values, data in ((logprobs, message.logprobs), (top_ids, message.top_ids), (top_logprobs, message.top_logprobs)):
        values.frombytes(data)
    rest = (
        (token_id, logprobs[i], zip(top_ids[i * k : i * k + k], top_logprobs[i * k : i * k + k], strict=True))
        for i, token_id in enumerate(ids[1:])
    )
    return chain([(ids[0], None, None)], rest)


def _number(value: float) -> str:
    return repr(value) if math.isfinite(value) else repr(LEAST)
