"""The short form of scripts/bench_kvtransfer.py: real pages between two processes, beside the floors of the same run.

Prints the table (run pytest with -s); asserts that every byte arrived, and no speed: that belongs to a quiet machine.
"""

from __future__ import annotations

import pytest

from scripts.bench_kvtransfer import HEADER, BenchConfig, line, run
from scripts.kv_ends import flash_layout


@pytest.mark.parametrize("path", ["zeromq", "shm"])
def test_throughput(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    config = BenchConfig(contexts="8192", requests="1,8", lanes="2", paths=path, repeats=2)
    rows = run(config, show=False)
    assert [(row.path, row.context, row.requests) for row in rows] == [(path, 8192, 1), (path, 8192, 8)]
    layout = flash_layout()
    mbytes = (32 * layout.page_bytes + sum(nbytes for _, nbytes in layout.live_slot_spans(8192))) / 1e6
    for row in rows:
        assert row.mbytes_a_request == pytest.approx(mbytes)
        assert row.messages_a_request >= mbytes / 4.2
        assert min(row.to_tcp, row.to_packed, row.to_memcpy, row.cpu_s_per_gb) > 0
    with capsys.disabled():
        print("", HEADER, *map(line, rows), sep="\n")
