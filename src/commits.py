"""Blocks of a Hub dataset as they are uploaded and committed to the work ref."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from .blocks import Target
from .work_ref import WorkRef


class Committer:
    """Uploads blocks as large files, and commits them to the work ref. `revision` is that ref's, once it is open."""

    def __init__(self, repo_id: str, target: Target, work: WorkRef) -> None:
        self.revision = ""
        self._repo_id = repo_id
        self._target = target
        self._work = work
        self._additions: dict[int, Any] = {}

    def upload(self, files: Mapping[int, Path]) -> None:
        """Upload some blocks, which nobody sees yet."""
        from huggingface_hub import CommitOperationAdd

        additions = {
            number: CommitOperationAdd(self._target.block_name(number), file) for number, file in files.items()
        }
        self._on_work_ref(lambda revision: upload_files(self._repo_id, list(additions.values()), revision))
        self._additions.update(additions)

    def commit(self, numbers: Collection[int]) -> None:
        """Commit the blocks that were uploaded."""
        from huggingface_hub import HfApi

        self._on_work_ref(
            lambda revision: HfApi().create_commit(
                self._repo_id,
                [self._additions[number] for number in numbers],
                repo_type="dataset",
                revision=revision,
                commit_message=f"Blocks of split {self._target}: {len(numbers)}",
            )
        )
        for number in numbers:
            del self._additions[number]

    def _on_work_ref(self, act: Callable[[str], object]) -> None:
        """Do something at the work ref, opened again where another shard has found all blocks there and published."""
        from huggingface_hub.errors import RevisionNotFoundError

        try:
            act(self.revision)
        except RevisionNotFoundError:
            self.revision = self._work.open()
            act(self.revision)


def upload_files(repo_id: str, additions: Sequence[Any], revision: str) -> None:
    """Upload files, which nobody sees before they are committed. Raises what the client does, but for `RuntimeError`:
    so it wraps whatever went wrong with one file, an address to upload to that has expired for one. Another try is
    given new addresses."""
    from huggingface_hub import HfApi

    try:
        HfApi().preupload_lfs_files(repo_id, additions, repo_type="dataset", revision=revision)
    except RuntimeError as error:
        cause = error.__cause__ or error
        if isinstance(cause, FileNotFoundError | PermissionError):
            raise cause from error
        status = getattr(getattr(cause, "response", None), "status_code", "no answer")
        raise ConnectionError(f"{error} ({type(cause).__name__}, {status})") from error
