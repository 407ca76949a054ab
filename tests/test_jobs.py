"""`--jobs N`: what is submitted and what is refused, with the real client against the Hub stand-in."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import huggingface_hub
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from src.errors import UsageError
from src.hardware import STORED_PRICES
from src.jobs_plan import choose_flavor
from src.models import find_profile
from src.submission import Hosting, check_words, job_name, label_text, own_words, words_of_shard
from tests.hub_here import hub_here
from tests.runs import ROOT, SATURATE, SCRIPT, Ended, run_here, write_pages
from tests.stub_vllm import DEFAULT_MODEL, StubVllm

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.hub_server import HubServer

OFFLINE = ROOT / "lighton-ocr.py"
JOBS_KEYS = [
    "version",
    "exit_code",
    "message",
    "input",
    "output",
    "split",
    "model",
    "rows",
    "dry_run",
    "name",
    "image",
    "flavor",
    "timeout_seconds",
    "attempts",
    "jobs",
    "running",
    "estimate",
]
PAGES = 20


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    """A Hub with a dataset of pages, in whose jobs nothing is executed; the script is a file, as in a run of it."""
    with hub_here(monkeypatch, tmp_path / "home") as server:
        server.put("me/pages", "data/train.parquet", write_pages(tmp_path / "train.parquet", PAGES).read_bytes())
        server.jobs.executes = False
        monkeypatch.setattr(sys, "argv", [str(SATURATE)])
        monkeypatch.chdir(tmp_path / "home")
        yield server


def hand_out(*words: str, script: Path = SATURATE, output: str = "me/text") -> tuple[Ended, dict[str, Any]]:
    """Run a script with --jobs in this process: how it ended, and its last line."""
    ended = run_here("me/pages", output, "--block-rows", "2", *words, script=script, canary=True)
    said: dict[str, Any] = json.loads(ended.stdout)
    assert said["exit_code"] == ended.code
    return ended, said


# --- words -----------------------------------------------------------------------------------------------------------

JOBS_WORDS = [
    *(["--jobs", "4"], ["--jobs=4"], ["--flavor", "l4x1"], ["--timeout=4h"], ["--attempts", "2"], ["--dry-run"]),
    *(["--jobs-namespace", "org"], ["--pages-per-second", "2"]),
]


@given(
    st.lists(st.sampled_from([*JOBS_WORDS, ["in"], ["--split", "test"], ["--shuffle"], ["--seed=3"]])), st.booleans()
)
def test_a_job_gets_the_users_words_without_those_of_jobs(groups: list[list[str]], has_rest: bool) -> None:
    rest = ["--", "--jobs", "7"] if has_rest else []
    kept = [word for group in groups if group not in JOBS_WORDS for word in group]
    assert own_words([*(word for group in groups for word in group), *rest]) == (kept, rest)
    words = [word for group in groups for word in group]
    assert words_of_shard([*words, *rest], 1, 4) == (*kept, "--num-shards", "4", "--shard-index", "1", *rest)
    assert words_of_shard([*words, *rest], 0, 1) == (*kept, *rest)


def sent_by_the_real_client(words: list[str]) -> list[str]:
    """What `run_uv_job` makes of these words, for a script that is not uploaded."""
    from huggingface_hub import HfApi

    command, *_ = HfApi()._create_uv_command_env_and_secrets(
        script="https://somewhere/s.py",
        script_args=words,
        dependencies=None,
        python=None,
        env=None,
        secrets=None,
        namespace="me",
        token=False,
    )
    assert command[:3] == ["uv", "run", "https://somewhere/s.py"]
    return command[3:]


@settings(deadline=None)
@given(st.lists(st.text("abc./-=é ", max_size=9) | st.sampled_from(["a.py", "x.yaml", "--c=d.toml", "{}", "page.png"])))
def test_words_that_pass_reach_the_job_as_they_are(tmp_path_factory: pytest.TempPathFactory, words: list[str]) -> None:
    try:
        check_words(words, tmp_path_factory.getbasetemp())
    except UsageError:
        return
    assert sent_by_the_real_client(words) == words


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--config", "default"], "write --config=default"),
        (["default"], "is also a file here"),
        (["--serve-command", "uv run rapidocr-server.py"], "looks like a file, and there is none"),
        (["--config=serve.yaml"], "looks like a file"),
        (["--hf-overrides", json.dumps({"k": "v" * 300})], "can't be handed to a job"),
    ],
)
def test_words_that_the_client_would_take_for_files_are_refused(tmp_path: Path, words: list[str], says: str) -> None:
    (tmp_path / "default").write_text("")
    with pytest.raises(UsageError, match=says):
        check_words(words, tmp_path)


def test_files_that_are_meant_to_travel_do(tmp_path: Path) -> None:
    for name in ("page.png", "page.txt"):
        (tmp_path / name).write_text("")
    check_words(["in", "out", "--canary-page", "page.png", "--canary-text", "page.txt"], tmp_path)


def test_the_same_command_has_the_same_name_and_another_one_another() -> None:
    name = job_name("lighton-ocr3-saturate.py", ["a", "b"], 4)
    assert name == job_name("lighton-ocr3-saturate.py", ["a", "b"], 4)
    assert name.startswith("lighton-ocr3-saturate-")
    others = {job_name("lighton-ocr3-saturate.py", ["a", "b"], 5), job_name("lighton-ocr3-saturate.py", ["ab"], 4)}
    assert name not in others
    assert len(others) == 2
    assert label_text("lightonai/LightOnOCR-3-0.8B") == "lightonai-LightOnOCR-3-0-8B"
    assert len(label_text("x" * 300)) == 100


def test_a_flavour_must_be_offered_and_have_the_gpu_that_is_needed() -> None:
    needy, frugal = Hosting("image", "l4x1", "server"), Hosting(None, "cpu-upgrade", "", needs_gpu=False)
    assert choose_flavor(STORED_PRICES, "l4x1", needy).vram_gb == 24
    assert choose_flavor(STORED_PRICES, "cpu-upgrade", frugal).gpu is None
    with pytest.raises(UsageError, match="'l4' is not offered; there are t4-small, t4-medium, l4x1"):
        choose_flavor(STORED_PRICES, "l4", needy)
    with pytest.raises(UsageError, match="has no GPU"):
        choose_flavor(STORED_PRICES, "cpu-upgrade", needy)


# --- refused before anything is opened -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["me/a", "me/b", "--dry-run"], "--dry-run: of no use without --jobs N"),
        (["me/a", "me/b", "--flavor", "l4x1", "--attempts", "2"], "--flavor, --attempts: of no use"),
        (["me/a", "me/b", "--jobs", "2", "--num-shards", "2", "--shard-index", "0"], "leave them out"),
        (["me/a", "me/b", "--jobs", "2", "--finish"], "needs no job"),
        (["me/a", "me/b", "--jobs", "2", "--overwrite"], "would start anew whenever"),
        (["{here}", "me/b", "--jobs", "2"], "hf upload NAMESPACE/NAME"),
        (["me/a", "./out", "--jobs", "2"], "a job's disk goes with the job"),
        (["me/a", "me/b", "--jobs", "0"], "1 is the least"),
    ],
)
def test_what_does_not_fit_jobs_is_refused(tmp_path: Path, words: list[str], says: str) -> None:
    ended = run_here(*(word.format(here=tmp_path) for word in words), script=SATURATE, canary=True)
    assert ended.code == 2
    assert says in ended.advice


# --- what is submitted -----------------------------------------------------------------------------------------------


def test_a_dry_run_says_all_and_leaves_nothing_behind(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--jobs", "4", "--flavor", "a10g-small", "--max-samples", "15"]
    ended, said = hand_out(*words, "--dry-run")
    assert ended.code == 0, ended
    assert list(said) == JOBS_KEYS
    assert (said["rows"], said["flavor"], said["timeout_seconds"], said["attempts"]) == (15, "a10g-small", 3600, 3)
    assert said["image"] == find_profile("lightonai/LightOnOCR-3-0.8B").profile.image
    assert [(job["shard"], job["id"], job["pages"]) for job in said["jobs"]] == [
        (0, None, 4),
        (1, None, 4),
        (2, None, 4),
        (3, None, 3),
    ]
    own = ["me/pages", "me/text", "--block-rows", "2", "--max-samples", "15"]
    assert said["jobs"][2]["arguments"] == [*own, "--num-shards", "4", "--shard-index", "2"]
    assert said["estimate"] == {
        "pages": 15,
        "pages_per_second": 2.2,
        "basis": "field: 600 pages, saturating driver",
        "longest_job_seconds": 1.8,
        "job_hours": 0.0019,
        "dollars_per_hour": 1.0,
        "dollars": 0.0019,
        "dollars_per_thousand_pages": 0.1263,
    }
    assert "secrets: HF_TOKEN" in ended.stderr
    assert hub.token not in ended.stderr + ended.stdout
    assert "me/text" not in {name for _, name in hub.hub.repos}
    assert not hub.jobs.all
    assert not hub.buckets.buckets
    # None is on record for the script's own flavour; a user's figure makes one, and shows what is too short.
    ended, said = hand_out("--jobs", "1", "--dry-run")
    assert (said["estimate"], said["timeout_seconds"], said["flavor"]) == (None, 4 * 3600, "a10g-large")
    assert said["jobs"][0]["arguments"] == own[:4]
    assert "none is invented" in ended.advice
    assert "on a10g-small 2.2 pages/s (field: 600 pages" in ended.advice
    ended, said = hand_out("--jobs", "1", "--dry-run", "--pages-per-second", "0.001", "--timeout", "90m")
    assert said["timeout_seconds"] == 5400
    assert "--timeout 90m is too short for 5h33m a job: --timeout 9h would do" in ended.advice
    # The input is public: what a run would take can be seen without a token.
    monkeypatch.delenv("HF_TOKEN")
    ended, said = hand_out(*words, "--dry-run")
    assert (ended.code, said["estimate"]["pages"]) == (0, 15), ended
    assert "secrets: none" in ended.stderr
    assert hand_out(*words)[0].code == 2, "but nothing is submitted"


def test_each_job_gets_its_shard_image_secrets_labels_and_time(hub: HubServer) -> None:
    ended, said = hand_out("--jobs", "2", "--flavor", "l4x4", "--timeout", "2h", "--attempts", "5", "--", "--seed", "1")
    assert ended.code == 0, ended
    first, second = hub.jobs.all
    assert [job["id"] for job in said["jobs"]] == [f"me/{first.id}", f"me/{second.id}"]
    assert first.spec["dockerImage"] == said["image"] == "vllm/vllm-openai:v0.30.0"
    assert first.spec["secrets"] == {"HF_TOKEN": hub.token}
    assert (first.spec["flavor"], first.spec["timeoutSeconds"], first.spec["attempts"]) == ("l4x4", 7200, 5)
    assert first.environment["LIGHTON_OCR_FLAVOR"] == "l4x4"
    assert first.environment["LIGHTON_OCR_TIMEOUT_S"] == "7200"
    shared = {"script": "lighton-ocr3-saturate", "model": "lightonai-LightOnOCR-3-0-8B", "output": "me-text"}
    assert shared.items() <= first.labels.items()
    assert (first.labels["shard"], second.labels["shard"]) == ("0-of-2", "1-of-2")
    own = ["me/pages", "me/text", "--block-rows", "2"]
    assert second.words == [
        *("uv", "run", f"/data/{SATURATE.name}", *own),
        *("--num-shards", "2", "--shard-index", "1", "--", "--seed", "1"),
    ]
    script = hub.bucket_files("me/jobs-artifacts")
    assert set(script.values()) == {SATURATE.read_bytes()}
    assert "has 4 GPUs, of which the engine uses one" in ended.advice
    assert hub.token not in ended.stderr + ended.stdout
    for words in (f"hf jobs logs -f me/{first.id}", f"hf jobs wait me/{first.id} me/{second.id}", said["name"]):
        assert words in ended.stderr


def test_shards_without_blocks_need_no_job(hub: HubServer) -> None:
    ended, said = hand_out("--jobs", "400", "--dry-run", output="me/other")
    assert f"{400 - len(said['jobs'])} shards of 400 need no job" in ended.advice
    assert 0 < len(said["jobs"]) < 400


def test_the_same_command_submits_what_is_missing_and_leaves_alone_what_runs(hub: HubServer) -> None:
    hub.jobs.accepts = 2
    ended, said = hand_out("--jobs", "4", "--flavor", "a10g-small")
    assert ended.code == 1
    first, second = (job.id for job in hub.jobs.all)
    assert "shard 2 was not submitted" in ended.advice
    assert f"These run: me/{first} me/{second}. The same command submits the rest" in ended.advice
    assert [job["id"] for job in said["jobs"]] == [f"me/{first}", f"me/{second}", None, None]
    hub.jobs.accepts = 10
    # Another command on the same output would read the same pages: it is refused while these run.
    other, said = hand_out("--jobs", "3", "--flavor", "a10g-small")
    assert (other.code, said["jobs"]) == (2, [])
    assert "2 jobs of another command write to this output now" in other.advice
    ended, said = hand_out("--jobs", "4", "--flavor", "a10g-large")
    assert ended.code == 0, ended
    assert [(job["shard"], job["id"]) for job in said["running"]] == [(0, f"me/{first}"), (1, f"me/{second}")]
    assert [job["shard"] for job in said["jobs"]] == [2, 3]
    assert f"shard 0 runs already and is left alone: me/{first}" in ended.advice
    assert len(hub.jobs.all) == 4
    # A job that has ended without its blocks is submitted again.
    hub.jobs.all[3].stage = "ERROR"
    ended, said = hand_out("--jobs", "4", "--flavor", "a10g-small")
    assert "need no job" not in ended.stderr
    assert [job["shard"] for job in said["jobs"]] == [3]
    # One that somebody submitted by hand, and labelled so, is not meddled with either.
    for job in hub.jobs.all:
        job.labels.pop("shard")
    assert hand_out("--jobs", "4", "--flavor", "a10g-small")[0].code == 2


def test_a_network_that_fails_the_upload_of_the_script_is_told_with_what_runs(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = huggingface_hub.HfApi.run_uv_job

    def broken(api: Any, *words: Any, **settings: Any) -> Any:
        if hub.jobs.all:
            raise RuntimeError("Data processing error: connection reset")  # as hf_xet says it
        return submit(api, *words, **settings)

    monkeypatch.setattr("huggingface_hub.HfApi.run_uv_job", broken)
    ended, said = hand_out("--jobs", "2")
    assert ended.code == 1
    assert "shard 1 was not submitted: RuntimeError: Data processing error: connection reset" in said["message"]
    assert f"me/{hub.jobs.all[0].id}" in said["message"]


@pytest.mark.parametrize(("status", "advice"), [(403, "--jobs-namespace ORGANISATION"), (402, "add credit"), (500, "")])
def test_an_account_that_may_not_run_jobs_is_told_so(hub: HubServer, status: int, advice: str) -> None:
    hub.jobs.refuse(status, "not today")
    ended, said = hand_out("--jobs", "2")
    assert ended.code == 1
    assert advice in ended.advice
    assert "not today" in ended.advice
    assert "No job runs; the same command submits them" in said["message"]


def test_the_other_scripts_take_their_own_image_and_need_no_gpu_for_a_server_elsewhere(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [str(OFFLINE)])
    ended, said = hand_out("--jobs", "2", "--dry-run", script=OFFLINE)
    assert ended.code == 0, ended
    assert (said["image"], said["flavor"]) == ("vllm/vllm-openai:v0.32.0", "l4x1")
    assert said["estimate"]["pages_per_second"] == 0.33
    monkeypatch.setattr(sys, "argv", [str(SCRIPT)])
    ended, said = hand_out("--jobs", "2", "--dry-run", script=SCRIPT)
    assert (said["image"], said["flavor"]) == ("vllm/vllm-openai:v0.22.1", "l4x1")
    assert said["estimate"]["pages_per_second"] == 0.59
    monkeypatch.setenv("MY_KEY", "sesame")
    remote = ["--server", "https://gpu.example", "--api-key-env", "MY_KEY"]
    ended, said = hand_out("--jobs", "2", *remote, script=SCRIPT)
    assert ended.code == 0, ended
    assert (said["flavor"], said["estimate"]) == ("cpu-upgrade", None)
    assert hub.jobs.all[0].spec["secrets"] == {"HF_TOKEN": hub.token, "MY_KEY": "sesame"}
    assert "sesame" not in ended.stderr + ended.stdout


# --- inside of a job -------------------------------------------------------------------------------------------------


def test_a_job_says_what_pages_cost_and_warns_before_its_time_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("JOB_ID", "1"), ("LIGHTON_OCR_FLAVOR", "l4x1"), ("LIGHTON_OCR_TIMEOUT_S", "3")):
        monkeypatch.setenv(name, value)
    pages = write_pages(tmp_path / "pages.parquet", 16)
    with StubVllm("--read-tag", "--ceiling", "3") as stub:
        ended = run_here("--server", stub.url, "--model", DEFAULT_MODEL, pages, tmp_path / "out")
    assert ended.code == 0, ended
    assert ended.stderr.count("this job is stopped in") == 1
    assert "pages will be left. Closed blocks are kept and the same command goes on" in ended.advice
    assert (ended.line["flavor"], ended.line["dollars_per_hour"]) == ("l4x1", 0.8)
    assert ended.line["dollars"] == pytest.approx(ended.line["seconds"] * 0.8 / 3600, abs=1e-4)
    assert " per 1,000 pages; after" in ended.stderr
    card = (tmp_path / "out" / "README.md").read_text()
    assert "per 1,000 pages (l4x1, $0.80 an hour, prices of August 2026)" in card


# --- the header ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "image", "flavor", "timeout"),
    [
        (SCRIPT, find_profile("lightonai/LightOnOCR-2-1B").profile.image, "l4x1", "4h"),
        (SATURATE, find_profile("lightonai/LightOnOCR-3-0.8B").profile.image, "a10g-large", "12h"),
        (OFFLINE, "vllm/vllm-openai:v0.32.0", "l4x1", "4h"),
    ],
    ids=lambda value: value.stem if isinstance(value, Path) else None,
)
def test_the_real_cli_reads_the_header(script: Path, image: str, flavor: str, timeout: str) -> None:
    command = [str(Path(sys.executable).with_name("hf")), "jobs", "uv", "run", "--dry-run", str(script), "me/a", "me/b"]
    done = subprocess.run([*command, "--jobs", "2"], capture_output=True, text=True, check=True)
    found = dict(line.split(maxsplit=1) for line in done.stdout.splitlines() if line.startswith("  "))
    assert found["args"] == "me/a me/b --jobs 2"
    assert found["image"] == f"{image} (from script)"
    assert found["flavor"] == f"{flavor} (from script)"
    assert found["timeout"] == f"{timeout} (from script)"
    assert found["secrets"] == "HF_TOKEN=<not set> (from script)"
    assert found["env"] == "HF_HUB_DISABLE_PROGRESS_BARS=1 (from script)"
