"""The output: where it goes, and its card."""

from __future__ import annotations

import datetime
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .blocks import DEFAULT_CONFIG, BlockFolder, BlockPlan, Target
from .errors import PublishError, UsageError, network_errors
from .patience import Patience
from .result import STATUSES

CARD_RETRY_S = 300.0
CARD_BEGIN = "<!-- lighton-ocr: written by the script from here -->"
CARD_END = "<!-- lighton-ocr: to here; text outside is kept -->"
REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


@dataclass(frozen=True)
class Output:
    """Where a run writes: `folder` holds the blocks; `repo_id` is the Hub dataset they are published to, if any."""

    folder: Path
    repo_id: str | None = None

    def __str__(self) -> str:
        return self.repo_id or str(self.folder)


def choose_output(name: str, work_dir: str | None) -> Output:
    """Tell a local folder from a Hub id: `namespace/name` is a Hub id unless a folder `namespace` is here."""
    path = Path(name).expanduser()
    if REPO_ID.fullmatch(name) and not path.exists() and not path.parent.is_dir():
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lighton-ocr"
        return Output(Path(work_dir) if work_dir else cache / name.replace("/", "--"), repo_id=name)
    if path.exists() and not path.is_dir():
        raise UsageError(f"output {name!r} is a file; name a folder, or a Hub dataset id (namespace/name)")
    if work_dir:
        raise UsageError(f"--work-dir is for Hub outputs; {name!r} is a local folder and holds its blocks itself")
    return Output(path)


def check_output_is_apart(output: Output, input_name: str) -> None:
    """Raise `UsageError` where input and output are, or contain, each other: a run must never read what it writes."""
    if output.repo_id and output.repo_id == input_name:
        raise UsageError(f"input and output are both {input_name!r}; name another output")
    source = Path(input_name).expanduser()
    if not source.exists():
        return
    here, there = output.folder.resolve(), source.resolve()
    if here == there or here.is_relative_to(there) or (there.is_relative_to(here) and there.is_dir()):
        raise UsageError(
            f"output {str(output.folder)!r} and input {input_name!r} overlap; name an output beside the input"
        )


def card_text(
    earlier: str,
    *,
    input_name: str,
    plan: BlockPlan,
    statuses: Mapping[str, int] | None,
    facts: Mapping[str, Any],
    command: str,
    written: str = "",
) -> str:
    """Return the dataset card: the YAML that `load_dataset` needs, what happened, and what people wrote before.

    `statuses` is None while blocks come in that nobody has counted yet. `written` says when the last block was written:
    `load_dataset` caches a local folder with a card by what the card says alone (datasets 5.2), so that without it a
    finished output would load as the unfinished one loaded before.
    """
    from huggingface_hub import DatasetCard, DatasetCardData

    data: dict[str, Any] = {}
    people_wrote = earlier
    if earlier.startswith("---"):
        card = DatasetCard(earlier, ignore_metadata_errors=True)
        data, people_wrote = dict(card.data.to_dict()), card.text  # type: ignore[no-untyped-call]
    data["configs"] = _with_split(data.get("configs") or [], plan.target)
    if written and statuses is not None:
        ours = next(config for config in data["configs"] if config["config_name"] == plan.target.config)
        ours["description"] = f"{sum(statuses.values())} rows of {plan.target.split}, the last written {written}"
    data["tags"] = sorted({*(data.get("tags") or []), "ocr", "uv-script"})
    data.pop("dataset_info", None)  # the features stand in the parquet files; an older run's would be wrong
    body = _with_section(people_wrote, _section(input_name, plan, statuses, facts, command))
    return f"---\n{DatasetCardData(**data).to_yaml()}\n---\n\n{body.strip()}\n"


def names_split(card: str, target: Target) -> bool:
    """Whether the YAML of a card says already where the files of a split lie."""
    from huggingface_hub import DatasetCard

    if not card.startswith("---"):
        return False
    data = DatasetCard(card, ignore_metadata_errors=True).data.to_dict()  # type: ignore[no-untyped-call]
    configs = [config for config in data.get("configs") or [] if config.get("config_name") == target.config]
    files = [file for config in configs for file in config.get("data_files") or [] if isinstance(file, dict)]
    return any(file.get("split") == target.split for file in files)


def _with_split(configs: Iterable[Mapping[str, Any]], target: Target) -> list[dict[str, Any]]:
    """Return the card's configurations with the split in its own; `default` stands first."""
    all_of_them = {str(config.get("config_name")): dict(config) for config in configs}
    ours = all_of_them.setdefault(target.config, {"config_name": target.config})
    files = [file for file in ours.get("data_files") or [] if isinstance(file, dict)]
    others = [file for file in files if file.get("split") != target.split]
    ours["data_files"] = [*others, {"split": target.split, "path": target.pattern}]
    return sorted(all_of_them.values(), key=lambda config: config["config_name"] != DEFAULT_CONFIG)


def _with_section(text: str, section: str) -> str:
    """Put our section where it was, or at the end."""
    before, begin, rest = text.partition(CARD_BEGIN)
    after = rest.partition(CARD_END)[2] if begin else ""
    return f"{before.strip()}\n\n{section}\n\n{after.strip()}".strip()


def _section(
    input_name: str, plan: BlockPlan, statuses: Mapping[str, int] | None, facts: Mapping[str, Any], command: str
) -> str:
    state, counted = _how_far(plan, statuses)
    rows = "\n".join(f"| {key} | {_cell(value)} |" for key, value in facts.items() if value not in (None, ""))
    return (
        f"{CARD_BEGIN}\n# Text of {input_name}\n{state}\n"
        f"The rows of split `{plan.target}`, in their order, with the text that was read from each page.\n\n"
        f"{counted}| | |\n|---|---|\n{rows}\n\n```bash\n{command}\n```\n{CARD_END}"
    )


def _how_far(plan: BlockPlan, statuses: Mapping[str, int] | None) -> tuple[str, str]:
    """Say what is missing yet, and what is there."""
    if statuses is None:
        return f"\n**Unfinished**: blocks come in as they close, until there are {plan.num_rows} rows.\n", ""
    done = sum(statuses.values())
    counts = ", ".join(f"{statuses.get(status, 0)} {status}" for status in STATUSES)
    unfinished = f"\n**Unfinished**: {done} of {plan.num_rows} rows; the same command goes on.\n"
    return "" if done == plan.num_rows else unfinished, f"{done} rows: {counts}.\n\n"


def _cell(value: object) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")


def write_card(output: Output, **contents: Any) -> None:
    """Write the card beside the blocks; an existing card's own text is kept."""
    path = output.folder / "README.md"
    earlier = path.read_text(encoding="utf-8") if path.exists() else ""
    folder = BlockFolder(output.folder, contents["plan"].target)
    newest = max(folder.path(number).stat().st_mtime for number in folder.closed())
    written = datetime.datetime.fromtimestamp(newest, datetime.UTC).isoformat()
    half = path.with_name(f".{path.name}.{os.getpid()}.tmp")  # two shards may find that they were the last
    half.write_text(card_text(earlier, written=written, **contents), encoding="utf-8")
    half.replace(path)


def read_card(repo_id: str) -> tuple[str, str]:
    """Return (commit, card) of a Hub dataset as it is now; the card is empty where there is none."""
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    commit = str(HfApi().dataset_info(repo_id).sha)
    try:
        path = hf_hub_download(repo_id, "README.md", repo_type="dataset", revision=commit)
    except EntryNotFoundError:
        return commit, ""
    return commit, Path(path).read_text(encoding="utf-8")


def publish_card(output: Output, **contents: Any) -> None:
    """Write the card of a Hub dataset whose blocks are there already; what people wrote in it is kept."""
    assert output.repo_id is not None
    repo_id = output.repo_id

    def write_it() -> None:
        from huggingface_hub import CommitOperationAdd, HfApi

        commit, earlier = read_card(repo_id)
        text = card_text(earlier, **contents)
        if text != earlier:
            addition = CommitOperationAdd("README.md", text.encode())
            # upon the card that was read: another run's would be lost
            HfApi().create_commit(repo_id, [addition], repo_type="dataset", commit_message="Card", parent_commit=commit)

    try:
        Patience(CARD_RETRY_S).call(write_it, f"writing the card of {repo_id}")
    except network_errors() as error:
        raise PublishError(
            f"the blocks are in {repo_id}, but its card could not be written: {error}. "
            "The same command with --finish writes it"
        ) from error
