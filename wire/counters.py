"""What each program counts. All of it is in ``/metrics`` from the start, as 0, so that a rate sees the first event too."""

from __future__ import annotations

_WORKER = """
    steps aborts duplicates misdirected refused step_failures timeouts transfers_broken transfers_ok
"""
_DECODE = """
    bad_logits decode_tokens finished grants_repeated kv_received_bytes kv_received_pages offers retractions
    stale_aborts stale_offers stale_readies tokens_dropped
"""
_PREFILL = "kv_sent_bytes kv_sent_pages offers_repeated prefill_tokens prompts stale_grants"
_ROUTER = """
    completion_tokens gaps messages_unexpected probes_failed probes_ok prompt_tokens reports_malformed
    requests requests_dropped requests_failed requests_rejected_full requests_timed_out retries
    rows_malformed rows_stale sends_failed stalls strays_aborted streams_broken streams_overflowed tries_lost
    workers_joined workers_left workers_lost workers_refused
    failures_retracted failures_transfer failures_corrupt failures_timeout failures_refused failures_internal failures_other
    http_400 http_404 http_405 http_413 http_415 http_429 http_500 http_503 http_504
"""
COUNTERS = {  # role -> names
    "router": tuple(_ROUTER.split()),
    "prefill": tuple((_WORKER + _PREFILL).split()),
    "decode": tuple((_WORKER + _DECODE).split()),
}
