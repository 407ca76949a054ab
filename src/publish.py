"""The output: where it goes, and the one commit that makes a finished split of a Hub dataset visible."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .blocks import Whole
from .card import has_section
from .errors import PublishError, UsageError, network_errors
from .hf_paths import HUB_SCHEME, HubPath, is_pattern, parse_hub_path
from .patience import Patience
from .work_ref import MAIN, Destination, WorkRef

PUBLISH_FOR_S = 1800.0
REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
BRANCH = re.compile(r"(?!refs/|.*(//|\.\.|@\{|\.lock$|/$))[A-Za-z0-9_][\w./@+-]*")
COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class Output:
    """Where a run writes: `folder` holds the blocks; `repo_id` is the Hub dataset they are published to, if any.

    Of that, `revision` is the branch they go to; `create_pr` asks for a pull request instead. `bucket` is the place in
    a bucket, if they go there.
    """

    folder: Path
    repo_id: str | None = None
    revision: str = MAIN
    create_pr: bool = False
    bucket: HubPath | None = None

    def __str__(self) -> str:
        return self.repo_id or str(self.bucket or self.folder)

    @property
    def on_hub(self) -> str | None:
        """The dataset or bucket that it goes to; None for a local folder."""
        return self.bucket.repo_id if self.bucket else self.repo_id


def choose_output(name: str, work_dir: str | None, revision: str | None = None, create_pr: bool = False) -> Output:
    """Tell a local folder from a Hub id: `namespace/name` is a Hub id unless a folder `namespace` is here."""
    path = Path(name).expanduser()
    if name.startswith(HUB_SCHEME):
        return _hub_output(name, work_dir, revision, create_pr)
    if REPO_ID.fullmatch(name) and not path.exists() and not path.parent.is_dir():
        _check_revision(revision, create_pr)
        at = "--pr" if create_pr else f"--at--{revision.replace('/', '--')}" if revision not in (None, MAIN) else ""
        return Output(_staging(work_dir, f"{name}{at}"), name, revision or MAIN, create_pr)
    if path.exists() and not path.is_dir():
        raise UsageError(f"output {name!r} is a file; name a folder, or a Hub dataset id (namespace/name)")
    for flag, given in {"--work-dir": work_dir, "--output-revision": revision, "--create-pr": create_pr}.items():
        if given:
            raise UsageError(f"{flag} is for Hub outputs; {name!r} is a local folder and holds its blocks itself")
    return Output(path)


def _staging(work_dir: str | None, name: str) -> Path:
    """Where blocks wait for their upload."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lighton-ocr"
    return Path(work_dir) if work_dir else cache / name.replace("/", "--")


def _hub_output(name: str, work_dir: str | None, revision: str | None, create_pr: bool) -> Output:
    """Read an `hf://` address of an output: a dataset, at a branch or not, or a folder of a bucket."""
    at = parse_hub_path(name, what="output")
    assert at is not None
    if not at.is_bucket:
        if at.path:
            raise UsageError(f"output {name!r}: blocks of a dataset lie where its card says; leave /{at.path} out")
        if revision is not None and at.revision not in (None, revision):
            raise UsageError(
                f"output {name!r} is at {at.revision!r}, but --output-revision is {revision!r}; give one of them"
            )
        return choose_output(at.repo_id, work_dir, at.revision or revision, create_pr)
    for flag, given in {"--output-revision": revision, "--create-pr": create_pr}.items():
        if given:
            raise UsageError(
                f"{flag}: a bucket has neither branches nor pull requests; leave it out, or name a dataset"
            )
    if is_pattern(at.path):
        raise UsageError(f"output {name!r} is a pattern; name a folder of the bucket")
    return Output(_staging(work_dir, str(at).removeprefix(HUB_SCHEME)), bucket=at)


def _check_revision(revision: str | None, create_pr: bool) -> None:
    if revision is None:
        return
    if create_pr:
        raise UsageError("--create-pr goes to main; leave --output-revision out")
    if COMMIT.fullmatch(revision) or not BRANCH.fullmatch(revision):
        raise UsageError(
            f"--output-revision {revision!r} is no name of a branch; name one (it is created from main if missing), or "
            "open a pull request with --create-pr"
        )


def check_output_is_apart(output: Output, input_name: str) -> None:
    """Raise `UsageError` where input and output are, or contain, each other: a run must never read what it writes."""
    if output.repo_id and output.repo_id == input_name:
        raise UsageError(f"input and output are both {input_name!r}; name another output")
    source = Path(input_name).expanduser()
    if not source.exists():
        read, written = parse_hub_path(input_name), output.bucket
        if output.repo_id:
            written = HubPath("datasets", output.repo_id)
        if read and written and read.overlaps(written):
            raise UsageError(f"input {input_name!r} and output '{output}' overlap; name another output")
        return
    here, there = output.folder.resolve(), source.resolve()
    if here == there or here.is_relative_to(there) or (there.is_relative_to(here) and there.is_dir()):
        raise UsageError(
            f"output {str(output.folder)!r} and input {input_name!r} overlap; name an output beside the input"
        )


@dataclass(frozen=True)
class RemoteBlock:
    """A block's file on the Hub: how many bytes, and the name of its content."""

    size: int
    oid: str


@dataclass(frozen=True)
class Published:
    """What readers see: at which commit, and the content of each block there; `source` is what that was copied of."""

    commit: str
    source: str
    oids: Mapping[int, str]


def blocks_at(place: Destination, revision: str) -> dict[int, RemoteBlock]:
    """Return the blocks of a split at a revision; none where there is no such dataset, revision or folder."""
    from huggingface_hub import HfApi, RepoFile
    from huggingface_hub.errors import EntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError

    found: dict[int, RemoteBlock] = {}
    try:
        tree = HfApi().list_repo_tree(place.repo_id, place.target.folder, revision=revision, repo_type="dataset")
        for entry in tree:
            number = place.target.block_number(entry.path)
            if number is not None and isinstance(entry, RepoFile):
                found[number] = RemoteBlock(entry.size, entry.lfs.sha256 if entry.lfs else entry.blob_id)
    except (RepositoryNotFoundError, RevisionNotFoundError, EntryNotFoundError):
        return {}
    return found


def card_at(repo_id: str, revision: str) -> str:
    """Return the card of a Hub dataset at a revision; nothing where there is none."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import LocalEntryNotFoundError, RemoteEntryNotFoundError

    try:
        path = hf_hub_download(repo_id, "README.md", repo_type="dataset", revision=revision)
    except RemoteEntryNotFoundError:
        return ""
    except LocalEntryNotFoundError as error:  # the Hub did not answer: that is no word about the card
        raise ConnectionError(f"the card of {repo_id} can't be read: {error.__cause__ or error}") from error
    return Path(path).read_text(encoding="utf-8")


def publish(place: Destination, work: WorkRef, whole: Whole, kept: str) -> Published:
    """Make the collected blocks, and the card, visible in one commit; return what readers then see.

    It is made upon the head that was looked at: where another run publishes in the same moment, another split or
    configuration, the Hub refuses it, and it is made anew upon that run's. Done already, it does nothing.
    """
    if whole.rows != whole.plan.num_rows:
        raise PublishError(
            f"the blocks of {place} hold {whole.rows} rows, and {whole.plan.num_rows} are wanted; nothing is "
            "published. Start anew with --overwrite"
        )
    try:
        return Patience(PUBLISH_FOR_S).call(lambda: _commit_what_is_new(place, work, whole), f"publishing to {place}")
    except network_errors() as error:
        raise PublishError(f"publishing to {place} failed: {error}. {kept}") from error


def _commit_what_is_new(place: Destination, work: WorkRef, whole: Whole) -> Published:
    from huggingface_hub.errors import EntryNotFoundError, RevisionNotFoundError

    try:
        return _commit_what_differs(place, work, whole)
    except (EntryNotFoundError, RevisionNotFoundError):  # another shard has just published, and put the work ref away
        return _commit_what_differs(place, work, whole)


def _commit_what_differs(place: Destination, work: WorkRef, whole: Whole) -> Published:
    from huggingface_hub import CommitOperationAdd, CommitOperationCopy, CommitOperationDelete, HfApi

    api = HfApi()
    collected, branch = work.find(), work.publish_to()
    head = str(api.dataset_info(place.repo_id, revision=branch).sha)
    there = blocks_at(place, head)
    # pinned, for a shard that asks again about failed rows may go on collecting
    source = str(api.dataset_info(place.repo_id, revision=collected).sha) if collected else head
    ours = there if source == head else blocks_at(place, source)
    numbers = range(len(whole.plan))
    missing = [number for number in numbers if number not in ours]
    if missing:
        raise PublishError(f"{place}: block {missing[0]} is gone; run again to write it anew")
    operations: list[Any] = []
    for number in numbers:
        name = place.target.block_name(number)
        if there.get(number) != ours[number]:
            operations.append(CommitOperationCopy(name, name, src_revision=source))
    operations += [CommitOperationDelete(place.target.block_name(number)) for number in there if number not in numbers]
    card = card_at(place.repo_id, head)
    if operations or whole.insists or not has_section(card, place.target):
        text = whole.card(card, "")
        if text != card:
            operations.append(CommitOperationAdd("README.md", text.encode()))
    commit = head
    if operations:
        made = api.create_commit(
            place.repo_id,
            operations,
            repo_type="dataset",
            revision=branch,
            commit_message=f"Text of split {place.target}",
            parent_commit=head,
        )
        commit = str(made.oid)
    return Published(commit, source, {number: ours[number].oid for number in numbers})
