"""How the tokens of one step are shared out among the prompts that compute."""

from __future__ import annotations

from collections.abc import Sequence

from prefill.prompt import Chunk, Prompt

SMALLEST_SHARE = 16  # tokens; below this a chunk is not worth cutting in half


def share_out(prompts: Sequence[Prompt], step_tokens: int, chunk_tokens: int) -> list[Chunk]:
    """The next step: at most `step_tokens` (at least 2), of each prompt at most `chunk_tokens`. `prompts` by arrival.

    In order of arrival each prompt may take half of what is left, so the oldest advances by half a step whoever comes,
    and a short prompt behind a few long ones is in the next step already. The last eighth is kept for those who got
    nothing that way, the ones that were passed over most often first: of n prompts each is in one of n steps, whatever
    is ahead of it. What nobody wanted is given out by arrival again.
    """
    counts: dict[Prompt, int] = {}
    kept = max(step_tokens // 8, min(SMALLEST_SHARE, step_tokens // 2)) if len(prompts) > 1 else 0
    left = kept + _halve(prompts, step_tokens - kept, step_tokens, chunk_tokens, counts)
    passed_over = sorted((prompt for prompt in prompts if prompt not in counts), key=lambda prompt: -prompt.passed_over)
    left = _halve(passed_over, left, left, chunk_tokens, counts)
    for prompt in prompts:
        if left and prompt in counts:
            more = min(left, min(prompt.remaining, chunk_tokens) - counts[prompt])
            counts[prompt] += more
            left -= more
        prompt.passed_over = 0 if prompt in counts else prompt.passed_over + 1
    return [Chunk(prompt, count) for prompt, count in counts.items()]


def _halve(prompts: Sequence[Prompt], tokens: int, whole: int, chunk_tokens: int, counts: dict[Prompt, int]) -> int:
    """Notes a share for each of `prompts` while there are tokens, and gives what is left of them. The first share is half
    of `whole`."""
    half = -(-whole // 2)
    for prompt in prompts:
        if not tokens:
            break
        counts[prompt] = min(tokens, max(half, SMALLEST_SHARE), prompt.remaining, chunk_tokens)
        tokens -= counts[prompt]
        half = -(-tokens // 2)
    return tokens
