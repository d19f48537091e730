"""Whether what decode and prefill report has the shape that `wire.messages` describes: checked here, trusted afterwards.

The codec leaves the rows of Tokens unchecked because they are the hot path: one check a row, no copies.
"""

from __future__ import annotations

from typing import Any

from wire.messages import PromptLogprobs


def is_row(row: Any) -> bool:
    """Whether a row of Tokens has the shape that `wire.messages.Tokens` describes."""
    if type(row) is not list or len(row) != 8:
        return False
    rid, attempt, index, first, ids, finish, logprobs, tops = row
    numbers = type(rid) is int and type(attempt) is int and type(index) is int and type(first) is int
    if not numbers or type(ids) is not list:
        return False
    for token_id in ids:
        if type(token_id) is not int or not 0 <= token_id < 1 << 32:
            return False
    if finish not in ("", "stop", "length"):
        return False
    if logprobs is None:
        return tops is None
    return _are_floats(logprobs, len(ids)) and (tops is None or _are_tops(tops, len(ids)))


def _are_floats(values: Any, count: int) -> bool:
    return type(values) is list and len(values) == count and all(type(value) in (float, int) for value in values)


def _are_tops(tops: Any, count: int) -> bool:
    if type(tops) is not list or len(tops) != count:
        return False
    pairs = [pair for top in tops for pair in (top if type(top) is list else (None,))]
    return all(
        type(pair) is list and len(pair) == 2 and type(pair[0]) is int and pair[0] >= 0 and type(pair[1]) in (float, int)
        for pair in pairs
    )


def holds_prompt(message: PromptLogprobs, count: int) -> bool:
    """At least `count` positions (a retry has more), all three arrays of one length."""
    length, k = len(message.logprobs) // 4, message.top_k
    whole = len(message.logprobs) % 4 == 0 and k >= 0
    return whole and length >= count and len(message.top_ids) == len(message.top_logprobs) == 4 * length * k
