"""A night in short: many pages against servers that die, freeze, hang, loop and err at random by a printed seed.

`SOAK_SEED=7 pytest tests/test_soak.py` repeats one. What the servers saw is the truth; the run must say the same.
"""

from __future__ import annotations

import os
import random
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

import pytest

from tests.runs import Ended, built_script, output_table, run_here, write_pages
from tests.servers import READABLE, Server, assert_gone, fault
from tests.stub_vllm import read_journal

if TYPE_CHECKING:
    from pathlib import Path

CONCURRENCY = 32
CANARY_TAG = "fafafa"
# What goes wrong with a page, and how likely: on a thousand pages it happens as often as on many.
PAGE_FAULTS = {
    "status=500": 0.008,
    "status=429,retry_after=0.2": 0.004,
    "reset": 0.004,
    "half_close": 0.003,
    "garbage": 0.003,
    "loop": 0.006,
    "truncate": 0.006,
    "repetition": 0.004,
    "empty": 0.002,
    "null": 0.002,
    "status=400,message=too much for me": 0.002,
}


def server_options(seed: int, deaths: float, freezes: float) -> str:
    """Faults whose dice are other ones at each start."""
    faults = {**PAGE_FAULTS, "die": deaths, "stall,seconds=600": freezes, "hang": freezes}
    specs = [f"{kind},p={p},seed={seed}{number:02d}$start" for number, (kind, p) in enumerate(faults.items())]
    return " ".join([fault(READABLE), *(f'--fault "{spec}"' for spec in specs)])


@pytest.mark.slow
@pytest.mark.parametrize(
    "pages",
    [1_000, pytest.param(20_000, marks=pytest.mark.timeout(1500))],
)
def test_every_row_has_its_result_and_every_count_is_what_the_servers_saw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pages: int, capsys: pytest.CaptureFixture[str]
) -> None:
    seed = int(os.environ.get("SOAK_SEED") or random.randrange(1_000_000))
    with capsys.disabled():
        print(f"\nsoak of {pages} pages, SOAK_SEED={seed}")
    for name, seconds in (("FIRST_PAUSE_S", 0.05), ("LONGEST_PAUSE_S", 0.2), ("LONGEST_BACKOFF_S", 0.05)):
        monkeypatch.setattr(built_script(), name, seconds)
    some = 6 / pages
    server = Server(tmp_path, server_options(seed, deaths=some, freezes=some / 3))
    words = ["--concurrency", str(CONCURRENCY), "--stall-timeout", "1", "--max-restarts", "200"]
    words += ["--max-failure-rate", "1", "--request-timeout", "20"]
    source = write_pages(tmp_path / "pages.parquet", pages, row_group_size=1000)
    ended = run_here(source, tmp_path / "out", *words, *server.words, canary=True)
    assert ended.code == 0, f"SOAK_SEED={seed}: {ended}"
    rows: list[dict[str, Any]] = output_table(tmp_path / "out").drop(["image", "kind"]).to_pylist()
    assert [row["id"] for row in rows] == list(range(1, pages + 1))
    check_rows(rows, server, seed)
    check_counts(rows, ended, server, seed)
    assert_gone(server)
    with capsys.disabled():
        print({key: ended.line[key] for key in ("statuses", "requests", "retries", "restarts", "seconds")})


def check_rows(rows: list[dict[str, Any]], server: Server, seed: int) -> None:
    """Each row holds what a server answered to its page, or says why it holds nothing."""
    answers: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    refusals: Counter[str] = Counter()
    for entry in read_journal(server.journal):
        if "text" in entry:
            answers[entry["tag"]].append(entry)
        refusals[entry["tag"]] += entry["outcome"] == "400"
    for row in rows:
        tag, what = f"{row['id']:06x}", f"SOAK_SEED={seed}: {row}"
        status, text = row["markdown_status"], row["markdown"]
        if status == "error":
            assert text is None, what
            reason = row["markdown_error"]
            if "quarantined" in reason:
                continue
            assert refusals[tag] if "HTTP 400" in reason else not (answers[tag][-1]["text"] or "").strip(), what
            continue
        given = [entry for entry in answers[tag] if entry["text"] == text]
        assert given, what
        assert row["markdown_tokens"] in [entry["tokens"] for entry in given], what
        expected = {"stop": {"ok"}, "length": {"truncated", "repetition"}, "repetition": {"repetition"}}
        assert any(status in expected[entry["finish"]] for entry in given), what


def check_counts(rows: list[dict[str, Any]], ended: Ended, server: Server, seed: int) -> None:
    """The last line says what is in the output and what the servers counted."""
    said, what = ended.line, f"SOAK_SEED={seed}: {ended.line}"
    assert {status: count for status, count in said["statuses"].items() if count} == Counter(
        row["markdown_status"] for row in rows
    ), what
    kept = sum(row["markdown_tokens"] or 0 for row in rows)  # beside them, the texts for which a better one came back
    assert kept <= said["tokens"] <= sum(entry.get("tokens", 0) for entry in read_journal(server.journal)), what
    assert said["restarts"] == len(server.pids) - 1, what
    arrivals = [entry["tag"] for entry in read_journal(server.arrivals)]
    canaries = arrivals.count(CANARY_TAG)
    assert canaries >= len(server.pids), what
    # a server that dies has not read all that was on the way to it
    unseen = said["requests"] - (len(arrivals) - canaries)
    assert 0 <= unseen <= said["restarts"] * CONCURRENCY, what
    assert said["requests"] == len(rows) + said["retries"] + said["asked_again"], what
