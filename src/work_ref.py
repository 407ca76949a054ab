"""Where blocks of a Hub dataset are collected until all are there: a branch of its own, or a draft of a pull request.

Readers of the target branch see nothing of it. It is found again by its name, or by author and title: on any machine,
by any script, for any shard.
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass
from typing import Any, Protocol

from .blocks import Target
from .errors import UsageError
from .report import say

MAIN = "main"
OPEN_STATES = frozenset({"draft", "open"})


@dataclass(frozen=True)
class Destination:
    """Where on the Hub a split goes: to which branch of which dataset, and whether by a pull request."""

    repo_id: str
    target: Target
    revision: str = MAIN
    private: bool = True
    create_pr: bool = False

    def __str__(self) -> str:
        return self.repo_id if self.revision == MAIN else f"{self.repo_id}@{self.revision}"


class WorkRef(Protocol):
    """A ref that blocks are collected on. Its methods raise what the client raises."""

    def find(self) -> str | None:
        """Return the revision of it; None where it is not there."""

    def open(self, *, anew: bool = False) -> str:
        """Return the revision of it, created where it is not there; `anew`: begun from the target branch again."""

    def publish_to(self) -> str:
        """Return the revision that the finished split is committed to, created where it is not there."""

    def close(self, published: str) -> None:
        """Put it away: what it held at the commit `published` is published. What came later stays for its run."""

    def address(self) -> str:
        """Return where people look at what was published."""


def work_ref(place: Destination) -> WorkRef:
    """Return the ref on which the blocks of a destination are collected."""
    return PullRequest(place) if place.create_pr else WorkBranch(place)


def branch_name(place: Destination) -> str:
    """Name the work branch of a destination: another for each split, configuration and target branch.

    A slash in the target's name becomes `--`, so that `a/b` and `a--b` share one; their blocks tell by their settings
    whether they may be mixed.
    """
    split = str(place.target).replace("/", "-")
    at = "" if place.revision == MAIN else f"--at--{place.revision.replace('/', '--')}"
    return f"unfinished-{split}{at}"


class WorkBranch:
    """A branch beside the target branch, removed when the split is published."""

    def __init__(self, place: Destination) -> None:
        self.place = place
        self.name = branch_name(place)

    def find(self) -> str | None:
        """Return its name; None where it is not there."""
        return self.name if self._has_branch(self.name) else None

    def open(self, *, anew: bool = False) -> str:
        """Return its name, created where it is not there."""
        api = _api()
        api.create_repo(self.place.repo_id, repo_type="dataset", private=self.place.private, exist_ok=True)
        if anew:
            self._remove()
        start = self.place.revision if self._has_branch(self.place.revision) else MAIN
        api.create_branch(self.place.repo_id, branch=self.name, revision=start, repo_type="dataset", exist_ok=True)
        return self.name

    def publish_to(self) -> str:
        """Return the target branch."""
        if self.place.revision != MAIN and not self._has_branch(self.place.revision):
            _api().create_branch(self.place.repo_id, branch=self.place.revision, repo_type="dataset", exist_ok=True)
        return self.place.revision

    def close(self, published: str) -> None:
        """Remove it, if nothing came later: a shard that asks again about failed rows publishes its own."""
        if head_of_branch(self.place.repo_id, self.name) == published:
            self._remove()

    def _remove(self) -> None:
        """Remove it; another run may have done so."""
        from huggingface_hub.errors import RevisionNotFoundError

        if self._has_branch(self.name):
            with contextlib.suppress(RevisionNotFoundError):
                _api().delete_branch(self.place.repo_id, branch=self.name, repo_type="dataset")

    def address(self) -> str:
        """Return the dataset's page."""
        api = _api()
        tree = "" if self.place.revision == MAIN else f"/tree/{self.place.revision}"
        return f"{api.endpoint}/datasets/{self.place.repo_id}{tree}"

    def _has_branch(self, name: str) -> bool:
        return has_branch(self.place.repo_id, name)


class PullRequest:
    """A pull request of ours, a draft until the split is whole: for those who may not write to the dataset itself."""

    def __init__(self, place: Destination) -> None:
        self.place = place
        self.title = f"Text of split {place.target}, read by LightOnOCR"
        self._author = ""

    def find(self) -> str | None:
        """Return its ref; None where there is none that is open."""
        ours = self._ours()
        return str(ours[0].git_reference) if ours else None

    def open(self, *, anew: bool = False) -> str:
        """Return its ref, opened as a draft where there is none."""
        found = self.find()
        if found:
            return found
        made = _api().create_pull_request(
            self.place.repo_id,
            self.title,
            description="Blocks come in while pages are read; it is marked as ready when all are there.",
            repo_type="dataset",
        )
        say(f"opened a draft of a pull request: {made.url}")
        first = self._ours()[0]  # two shards may have opened one each
        if made.num != first.num:
            _api().change_discussion_status(
                self.place.repo_id, made.num, "closed", comment=f"#{first.num} is there already", repo_type="dataset"
            )
        return str(first.git_reference)

    def publish_to(self) -> str:
        """Return its own ref: nothing is copied."""
        return self.open()

    def close(self, published: str) -> None:
        """Mark it as ready to be merged."""
        for one in self._ours()[:1]:
            if one.status == "draft":
                _api().change_discussion_status(self.place.repo_id, one.num, "open", repo_type="dataset")

    def address(self) -> str:
        """Return the page of the pull request; of the dataset where it was merged."""
        ours = self._ours()
        return str(ours[0].url) if ours else f"{_api().endpoint}/datasets/{self.place.repo_id}"

    @functools.cached_property
    def _author(self) -> str:
        """The token's user, asked for once: the Hub does not like that question."""
        return str(_api().whoami()["name"])

    def _ours(self) -> list[Any]:
        """Return our pull requests that are not closed, the oldest first."""
        from huggingface_hub.errors import RepositoryNotFoundError

        api = _api()
        self._author = self._author or str(api.whoami()["name"])  # asked once: the Hub counts these
        try:
            found = api.get_repo_discussions(
                self.place.repo_id,
                author=self._author,
                discussion_type="pull_request",
                repo_type="dataset",
            )
            ours = [one for one in found if one.title == self.title and one.status in OPEN_STATES]
        except RepositoryNotFoundError as error:
            raise UsageError(
                f"--create-pr: there is no dataset {self.place.repo_id!r} to open a pull request on, or the token may "
                "not see it; create it first, or leave --create-pr out"
            ) from error
        return sorted(ours, key=lambda one: int(one.num))


def has_branch(repo_id: str, name: str) -> bool:
    """Whether a Hub dataset has this branch; False where there is no such dataset."""
    return head_of_branch(repo_id, name) is not None


def head_of_branch(repo_id: str, name: str) -> str | None:
    """Return the last commit on a branch of a Hub dataset; None where there is no such branch or dataset."""
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        refs = _api().list_repo_refs(repo_id, repo_type="dataset")
    except RepositoryNotFoundError:
        return None
    return next((str(branch.target_commit) for branch in refs.branches if branch.name == name), None)


def _api() -> Any:
    from huggingface_hub import HfApi

    return HfApi()
