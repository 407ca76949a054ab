"""The dataset card: the YAML that `load_dataset` needs, a section for each split of ours, and what people wrote."""

from __future__ import annotations

import datetime
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .blocks import DEFAULT_CONFIG, BlockFolder, BlockPlan, Target
from .result import STATUSES

CARD_BEGIN = "<!-- lighton-ocr {target}, {rows} rows: written by the script from here -->"
CARD_END = "<!-- lighton-ocr {target}: to here; text outside is kept -->"
OUR_SECTION = re.compile(
    r"<!-- lighton-ocr (?P<target>\S+), (?P<rows>\d+) rows: written by the script from here -->.*?"
    r"<!-- lighton-ocr (?P=target): to here; text outside is kept -->",
    re.DOTALL,
)
SIZES = ("1K", "10K", "100K", "1M", "10M", "100M", "1B", "10B", "100B", "1T")
ASKED_FIRST = ("model", "model_revision", "engine", "flavor", "date", "speed", "cost")  # what people look for first


@dataclass(frozen=True)
class CardContents:
    """What a card says of one split: where it comes from, how far it is, how it was made."""

    input_name: str
    plan: BlockPlan
    statuses: Mapping[str, int]
    facts: Mapping[str, Any]
    command: str
    tags: Sequence[str] = field(default=())


def card_text(earlier: str, contents: CardContents, written: str = "") -> str:
    """Return the card: `earlier`, with what the split needs in its YAML and with its section.

    `written` says when the last block was written: `load_dataset` caches a local folder with a card by what the card
    says alone (datasets 5.2), so that without it a finished output would load as the unfinished one loaded before.
    """
    from huggingface_hub import DatasetCardData

    target = contents.plan.target
    data, text = _taken_apart(earlier)
    described_by_people = "size_categories" in data and not OUR_SECTION.search(text)
    configs = _with_split(_listed(data.get("configs")), target)
    if written:
        ours = next(config for config in configs if config["config_name"] == target.config)
        ours["description"] = f"{sum(contents.statuses.values())} rows of {target.split}, the last written {written}"
    data["configs"] = configs
    data["tags"] = sorted({*map(str, _listed(data.get("tags"))), "ocr", "uv-script", *contents.tags})
    _forget_features(data, target)
    body = _with_section(text, target, _section(contents))
    if not described_by_people:
        data["size_categories"] = [size_category(sum(int(found["rows"]) for found in OUR_SECTION.finditer(body)))]
    return f"---\n{DatasetCardData(**data).to_yaml()}\n---\n\n{body.strip()}\n"


def has_section(card: str, target: Target) -> bool:
    """Whether a card speaks of this split already."""
    return any(found["target"] == _in_markers(target) for found in OUR_SECTION.finditer(card))


def size_category(rows: int) -> str:
    """Return the size of a dataset, as cards have it."""
    if rows < 1000:
        return "n<1K"
    power = min(len(str(rows)) - 4, len(SIZES) - 2)
    return f"{SIZES[power]}<n<{SIZES[power + 1]}"


def _taken_apart(card: str) -> tuple[dict[str, Any], str]:
    """Return (YAML, text) of a card; YAML that nobody can read stays, as text."""
    import yaml
    from huggingface_hub import DatasetCard

    if not card.startswith("---"):
        return {}, card
    try:
        parsed = DatasetCard(card, ignore_metadata_errors=True)
    except (yaml.YAMLError, ValueError):
        return {}, card
    return dict(parsed.data.to_dict()), str(parsed.text)  # type: ignore[no-untyped-call]


def _listed(value: Any) -> list[Any]:
    """Return what people wrote as a list: one entry need not be in one."""
    return value if isinstance(value, list) else [] if value is None else [value]


def _with_split(configs: Iterable[Mapping[str, Any]], target: Target) -> list[dict[str, Any]]:
    """Return the card's configurations with the split in its own; `default` stands first."""
    all_of_them = {str(config.get("config_name", DEFAULT_CONFIG)): dict(config) for config in configs}
    ours = all_of_them.setdefault(target.config, {"config_name": target.config})
    said = _listed(ours.get("data_files"))
    files = [file for file in said if isinstance(file, Mapping)]
    paths = [file for file in said if isinstance(file, str)]  # which are of the split `train`, as `datasets` reads it
    others = [file for file in [*files, *_in_train(paths)] if file.get("split") != target.split]
    ours["data_files"] = [*others, {"split": target.split, "path": target.pattern}]
    return sorted(all_of_them.values(), key=lambda config: config["config_name"] != DEFAULT_CONFIG)


def _in_train(paths: Sequence[str]) -> list[dict[str, Any]]:
    return [{"split": "train", "path": [*paths]}] if paths else []


def _forget_features(data: dict[str, Any], target: Target) -> None:
    """Drop what is said of our configuration's features: they stand in the files, an older run's would be wrong."""
    infos = [info for info in _listed(data.pop("dataset_info", None)) if isinstance(info, Mapping)]
    kept = [info for info in infos if info.get("config_name", DEFAULT_CONFIG) != target.config]
    if kept:
        data["dataset_info"] = kept


def _with_section(text: str, target: Target, section: str) -> str:
    """Put our section where it was, or at the end."""
    for found in OUR_SECTION.finditer(text):
        if found["target"] == _in_markers(target):
            return f"{text[: found.start()]}{section}{text[found.end() :]}"
    return f"{text.strip()}\n\n{section}".strip()


def _in_markers(target: Target) -> str:
    return f"{target.config}/{target.split}"


def _section(contents: CardContents) -> str:
    plan = contents.plan
    done = sum(contents.statuses.values())
    counts = ", ".join(f"{contents.statuses.get(status, 0)} {status}" for status in STATUSES)
    unfinished = f"\n**Unfinished**: {done} of {plan.num_rows} rows; the same command goes on.\n"
    known = {key: value for key, value in contents.facts.items() if value not in (None, "", [])}
    facts = sorted(known.items(), key=lambda fact: fact[0] not in ASKED_FIRST)
    rows = "\n".join(f"| {key} | {_cell(value)} |" for key, value in facts)
    begin, end = CARD_BEGIN, CARD_END
    return (
        f"{begin.format(target=_in_markers(plan.target), rows=done)}\n"
        f"# Text of {contents.input_name}\n{'' if done == plan.num_rows else unfinished}\n"
        f"The rows of split `{plan.target}`, in their order, with the text that was read from each page. "
        f"Source dataset: `{contents.input_name}`.\n\n"
        f"{done} rows: {counts}.\n\n| what | value |\n|---|---|\n{rows}\n\n```bash\n{contents.command}\n```\n"
        f"{end.format(target=_in_markers(plan.target))}"
    )


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(_cell, value))
    return str(value).replace("|", "\\|").replace("\n", " ")


def write_card(folder: Path, contents: CardContents) -> None:
    """Write the card beside the blocks of a folder; an existing card's own text is kept."""
    path = folder / "README.md"
    earlier = path.read_text(encoding="utf-8") if path.exists() else ""
    blocks = BlockFolder(folder, contents.plan.target)
    newest = max(blocks.path(number).stat().st_mtime for number in blocks.closed())
    written = datetime.datetime.fromtimestamp(newest, datetime.UTC).isoformat()
    half = path.with_name(f".{path.name}.{os.getpid()}.tmp")  # two shards may find that they were the last
    half.write_text(card_text(earlier, contents, written), encoding="utf-8")
    half.replace(path)
