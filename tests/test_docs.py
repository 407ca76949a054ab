"""What the docs say twice is generated: an edited cell, a stray number and an undocumented option are found."""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from src.flavors import FLAVORS, MEASURED, PRICES_OF
from tools.doc_numbers import find_numbers, known_numbers, normal, unknown_numbers
from tools.doc_options import PARSERS
from tools.doc_tables import dollars_per_1000_pages, make_tables, table
from tools.docs import PAGES, DocsError, fill_regions, find_regions, hand_written, main

ROOT = Path(__file__).parents[1]
CATALOGUE: dict[str, Any] = json.loads((ROOT / "models.json").read_text(encoding="utf-8"))
SCHEMA: dict[str, Any] = json.loads((ROOT / "models.schema.json").read_text(encoding="utf-8"))
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)


def walk(node: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], dict[str, Any]]]:
    """Every object of the catalogue, with the way to it."""
    if isinstance(node, dict):
        yield path, node
    for key, child in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        yield from walk(child, (*path, key))


def one_of_each_kind(of: Callable[[dict[str, Any]], bool]) -> list[tuple[str | int, ...]]:
    """Ways to objects, one for each shape of a way: `models / facts / licence` once, not once a model."""
    ways: dict[tuple[str, ...], tuple[str | int, ...]] = {}
    for path, node in walk(CATALOGUE):
        if of(node):
            ways.setdefault(tuple(str(step) for step in path if isinstance(step, str)), path)
    return list(ways.values())


def changed(path: tuple[str | int, ...], change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    catalogue = copy.deepcopy(CATALOGUE)
    node: Any = catalogue
    for step in path:
        node = node[step]
    change(node)
    return catalogue


# --- models.json ------------------------------------------------------------------------------------------------------


def test_the_catalogue_is_as_its_schema_says() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert [f"{list(error.path)}: {error.message}" for error in VALIDATOR.iter_errors(CATALOGUE)] == []
    assert (ROOT / CATALOGUE["$schema"]).resolve() == ROOT / "models.schema.json"


def test_a_wrong_or_missing_level_of_evidence_is_refused_everywhere() -> None:
    ways = one_of_each_kind(lambda node: "evidence" in node)
    assert len(ways) > 25
    for way in ways:
        assert not VALIDATOR.is_valid(changed(way, lambda node: node.update(evidence="probably"))), way
        assert not VALIDATOR.is_valid(changed(way, lambda node: node.pop("evidence"))), way


def test_an_unknown_key_is_refused_everywhere_but_where_names_are_free() -> None:
    free = {"chat_template_kwargs", "environment", "defaults"}
    for way in one_of_each_kind(lambda node: True):
        named_freely = free & set(map(str, way)) and way[-1] in ("value", "defaults")
        assert named_freely or not VALIDATOR.is_valid(changed(way, lambda node: node.update(stray=[1]))), way


def test_every_property_of_the_schema_says_what_it_is() -> None:
    for path, node in walk(SCHEMA):
        if len(path) > 1 and path[-2] == "properties" and path[-1] not in ("value", "model_id"):
            assert "description" in node or "$ref" in node, path


def test_what_was_measured_here_says_by_which_command_or_under_which_conditions() -> None:
    here = [node for path, node in walk(CATALOGUE) if node.get("evidence") == "measured here" and path[0] != "models"]
    assert len(here) > 15
    for fact in here:
        assert fact.get("command") or fact.get("conditions"), fact
        for path in re.findall(r"\b(?:bench|tests|tools)/\w+\.py", fact.get("command", "")):
            assert (ROOT / path).exists(), fact


def test_ids_are_unique_and_measured_speeds_are_of_models_and_flavours_that_there_are() -> None:
    ids = [node["id"] for _, node in walk(CATALOGUE) if "id" in node]
    flavors = [runner["flavor"] for runner in CATALOGUE["runners"]]
    models = [variant["model_id"] for family in CATALOGUE["models"] for variant in family["variants"]]
    for names in (ids, flavors, models):
        assert len(set(names)) == len(names)
    for row in CATALOGUE["throughput"]:
        assert row["flavor"] in flavors
        assert row["model"] in models


def test_flavours_and_measured_speeds_are_those_that_the_scripts_know() -> None:
    runners = [{name: runner[_KEYS.get(name, name)] for name in asdict(FLAVORS[0])} for runner in CATALOGUE["runners"]]
    assert runners == [asdict(flavor) for flavor in FLAVORS]
    speeds = [{name: row[_KEYS.get(name, name)] for name in asdict(MEASURED[0])} for row in CATALOGUE["throughput"]]
    assert speeds == [asdict(row) for row in MEASURED]
    assert {runner["date"] for runner in CATALOGUE["runners"]} == {f"{datetime.strptime(PRICES_OF, '%B %Y'):%Y-%m}"}


_KEYS = {"name": "flavor", "model_id": "model"}


# --- the scripts ------------------------------------------------------------------------------------------------------


def header(script: str) -> dict[str, Any]:
    """The PEP 723 metadata of a script."""
    match = re.search(r"(?m)^# /// script$\s(?P<content>(^#(| .*)$\s)+)^# ///$", (ROOT / script).read_text("utf-8"))
    assert match
    return tomllib.loads("".join(line[2:] or "\n" for line in match["content"].splitlines(keepends=True)))


def test_the_catalogue_has_every_script_at_the_top() -> None:
    assert [script["script"] for script in CATALOGUE["scripts"]] == list(PARSERS)
    assert set(PARSERS) == {path.name for path in ROOT.glob("*.py")}


@pytest.mark.parametrize("script", CATALOGUE["scripts"], ids=lambda script: script["script"])
def test_a_script_of_the_catalogue_is_as_its_header_and_its_parser_say(script: dict[str, Any]) -> None:
    metadata = header(script["script"])
    job = metadata.get("tool", {}).get("hf-jobs", {})
    assert script["python"] == f"Python {metadata['requires-python'].removeprefix('>=')} or newer"
    assert (script["image"], script["flavor"]) == (job.get("image"), job.get("flavor"))
    parser = PARSERS[script["script"]]()
    assert parser.prog == script["script"]
    assert script["model"] == parser.get_default("model")
    for flag, words in script["defaults"].items():
        (number,) = find_numbers(words)
        assert parser.get_default(flag.removeprefix("--").replace("-", "_")) == float(number.text), flag


def flags_of_help(script: str) -> set[str]:
    """The options that a script itself names in its help."""
    told = subprocess.run(
        [sys.executable, ROOT / script, "--help"], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    lines = re.findall(r"(?m)^  (-.*?)(?:  |$)", told)
    return {flag for line in lines for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]*", line)} - {"--help"}


@pytest.mark.parametrize("script", PARSERS)
def test_every_option_that_a_script_takes_is_documented_and_no_other(script: str) -> None:
    page = (ROOT / "OPTIONS.md").read_text(encoding="utf-8")
    section = page.partition(f"## `{script}`\n")[2].partition("\n## ")[0]
    documented = set(re.findall(r"`(--[a-z][a-z-]*)", "\n".join(re.findall(r"(?m)^\| ([^|]*) \|", section))))
    assert flags_of_help(script) == documented
    assert len(documented) >= 4


def test_the_options_page_says_what_an_option_takes_its_default_and_its_meaning() -> None:
    page = (ROOT / "OPTIONS.md").read_text(encoding="utf-8")
    assert "| `--block-rows N` | 256 | rows a block file; a killed run asks again" in page
    assert "| `--split NAME` | the only one, or train | split to read |" in page
    assert "| `--mode {text,grounding}` | text | text, or grounding" in page
    assert "| `--skip-blank`, `--no-skip-blank` | yes | pages without ink" in page
    assert "| `--port PORT` | 8000 | port to listen on, 0 for a free one |" in page
    assert "| `--json [PATH]` | no | write the numbers as JSON" in page
    assert "%(default)s" not in page
    assert "%%" not in page


# --- tables -----------------------------------------------------------------------------------------------------------


def test_each_table_has_everything_that_it_is_about() -> None:
    tables = make_tables(CATALOGUE)
    for family in CATALOGUE["models"]:
        assert f"`{family['variants'][0]['model_id']}`" in tables["models"]
        assert family["scores"]["olmocr_bench"]["value"] in tables["models"]
        assert family["facts"]["image_tag"]["value"] in tables["models"]
        for variant in family["variants"]:
            assert f"`{variant['model_id']}`" in tables["variants"]
            assert f"`{variant['model_id']}` | {variant['about']['value']}" in tables["variants"]
        assert f"`{family['variants'][0]['model_id']}` | the model itself |" in tables["variants"]
        for fact in family["facts"]["serve_args"]:
            assert fact["value"][0] in tables["serve-args"]
        for bad in family["facts"]["known_bad_engines"]:
            assert bad["value"]["reason"] in tables["known-bad"]
    for name, key in (("runners", "flavor"), ("scripts", "script"), ("throughput", "flavor"), ("platforms", "name")):
        assert len(tables[name].splitlines()) == 2 + len(CATALOGUE[name])
        assert all(item[key] in tables[name] for item in CATALOGUE[name])
    for gauge in CATALOGUE["engines"]["gauges"]:
        assert f"`{gauge['name']}`" in tables["gauges"]
    for row in CATALOGUE["surveyed"]["models"]:
        assert row["model"] in tables["survey"]
    for fact in CATALOGUE["measurements"]:
        assert f"| {fact['what']} |" in tables[f"measured-{fact['group']}"]
        assert fact["evidence"] in tables[f"measured-{fact['group']}"]
    for platform in CATALOGUE["platforms"]:
        assert all(fact["value"] in tables[f"platform-{platform['id']}"] for fact in platform["caveats"])


def test_every_table_stands_in_some_page_but_those_that_only_vouch_for_prose() -> None:
    pages = "".join((ROOT / name).read_text(encoding="utf-8") for name in (*PAGES, "OPTIONS.md"))
    shown = {name for name, text in make_tables(CATALOGUE).items() if text in pages}
    assert set(make_tables(CATALOGUE)) - shown <= {"measured-here", "measured-router"}


def test_a_thousand_pages_cost_the_seconds_that_they_take() -> None:
    row = {"flavor": "l4x1", "pages_per_s": 0.5}
    assert dollars_per_1000_pages({"runners": [{"flavor": "l4x1", "dollars_per_hour": 1.8}]}, row) == pytest.approx(1.0)


def test_a_cell_keeps_bars_and_angle_brackets_and_an_empty_column_is_left_out() -> None:
    text = table(["a", "b", "c"], [["x | y", "", "<z>"], ["`<z>`", "", "1"]])
    assert text.splitlines() == ["| a | c |", "|---|---|", r"| x \| y | &lt;z> |", "| `<z>` | 1 |"]


# --- regions ----------------------------------------------------------------------------------------------------------

PAGE = "# A\n\n<!-- generated: one -->\nold\n<!-- /generated -->\n\nend\n"


def test_a_region_is_filled_and_the_rest_of_the_page_is_left_alone() -> None:
    filled = fill_regions("A.md", PAGE, {"one": "| new |\n|---|"})
    assert filled == PAGE.replace("old", "\n| new |\n|---|\n")
    assert fill_regions("A.md", filled, {"one": "| new |\n|---|"}) == filled
    assert hand_written("A.md", PAGE) == PAGE.replace("old", "")


@pytest.mark.parametrize(
    ("page", "line", "what"),
    [
        (PAGE.replace("one", "onne"), 3, "no table is called 'onne'. Is 'one' meant?"),
        (PAGE.replace("<!-- /generated -->", ""), 3, "'one' is not closed"),
        (PAGE.replace("old", "<!-- generated: one -->"), 4, "begins inside of 'one'"),
        (PAGE.replace("end", "<!-- /generated -->"), 7, "ends that was not opened"),
        (PAGE.replace("end", "a <!-- generated: one -->"), 7, "must stand alone"),
    ],
)
def test_a_region_that_is_unknown_or_not_closed_is_refused_with_its_line(page: str, line: int, what: str) -> None:
    with pytest.raises(DocsError, match=re.escape(what)) as caught:
        fill_regions("A.md", page, {"one": "x"})
    assert str(caught.value).startswith(f"A.md:{line}: ")


# --- numbers ----------------------------------------------------------------------------------------------------------

KNOWN = known_numbers(
    {
        "a": [{"vllm": "0.30.0"}, {"share": 0.8}],
        "b": ["--max-model-len", 8192],
        "c": "up to 1,024 pages a batch, in 5 minutes; 24 to 32 GB cost $3, or 7 %. Batches of 16",
        "command": "python bench/x.py --pages 99 pages",
    }
)


@pytest.mark.parametrize(
    "prose",
    [
        *("a share of 0.80", "1024 pages", "the 1,024 of the pages", "batches of 16 in 5 minutes", "5\nminutes"),
        *(
            "24 GB",
            "32 GB",
            "between 24 and 32 GB",
            "for $3",
            "7 %",
            "7% of it",
            "vLLM 0.30.0",
            "a max-model-len of 8192",
        ),
        *(
            "LightOnOCR-3-0.8B and A100, x86-64, v9.9, H100s",
            "`99` and ``9 ` 9``",
            "[text](a/99.md)",
            "see http://a/99",
        ),
        *("```\n99\n```", "  ~~~~\n  99\n  ~~~\n  ~~~~", "<!-- 99 -->", "## 9. Title", "3. third", "eight pages"),
        *("exit code 130 or 143", "exit codes 0, 1 and 2", "429 and 5xx"),
    ],
)
def test_known_numbers_names_code_links_and_what_is_exempt_pass(prose: str) -> None:
    assert unknown_numbers(prose, KNOWN) == []


@pytest.mark.parametrize(
    ("prose", "found"),
    [
        ("a share of 0.81", "'0.81' after 'share'"),
        ("1,025 pages", "'1,025' before 'pages'"),
        ("24 pages", "'24' before 'pages'"),
        ("vLLM 0.30.1", "'0.30.1' after 'vllm'"),
        ("transformers 0.30.0", "'0.30.0' after 'transformers'"),
        ("wait 5 hours", "'5' after 'wait' or before 'hours'"),
        ("99 pages, `code`", "'99' before 'pages'"),
        ("[99 pages](24)", "'99' before 'pages'"),
        ("it took 2.9k", "'2.9' after 'took' or before 'k'"),
        ("429 pages", "'429' before 'pages'"),
        ("these pages. 1024", "'1024'"),
        ("pages | 1024 | pages", "'1024'"),
        ("(99)", "'99'"),
        ("```\n24\n```\n25 GB", "'25' before 'gb'"),
    ],
)
def test_a_number_that_nothing_vouches_for_is_found(prose: str, found: str) -> None:
    (number,) = unknown_numbers(prose, KNOWN)
    assert (str(number), number.line) == (found, prose.count("\n") + 1)


def test_a_number_has_one_spelling() -> None:
    assert normal("1,024") == normal("1024") == "1024"
    assert normal("0.80") == normal("0.8") == "0.8"
    assert normal("0.32.0") == "0.32.0"


# --- the tool ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    for name in ("models.json", "OPTIONS.md", *PAGES):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def check(root: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = main(["--check", "--root", str(root)])
    return code, capsys.readouterr().err


def edit(page: Path, old: str, new: str) -> None:
    text = page.read_text(encoding="utf-8")
    assert old in text
    page.write_text(text.replace(old, new, 1), encoding="utf-8")


def test_the_docs_are_up_to_date(docs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(docs, capsys) == (0, "")


def test_the_tool_runs_by_its_path_from_anywhere(tmp_path: Path) -> None:
    subprocess.run([sys.executable, ROOT / "tools/docs.py", "--check"], cwd=tmp_path, check=True, timeout=60)


@pytest.mark.parametrize(
    ("page", "old", "new"),
    [
        ("README.md", "| 83.2 ± 0.9 |", "| 93.2 ± 0.9 |"),
        ("README.md", "| `l4x1` | L4 | 0.80 |", "| `l4x1` | L4 | 0.40 |"),
        ("OPTIONS.md", "| `--block-rows N` | 256 |", "| `--block-rows N` | 512 |"),
    ],
)
def test_an_edited_cell_is_found_shown_and_put_right(
    page: str, old: str, new: str, docs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (docs / page).read_text(encoding="utf-8")
    edit(docs / page, old, new)
    code, told = check(docs, capsys)
    assert code == 1
    assert re.search(rf"(?m)^-.*{re.escape(new)}", told)
    assert re.search(rf"(?m)^\+.*{re.escape(old)}", told)
    assert f"{page} is out of date: run `python tools/docs.py`" in told
    assert main(["--root", str(docs)]) == 0
    assert (docs / page).read_text(encoding="utf-8") == before


def test_a_fact_that_changes_in_models_json_is_missed_in_the_docs(
    docs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(docs / "models.json", '"pages_per_s": 7.2', '"pages_per_s": 8.1')
    code, told = check(docs, capsys)
    assert code == 1
    assert "+| `a100-large` | A100 | 2.50 | LightOnOCR-3-0.8B | 8.1 |" in told


@pytest.mark.parametrize("name", PAGES)
def test_every_number_in_prose_is_missed_when_it_is_edited(name: str) -> None:
    known = known_numbers(CATALOGUE)
    page = hand_written(name, (ROOT / name).read_text(encoding="utf-8"))
    numbers = unknown_numbers(page, frozenset())
    assert len(numbers) >= 5
    for number in numbers:
        for edited in (number.text + "1", number.text[:-1] + str((int(number.text[-1]) + 1) % 10)):
            lines = page.splitlines()
            line = re.sub(rf"(?<![\w.,-]){re.escape(number.text)}(?![\w.]*\w)", edited, lines[number.line - 1])
            assert line != lines[number.line - 1], number
            lines[number.line - 1] = line
            assert [found.text for found in unknown_numbers("\n".join(lines), known)] == [edited], number


def test_a_number_edited_in_prose_fails_the_check_with_its_line(docs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit(docs / "README.md", "blocks of 256 rows", "blocks of 257 rows")
    code, told = check(docs, capsys)
    assert code == 1
    assert re.match(r"README\.md:\d+: models\.json has no '257' after 'blocks' or before 'rows'\. Correct it", told)


def test_a_region_of_an_unknown_name_fails_the_check(docs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit(docs / "README.md", "<!-- generated: models -->", "<!-- generated: modles -->")
    code, told = check(docs, capsys)
    assert code == 1
    assert re.match(r"README\.md:\d+: no table is called 'modles'\. Is 'models' meant\?", told)


def test_the_names_of_the_tables_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    names = capsys.readouterr().out.split()
    assert {"models", "scripts", "platform-ascend", "measured-transport"} <= set(names)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert {region.name for region in find_regions("README.md", readme)} <= set(names)
