"""Hosted runners: flavours and prices, the machine that a job finds itself on, estimates, and the end of its time."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from src.deadline import overrun, watch_deadline
from src.errors import UsageError
from src.estimate import Estimate, Speed, no_speed, read_timeout, speed_of, timeout_for, timeout_words
from src.flavors import FLAVORS, MEASURED, find_flavor, matching_flavor
from src.hardware import STORED_PRICES, read_number, read_price_list
from src.hosted import FLAVOR_VARIABLE, TIMEOUT_VARIABLE, Runner, find_runner
from src.machine import Gpu
from src.report import Outcome, Tally

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.hub_server import HubServer

from tests.hub_server import HubServer as Server

A10G, T4 = "NVIDIA A10G", "Tesla T4"


@pytest.fixture(scope="module")
def hub() -> Iterator[HubServer]:
    with Server() as server:
        yield server


@pytest.fixture
def here(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> HubServer:
    """The Hub stand-in as this process sees it, with a token; no GPU is here."""
    from huggingface_hub import HfApi

    monkeypatch.setattr(HfApi, "__init__", lambda api: _at(api, hub.url, hub.token))
    monkeypatch.setattr("src.hosted.find_gpus", lambda: ())
    hub.requests.clear()
    return hub


def _at(api: object, url: str, token: str) -> None:
    api.__dict__.update(
        endpoint=url, token=token, library_name=None, library_version=None, user_agent=None, headers=None
    )


# --- which flavour ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flavor", FLAVORS, ids=lambda flavor: flavor.name)
def test_each_flavour_is_found_by_its_cores_memory_and_gpus(flavor: object) -> None:
    assert isinstance(flavor, type(FLAVORS[0]))
    gpus = [f"NVIDIA {flavor.gpu}-80GB"] * flavor.gpus
    assert matching_flavor(FLAVORS, flavor.vcpus, flavor.ram_gb * 0.94, gpus) == flavor


def test_what_fits_no_flavour_or_several_is_none() -> None:
    assert matching_flavor(FLAVORS, 4, 15, [A10G]) == find_flavor(FLAVORS, "a10g-small")
    assert matching_flavor(FLAVORS, 4, 15, [T4]) == find_flavor(FLAVORS, "t4-small")
    assert matching_flavor(FLAVORS, 4, 15, []) is None, "a GPU that can't be seen is not guessed"
    assert matching_flavor(FLAVORS, 8, 62, ["NVIDIA L4"]) is None, "an L40S is no L4"
    assert matching_flavor(FLAVORS, None, 15, [A10G]) is None
    twins = [replace(FLAVORS[0], name="a"), replace(FLAVORS[0], name="b")]
    assert matching_flavor(twins, 2, 16, []) is None


def test_every_measured_speed_is_of_a_flavour_that_there_is_and_says_how_it_is_known() -> None:
    assert MEASURED
    for row in MEASURED:
        assert find_flavor(FLAVORS, row.flavor), row
        assert row.shape in ("offline", "server")
        assert row.evidence in ("measured here", "vendor", "field", "claim")
        assert row.conditions
    assert len({(row.model_id, row.flavor, row.shape) for row in MEASURED}) == len(MEASURED)


# --- what the Hub lists ----------------------------------------------------------------------------------------------


def test_the_price_list_is_the_hubs_of_today_where_it_answers(here: HubServer) -> None:
    prices = read_price_list()
    assert prices.prices_of == "today"
    assert {flavor.name for flavor in prices.flavors} == {item["name"] for item in here.jobs.hardware}
    for flavor in prices.flavors:
        assert flavor == find_flavor(FLAVORS, flavor.name)


@pytest.mark.parametrize("hours", [("hour", 1_000_000), ("second", 278), ("minute", 16_667)])
def test_a_price_is_one_of_an_hour_whatever_the_unit(
    here: HubServer, monkeypatch: pytest.MonkeyPatch, hours: tuple[str, int]
) -> None:
    listed = [{**here.jobs.hardware[6], "unitLabel": hours[0], "unitCostMicroUSD": hours[1]}]
    monkeypatch.setattr(here.jobs, "hardware", listed)
    (flavor,) = read_price_list().flavors
    assert flavor.dollars_per_hour == pytest.approx(1.0, abs=0.002)


@pytest.mark.parametrize("change", [{"unitLabel": "fortnight"}, {"cpu": "many"}, {"accelerator": {"type": "gpu"}}])
def test_a_list_that_cant_be_read_is_none_and_the_stored_one_counts(
    here: HubServer, monkeypatch: pytest.MonkeyPatch, change: dict[str, object]
) -> None:
    monkeypatch.setattr(here.jobs, "hardware", [{**here.jobs.hardware[4], **change}])
    assert read_price_list() is STORED_PRICES


def test_without_a_hub_the_stored_prices_count() -> None:
    assert read_price_list() is STORED_PRICES


# --- where we are ----------------------------------------------------------------------------------------------------


def test_outside_of_a_job_nothing_is_asked_and_the_users_price_is_all_there_is(here: HubServer) -> None:
    assert find_runner({"ACCELERATOR": "l4x1"}, None, 0.0) == Runner()
    assert find_runner({}, 2.5, 0.0) == Runner(dollars_per_hour=2.5)
    assert not here.requests


def test_what_the_submission_says_is_known_without_asking_about_the_job(here: HubServer) -> None:
    environment = {"JOB_ID": "1", FLAVOR_VARIABLE: "a10g-large", TIMEOUT_VARIABLE: "7200", "ACCELERATOR": "gpu"}
    assert find_runner(environment, None, 100.0) == Runner("a10g-large", 1.5, "today", 7300.0)
    assert sum(here.requests.values()) == 1
    assert find_runner(environment, 9.0, 100.0) == Runner("a10g-large", 9.0, None, 7300.0)


def test_accelerator_counts_where_it_is_a_flavour(here: HubServer) -> None:
    assert find_runner({"JOB_ID": "1", "ACCELERATOR": "l4x1"}, None, 0.0).flavor == "l4x1"


def test_the_hub_tells_a_token_that_may_ask(here: HubServer) -> None:
    from huggingface_hub import HfApi

    job = HfApi().run_job(image="i", command=["python", "-c", ""], flavor="l4x4")
    here.jobs.wait()
    shape = {"ACCELERATOR": "gpu", "CPU_CORES": "8", "MEMORY": "30GB"}
    assert find_runner({"JOB_ID": job.id, **shape}, None, 0.0).flavor == "l4x4"
    assert find_runner({"JOB_ID": "of-nobody", **shape}, None, 0.0).flavor is None


def test_else_cores_memory_and_gpus_tell(here: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("src.hosted.find_gpus", lambda: (Gpu(A10G, 23028, "570"),))
    found = find_runner({"JOB_ID": "x", "CPU_CORES": "12", "MEMORY": "46Gi", "ACCELERATOR": "gpu"}, None, 0.0)
    assert (found.flavor, found.dollars_per_hour) == ("a10g-large", 1.5)
    for cores, memory in (("12", "a lot"), ("", "46"), ("96", "46")):
        unknown = find_runner({"JOB_ID": "x", "CPU_CORES": cores, "MEMORY": memory}, None, 0.0)
        assert unknown == Runner(), "a machine that is none of the list has no price"


def test_a_hub_that_is_away_leaves_the_stored_prices_with_their_date() -> None:
    found = find_runner({"JOB_ID": "x", "ACCELERATOR": "l4x1"}, None, 0.0)
    assert (found.dollars_per_hour, found.prices_of) == (0.8, "August 2026")
    assert found.cost(0.59) == "$0.38 per 1,000 pages (l4x1, $0.80 an hour, prices of August 2026)"
    assert Runner().cost(1.0) is None
    assert found.cost(0.0) is None


@pytest.mark.parametrize(("text", "number"), [("8 vCPU", 8), ("16GB", 16), (" 15.5 Gi", 15.5)])
def test_a_number_is_read_with_whatever_unit_behind_it(text: str, number: float) -> None:
    assert read_number(text) == number


# --- estimates -------------------------------------------------------------------------------------------------------


def test_an_estimate_counts_hours_and_dollars_of_all_jobs() -> None:
    estimate = Estimate(10_000, 2_560, 4, Speed(2.0, "--pages-per-second"), 1.5)
    assert estimate.longest_s == 1280
    assert estimate.job_hours == pytest.approx(10_000 / 7200)
    assert estimate.dollars == pytest.approx(1.5 * 10_000 / 7200)
    assert estimate.dollars_per_thousand_pages == pytest.approx(1.5 / 7.2)
    assert "10000 pages at 2 pages/s a job (--pages-per-second): 21m20s for the longest of 4" in str(estimate)
    assert "$2.08 in all, $0.21 per 1,000 pages" in str(estimate)
    unpriced = replace(estimate, dollars_per_hour=None)
    assert "$" not in str(unpriced)
    assert unpriced.as_json()["dollars"] is None


def test_a_speed_is_the_users_or_on_record_for_this_very_model_flavour_and_shape() -> None:
    model = "lightonai/LightOnOCR-2-1B"
    assert speed_of(model, "l4x1", "server", 3.0) == Speed(3.0, "--pages-per-second")
    stored = speed_of(model, "l4x1", "server", None)
    assert stored is not None
    assert (stored.pages_per_s, stored.basis.startswith("field: ")) == (0.59, True)
    assert speed_of(model, "a10g-small", "server", None) is None
    assert speed_of("lightonai/LightOnOCR-2-1B-base", "l4x1", "server", None) is None
    words = no_speed(model, "a10g-small", "offline")
    assert "none is invented" in words
    assert "on l4x1 0.33 pages/s (field" in words
    assert "on record:" not in no_speed("somebody/else", "l4x1", "server")


@given(st.integers(1, 10**7), st.floats(0.01, 100))
def test_a_job_gets_half_again_the_time_it_needs_in_full_hours(pages: int, pages_per_s: float) -> None:
    estimate = Estimate(pages, pages, 1, Speed(pages_per_s, ""), None)
    seconds = timeout_for(estimate)
    assert seconds % 3600 == 0
    assert 0 <= seconds - (1.5 * estimate.longest_s + 1800) < 3600.001
    assert timeout_for(None) == 4 * 3600


@pytest.mark.parametrize(
    ("text", "seconds"), [("5400", 5400), ("90m", 5400), ("4h", 14400), ("1.5h", 5400), ("2d", 172800)]
)
def test_a_timeout_is_read_as_hf_jobs_reads_it(text: str, seconds: int) -> None:
    from huggingface_hub._jobs_api import _create_job_spec

    spec = _create_job_spec(image="i", command=["c"], env=None, secrets=None, flavor=None, timeout=text)
    assert read_timeout(text) == spec["timeoutSeconds"] == seconds
    assert read_timeout(timeout_words(seconds)) == seconds


@pytest.mark.parametrize("text", ["", "h", "4 h", "soon", "-1", "0", "1w", "0.2s"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="90m, 4h or 2d"):
        read_timeout(text)


# --- dollars and the end ---------------------------------------------------------------------------------------------


def tally_of(rows: int, done: int, seconds: float, dollars_per_hour: float | None = None) -> Tally:
    tally = Tally(rows, dollars_per_hour=dollars_per_hour, started=time.monotonic() - seconds)
    tally.statuses["ok"] = done
    return tally


def test_the_line_and_the_last_line_say_what_pages_cost() -> None:
    import json

    tally = tally_of(1000, 360, 180, dollars_per_hour=1.8)
    assert ", $0.25 per 1,000 pages" in tally.line()
    outcome = Outcome("in", "out", "train", "m", "e", 0, "done", 200.0, tally, {}, flavor="l40sx1")
    said = json.loads(outcome.json_line())
    assert (said["flavor"], said["dollars_per_hour"], said["dollars"]) == ("l40sx1", 1.8, 0.1)
    assert said["dollars_per_thousand_pages"] == pytest.approx(0.25, rel=0.01)
    free = json.loads(Outcome("in", "out", None, "m", None, 1, "", 1.0, None, {}).json_line())
    assert [free[key] for key in ("flavor", "dollars_per_hour", "dollars", "dollars_per_thousand_pages")] == [None] * 4


def test_a_run_that_ends_after_its_job_is_told_how_much_will_be_left() -> None:
    tally = tally_of(rows=1000, done=100, seconds=100)  # 1 page/s: 900 s are needed
    assert overrun(tally, 1000.0) is None
    assert overrun(tally_of(1000, 0, 100), 10.0) is None, "before the first page nobody knows"
    words = overrun(tally, 300.0)
    assert words is not None
    assert "stopped in 5m00s" in words
    assert "needs 15m00s" in words
    assert "about 600 pages will be left" in words
    assert "--timeout" in words


def test_the_warning_is_said_once_and_not_before_a_tenth_of_the_time(capsys: pytest.CaptureFixture[str]) -> None:
    tally = tally_of(rows=10_000, done=10, seconds=10)

    async def wait_for_the_warning() -> None:
        await asyncio.wait_for(watch_deadline(tally, time.monotonic() + 8), 60)

    asyncio.run(wait_for_the_warning())
    assert capsys.readouterr().err.count("this job is stopped in") == 1
    asyncio.run(watch_deadline(tally, None))
    assert capsys.readouterr().err == ""
