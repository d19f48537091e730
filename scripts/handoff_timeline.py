"""One request's way through router, prefill and decode, from the lines that the processes log with --timeline."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from wire.timeline import Moment, read_moment

LIMIT = 0.10  # of the prefill time: from the end of the last chunk to decode's first step


@dataclass(frozen=True)
class Way:
    """The moments of one request in order, the client's among them, and when its tokens came to the client."""

    moments: list[Moment]
    token_s: list[float]

    @property
    def handoff_s(self) -> float:
        """From the end of the last chunk to decode's first step."""
        return self.at("decode", "first_step") - self._last_chunk_s

    @property
    def prefill_s(self) -> float:
        """From the beginning of the first chunk to the end of the last one, on the device."""
        return self._last_chunk_s - self.at("prefill", "computing")

    @property
    def ratio(self) -> float:
        return self.handoff_s / self.prefill_s

    @property
    def ttft_s(self) -> float:
        return self.token_s[0] - self.at("client", "sent")

    @property
    def step_s(self) -> float:
        """Between two tokens at the client, median."""
        return statistics.median(after - before for before, after in pairwise(self.token_s))

    def figures(self) -> dict[str, float]:
        """Milliseconds. What follows the last chunk is counted from its end."""
        tokens = sum(moment.counts["tokens"] for moment in self.all_of("prefill", "computed"))
        since = {
            "in_place_ms": self.all_of("kvtransfer", "in_place")[-1].at_s,
            "ready_ms": self.at("decode", "ready"),
            "arrived_ms": self.at("decode", "arrived"),
            "first_step_ms": self.at("decode", "first_step"),
            "first_token_ms": self.at("decode", "first_token"),
        }
        return {
            "before_prefill_ms": 1e3 * (self.at("prefill", "computing") - self.at("client", "sent")),
            "prefill_ms": 1e3 * self.prefill_s,
            "prefill_tokens_per_s": tokens / self.prefill_s,
            **{name: 1e3 * (at_s - self._last_chunk_s) for name, at_s in since.items()},
            "ttft_ms": 1e3 * self.ttft_s,
            "decode_step_ms": 1e3 * self.step_s,
            "ratio": self.ratio,
        }

    def lines(self) -> list[str]:
        """A table: milliseconds since the client sent the request, who, what."""
        begin_s = self.at("client", "sent")
        lines = ["| ms | where | what |", "|---|---|---|"]
        for moment in self.moments:
            counts = ", ".join(f"{count:,} {name}" for name, count in moment.counts.items() if name != "sample")
            what = moment.event.replace("_", " ") + (f" ({counts})" if counts else "")
            lines.append(f"| {1e3 * (moment.at_s - begin_s):.2f} | {moment.where} | {what} |")
        return lines

    def at(self, where: str, event: str) -> float:
        """When it happened first. Raises ValueError when it did not."""
        return self.all_of(where, event)[0].at_s

    def all_of(self, where: str, event: str) -> list[Moment]:
        """In order of time, one at least. Raises ValueError when there is none."""
        found = [moment for moment in self.moments if (moment.where, moment.event) == (where, event)]
        if not found:
            raise ValueError(f"no {where} of this request says {event!r}: were all started with --timeline?")
        return found

    @property
    def _last_chunk_s(self) -> float:
        return self.all_of("prefill", "computed")[-1].at_s


def logged(logs: Iterable[Path]) -> list[Moment]:
    """All that the files say, in order of time."""
    lines = (line for log in logs for line in log.read_text(errors="replace").splitlines())
    return sorted((moment for moment in map(read_moment, lines) if moment is not None), key=lambda moment: moment.at_s)


def way_of(moments: list[Moment], tokens: int, sent_s: float, token_s: list[float]) -> Way | None:
    """The way of the request of so many tokens that a client sent then; None while its last lines are not there. Raises
    ValueError when it took more than one attempt: its times are not those of a hand-off."""
    later = [moment for moment in moments if moment.at_s >= sent_s]
    sent = next((m for m in later if (m.where, m.event, m.counts.get("tokens")) == ("router", "sent", tokens)), None)
    mine = [moment for moment in later if sent is not None and moment.rid == sent.rid]
    if any(moment.attempt for moment in mine):
        raise ValueError("the request took more than one attempt; the logs say why")
    computed = sum(m.counts["tokens"] for m in mine if m.event == "computed")
    if computed < tokens - 1 or ("decode", "finished") not in {(m.where, m.event) for m in mine}:
        return None
    client = [Moment("client", "sent", sent_s, {"tokens": tokens}), Moment("client", "first_token", token_s[0], {})]
    client.append(Moment("client", "last_token", token_s[-1], {"tokens": len(token_s)}))
    return Way(sorted([*client, *mine], key=lambda moment: moment.at_s), token_s)
