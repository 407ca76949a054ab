"""Addresses on the Hub: `namespace/name`, `hf://datasets/…` at a revision, `hf://buckets/…`, and what lies there.

A path in one may be a folder, a file, or a pattern. A dataset is read at one commit; a bucket has none, so that its
files' own hashes stand for what is in it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .errors import UsageError

HUB_SCHEME = "hf://"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
BUCKETS = "buckets"
PARQUET_SUFFIXES = {"parquet", "pq"}


@dataclass(frozen=True)
class HubPath:
    """A place on the Hub: `kind` is `datasets` or `buckets`; `path` is empty for all of it."""

    kind: str
    repo_id: str
    revision: str | None = None
    path: str = ""

    @property
    def is_bucket(self) -> bool:
        """Whether it is in a bucket, which has no history."""
        return self.kind == BUCKETS

    @property
    def root(self) -> str:
        """The address of the whole dataset or bucket."""
        revision = f"@{self.revision.replace('/', '%2F')}" if self.revision else ""
        return f"{HUB_SCHEME}{self.kind}/{self.repo_id}{revision}"

    def __str__(self) -> str:
        return f"{self.root}/{self.path}" if self.path else self.root

    def overlaps(self, other: HubPath) -> bool:
        """Whether one of the two contains the other. Of a dataset all is one place: its card speaks of all of it."""
        if (self.kind, self.repo_id) != (other.kind, other.repo_id):
            return False
        here, there = self._fixed_parts(), other._fixed_parts()
        shorter = min(len(here), len(there))
        return not self.is_bucket or here[:shorter] == there[:shorter]

    def _fixed_parts(self) -> list[str]:
        """The folders down to the first pattern."""
        parts = self.path.split("/") if self.path else []
        patterns = [number for number, part in enumerate(parts) if is_pattern(part)]
        return parts[: patterns[0]] if patterns else parts


@dataclass(frozen=True)
class HubInput:
    """What was found at an address: at which commit, who may see it, and the files, where it names files itself."""

    at: HubPath
    fingerprint: str
    is_private: bool
    files: tuple[str, ...] | None = None

    @property
    def loader(self) -> dict[str, Any]:
        """The arguments with which `datasets` opens it."""
        if self.files is not None:
            return {"path": _builder_of(self.files), "data_files": {"train": list(self.files)}}
        if self.at.is_bucket:
            return {"path": str(self.at)}
        return {"path": self.at.repo_id, "revision": self.at.revision, "data_dir": self.at.path or None}

    def check_own(self, files: Iterable[str]) -> None:
        """Raise `UsageError` where a card names files that are not this input's: it could be ours that are private.

        `datasets` 5.2 looks at that for datasets, but not for buckets.
        """
        for file in files:
            if not file.startswith(f"{self.at.root}/") or ".." in file.split("/"):
                raise UsageError(f"the card of {self.at} names a file that lies elsewhere, {file!r}; correct the card")


def is_pattern(path: str) -> bool:
    """Whether a path stands for several files."""
    return any(letter in path for letter in "*?[")


def parse_hub_path(name: str, revision: str | None = None, what: str = "input") -> HubPath | None:
    """Read an address; None where `name` is neither a dataset's id nor an `hf://` address.

    Raises `UsageError` for what holds no dataset, and where `revision` is another than that in the address.
    """
    if not name.startswith(HUB_SCHEME):
        return HubPath("datasets", name, revision) if HUB_ID.fullmatch(name) else None
    from huggingface_hub.errors import HfUriError
    from huggingface_hub.utils import parse_hf_uri  # type: ignore[attr-defined]

    try:
        uri = parse_hf_uri(name)
    except HfUriError as error:
        raise UsageError(f"{what} {name!r}: {error.msg}") from error
    if uri.type not in ("dataset", "bucket"):
        raise UsageError(
            f"{what} {name!r} names a {uri.type}; give hf://datasets/namespace/name[@revision][/path] "
            "or hf://buckets/namespace/name[/path]"
        )
    if ".." in uri.path_in_repo.split("/"):
        raise UsageError(f"{what} {name!r}: '..' leads nowhere on the Hub; give the path itself")
    if revision is not None and uri.is_bucket:
        raise UsageError(f"{what} {name!r}: a bucket has no revisions; leave --revision {revision} out")
    if revision is not None and uri.revision not in (None, revision):
        raise UsageError(f"{what} {name!r} is at {uri.revision!r}, but --revision is {revision!r}; give one of them")
    return HubPath(f"{uri.type}s", uri.id, uri.revision or revision, uri.path_in_repo)


def look_at(at: HubPath) -> HubInput:
    """Find out what lies at an address, and pin it: a dataset to its commit, a bucket's files to their hashes."""
    from huggingface_hub import HfApi

    if at.is_bucket:
        is_private = bool(HfApi().bucket_info(at.repo_id).private)
        found = _files_at(at)
        return HubInput(at, f"bucket:{at}:{_digest(found)}", is_private, _named_files(at, found))
    info = HfApi().dataset_info(at.repo_id, revision=at.revision)
    at = dataclasses.replace(at, revision=str(info.sha))
    fingerprint = f"hub:{at.repo_id}@{info.sha}" + (f"/{at.path}" if at.path else "")
    return HubInput(at, fingerprint, bool(info.private), _named_files(at, _files_at(at)) if at.path else None)


def _files_at(at: HubPath) -> Mapping[str, Mapping[str, Any]]:
    """Return what the client says of each file at an address, by the file's path from the root. One listing."""
    from huggingface_hub import HfFileSystem

    files = HfFileSystem(skip_instance_cache=True)  # what another one listed earlier may be old
    where = str(at)
    list_files: Any = files.glob if is_pattern(at.path) else files.find
    found = list_files(where, detail=True)
    prefix = at.root.removeprefix(HUB_SCHEME) + "/"
    by_path = {name.removeprefix(prefix): about for name, about in found.items() if about["type"] == "file"}
    if not by_path:
        raise FileNotFoundError(f"there is no file at {where}")
    return dict(sorted(by_path.items()))


def _digest(found: Mapping[str, Mapping[str, Any]]) -> str:
    digest = hashlib.sha256()
    for path, about in found.items():
        digest.update(json.dumps([path, about["size"], about.get("xet_hash")]).encode())
    return digest.hexdigest()[:32]


def _named_files(at: HubPath, found: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Return the addresses of the files that a path names, one by one or by a pattern; None for a folder."""
    if not is_pattern(at.path) and at.path not in found:
        return None
    names = [path for path in found if not path.rpartition("/")[2].startswith(".")]
    _check_one_kind(at, names)
    return tuple(f"{at.root}/{name}" for name in names)


def _check_one_kind(at: HubPath, names: Sequence[str]) -> None:
    kinds = {_suffix(name) for name in names}
    if kinds & PARQUET_SUFFIXES and kinds - PARQUET_SUFFIXES:
        raise UsageError(f"{at} names files of several kinds: {', '.join(sorted(kinds))}; name those of one kind")


def _builder_of(files: Sequence[str]) -> str:
    return "parquet" if _suffix(files[0]) in PARQUET_SUFFIXES else "imagefolder"


def _suffix(name: str) -> str:
    return name.rpartition("/")[2].rpartition(".")[2].lower()
