"""What `--jobs` submits: which shards, with which words, labels, variables and secrets. Nothing is sent from here."""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from .errors import UsageError
from .estimate import Estimate, timeout_words
from .flavors import Flavor
from .hosted import FLAVOR_VARIABLE, TIMEOUT_VARIABLE
from .options import CommonOptions

if TYPE_CHECKING:
    from huggingface_hub import JobInfo

JOBS_GROUP = "jobs"
DEFAULT_ATTEMPTS = 3
LONGEST_LABEL = 100
TRAVEL = ("--canary-page", "--canary-text")  # options whose files are meant to come along
READ_AS_FILES = (".py", ".sh", ".yaml", ".yml", ".toml")  # `run_uv_job` insists that such words are files here


@dataclass(frozen=True)
class Hosting:
    """What a script knows of itself as a job. `shape` is "server" or "offline", "" where no stored speed fits.

    `image` is None where the plain one of `uv` will do. `key_variables` name secrets beside the token.
    """

    image: str | None
    flavor: str
    shape: str
    needs_gpu: bool = True
    key_variables: tuple[str, ...] = ()


@dataclass(frozen=True)
class ShardJob:
    """One job: its shard, the pages that are left in it, and the words after the script."""

    index: int
    count: int
    pages: int
    words: tuple[str, ...]

    @property
    def label(self) -> str:
        """The shard, as a label says it."""
        return f"{self.index}-of-{self.count}"


@dataclass(frozen=True)
class Submission:
    """All that is submitted. `secrets` are values, never shown; `jobs` are neither done nor among the `running`."""

    script: Path
    name: str
    image: str | None
    flavor: Flavor
    timeout_s: int
    attempts: int
    namespace: str | None
    labels: Mapping[str, str]
    secrets: Mapping[str, str] = field(repr=False)
    shape: str
    jobs: tuple[ShardJob, ...]
    running: Mapping[int, JobInfo]  # by shard
    estimate: Estimate | None

    @property
    def environment(self) -> dict[str, str]:
        """What a job is told about itself: its flavour, and when it is stopped; bars would fill its log."""
        return {
            FLAVOR_VARIABLE: self.flavor.name,
            TIMEOUT_VARIABLE: str(self.timeout_s),
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        }

    def labels_of(self, job: ShardJob) -> dict[str, str]:
        """Return the labels of one job."""
        return {**self.labels, "shard": job.label}

    def lines(self) -> list[str]:
        """Say to people what is submitted."""
        return [
            f"{plural(len(self.jobs), 'job')} named {self.name}, image {self.image or 'of uv'}, on {self.flavor}",
            f"each is stopped after {timeout_words(self.timeout_s)} and started {self.attempts} times at most; "
            f"secrets: {', '.join(self.secrets) or 'none'}",
            f"labels: {', '.join(f'{key}={value}' for key, value in self.labels.items())}",
            *(
                f"  shard {job.index} of {job.count}, {plural(job.pages, 'page')}: "
                f"{shlex.join(['uv', 'run', self.script.name, *job.words])}"
                for job in self.jobs
            ),
        ]


def plural(count: int, noun: str) -> str:
    """Return `1 job`, `4 jobs`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def own_words(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the user's words without the options of --jobs: those before `--`, and those from there on."""
    words = list(argv)
    place = words.index("--") if "--" in words else len(words)
    own = iter(words[:place])
    kinds = {f"--{item.name.replace('_', '-')}": item.type for item in _jobs_options()}
    kept: list[str] = []
    for word in own:
        flag, equals, _ = word.partition("=")
        if flag not in kinds:
            kept.append(word)
        elif not equals and kinds[flag] != "bool":
            next(own, None)  # its value
    return kept, words[place:]


def stray_options(options: CommonOptions) -> list[str]:
    """Return the options that were given and mean nothing without --jobs."""
    given = [item.name for item in _jobs_options() if item.name != "jobs" and getattr(options, item.name)]
    return [f"--{name.replace('_', '-')}" for name in given]


def _jobs_options() -> list[Field[Any]]:
    return [item for item in fields(CommonOptions) if item.metadata.get("group") == JOBS_GROUP]


def words_of_shard(argv: Sequence[str], index: int, count: int) -> tuple[str, ...]:
    """Return the words of one job: the user's own, and which shard it is."""
    own, rest = own_words(argv)
    shard = ["--num-shards", str(count), "--shard-index", str(index)] if count > 1 else []
    return (*own, *shard, *rest)


def check_words(words: Sequence[str], here: Path) -> None:
    """Refuse words that `run_uv_job` would take for files: it uploads them, and puts other paths in their place."""
    before = ""
    for word in words:
        is_file = _is_file(here / word)
        if is_file and before not in TRAVEL:
            raise UsageError(
                f"--jobs: {word!r} is also a file here, and would be uploaded and replaced by its path there; "
                f"run the command from another folder, or write {before or '--option'}={word}"
            )
        if not is_file and PurePath(word).suffix in READ_AS_FILES:
            raise UsageError(
                f"--jobs: {word!r} looks like a file, and there is none: a job has only the script itself and the "
                "files of --canary-page and --canary-text; leave it out, or start that job with `hf jobs uv run`"
            )
        before = word


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError as error:  # a word longer than the name of a file may be
        raise UsageError(
            f"--jobs: {path.name[:40]!r}… can't be handed to a job: {error.strerror}; leave it out, or make it shorter"
        ) from error


def job_name(script: str, words: Sequence[str], count: int) -> str:
    """Name a command's jobs: the same for the same command, so that those that run are found again."""
    digest = hashlib.sha256("\0".join([script, str(count), *words]).encode()).hexdigest()[:8]
    return f"{label_text(PurePath(script).stem)}-{digest}"


def label_text(text: str) -> str:
    """Return the text as a label may hold it: letters, digits, dashes and underscores, a hundred at most."""
    return re.sub(r"[^A-Za-z0-9_-]", "-", text)[:LONGEST_LABEL]
