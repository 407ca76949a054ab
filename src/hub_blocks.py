"""Blocks of a Hub dataset: found on the work ref by any machine, and published from there.

Where there is no work ref, the blocks on the target branch are those that are there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .blocks import WHOLE, Shard, Whole
from .commits import Committer
from .publish import blocks_at, publish
from .remote_blocks import REMOTE_BLOCK_BYTES, RemoteBlocks
from .verify import verify
from .work_ref import Destination, has_branch, work_ref


class HubBlocks(RemoteBlocks):
    """The blocks of one split of a Hub dataset."""

    def __init__(
        self,
        place: Destination,
        staging: Path,
        *,
        counted_column: str = "",
        shard: Shard = WHOLE,
        commit_every_s: float = 600.0,
    ) -> None:
        self.place = place
        self._work = work_ref(place)
        self._at = place.revision
        self._committer = Committer(place.repo_id, place.target, self._work)
        super().__init__(
            str(place),
            place.target,
            staging,
            self._committer,
            counted_column=counted_column,
            shard=shard,
            commit_every_s=commit_every_s,
        )

    def _listed(self) -> dict[int, int]:
        self._at = self._work.find() or self.place.revision
        return {number: block.size for number, block in blocks_at(self.place, self._at).items()}

    def _opened(self, number: int) -> Any:
        from huggingface_hub import HfFileSystem

        # Told the size, it lists no folder: that would cost as many requests as there are thousands of blocks, and go
        # stale.
        return HfFileSystem().open(
            f"datasets/{self.place.repo_id}/{self.place.target.block_name(number)}",
            "rb",
            revision=self._at,
            size=self._bytes_of(number),
            block_size=REMOTE_BLOCK_BYTES,
        )

    def _open_to_write(self) -> None:
        repo_id, revision = self.place.repo_id, self.place.revision
        starts_empty = self._begins_anew or (self._work.find() is None and not has_branch(repo_id, revision))
        self._at = self._committer.revision = self._work.open(anew=self._begins_anew)
        if starts_empty:
            self._remove_inherited()

    def _remove_inherited(self) -> None:
        """Remove the blocks that the work ref has from where it began."""
        from huggingface_hub import CommitOperationDelete, HfApi

        inherited = [self.place.target.block_name(number) for number in sorted(blocks_at(self.place, self._at))]
        if inherited:
            HfApi().create_commit(
                self.place.repo_id,
                [CommitOperationDelete(name) for name in inherited],
                repo_type="dataset",
                revision=self._at,
                commit_message=f"Start split {self.place.target} anew",
            )

    def publish(self, whole: Whole) -> str | None:
        """Make the split visible to readers, in one commit, and look at it as they do; return its address.

        Raises `PublishError` where that fails, or where a reader would not find what is expected.
        """
        collected = self._looked(self._work.find, "looking for what is collected")
        if collected or whole.insists:
            kept = f"{place_of(self.place, collected)} keeps all blocks; the same command goes on"
            published = publish(self.place, self._work, whole, kept)
            self._at = published.commit  # the work ref goes, by our hand or another shard's
            first = self.read(0, list(whole.text_columns)).slice(0, 1).to_pylist()
            verify(self.place, published, whole, first, kept)
            self._looked(
                lambda: self._work.close(published.source), "putting away the ref that blocks were collected on"
            )
        return self._looked(self._work.address, "asking for its address")

    def collected(self) -> str:
        """Say where the blocks are that are there already."""
        return place_of(self.place, None if self._at == self.place.revision else self._at)


def place_of(place: Destination, collected: str | None) -> str:
    """Name the ref of a dataset on which blocks are."""
    return f"{place.repo_id}@{collected}" if collected else str(place)
