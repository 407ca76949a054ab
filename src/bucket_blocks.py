"""Blocks of a bucket: collected in a folder that readers pass over, and moved from there when all are there.

A bucket has neither commits nor branches. What is under way lies below `.unfinished/`, found there by any machine; a
split is published by copies within the bucket, for which no byte travels, then by its card, and last the folder goes.
Killed anywhere in between, the same command goes on.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .blocks import WHOLE, Shard, Target, Whole
from .card import has_section
from .errors import PublishError, network_errors
from .hf_paths import HUB_SCHEME, HubPath
from .patience import Patience
from .remote_blocks import REMOTE_BLOCK_BYTES, RemoteBlocks
from .verify import check_as_reader, numbers_that_differ

WORK_FOLDER = ".unfinished"
BUCKET_PUBLISH_S = 1800.0
CARD_TRIES = 10
MARKERS = ("begun", "anew")
BEGUN = b"Blocks of a run that is under way. It moves them from here when all are there; until then leave them.\n"


@dataclass(frozen=True)
class BucketFolder:
    """Where an output lies in a bucket: its blocks for readers, and those that are collected."""

    at: HubPath
    target: Target

    def name(self, number: int, *, collected: bool) -> str:
        """Return the path of a block in the bucket."""
        return self._path(self.target.block_name(number), collected=collected)

    @property
    def card(self) -> str:
        """The path of the card in the bucket."""
        return self._path("README.md", collected=False)

    def marker(self, word: str) -> str:
        """Return the path of a file that says something of what is collected."""
        return self._path(f"{self.target.folder}/{self.target.split}-{word}", collected=True)

    def _path(self, name: str, *, collected: bool) -> str:
        return "/".join(part for part in (self.at.path, WORK_FOLDER if collected else "", name) if part)

    def files(self, *, collected: bool) -> dict[str, Any]:
        """List the files of this split, blocks and markers, by their names in the output; none where no bucket is."""
        from huggingface_hub import BucketFile, HfApi
        from huggingface_hub.errors import BucketNotFoundError

        prefix = self._path("", collected=collected)
        start = self._path(f"{self.target.folder}/{self.target.split}-", collected=collected)
        try:
            entries = list(HfApi().list_bucket_tree(self.at.repo_id, prefix=start, recursive=True))
        except BucketNotFoundError:
            return {}
        return {
            entry.path.removeprefix(f"{prefix}/" if prefix else ""): entry
            for entry in entries
            if isinstance(entry, BucketFile)
        }

    def read_card(self) -> str:
        """Return the card; nothing where there is none."""
        from huggingface_hub import HfApi, HfFileSystem

        found = list(HfApi().get_bucket_paths_info(self.at.repo_id, [self.card]))
        if not found:
            return ""
        address = f"{HUB_SCHEME}buckets/{self.at.repo_id}/{self.card}"
        with HfFileSystem(skip_instance_cache=True).open(address, "rb", size=found[0].size) as file:
            return bytes(file.read()).decode()


@dataclass(frozen=True)
class Collected:
    """The files of a split in a bucket, by the numbers of the blocks: for readers, and collected. `anew` says that what
    readers see is of an earlier run, and counts for nothing."""

    readable: Mapping[int, Any]
    collected: Mapping[int, Any]
    markers: Collection[str]
    anew: bool

    @property
    def there(self) -> dict[int, Any]:
        """The blocks of this run."""
        return {**({} if self.anew else self.readable), **self.collected}


class BucketCarrier:
    """Uploads blocks to where they are collected: other runs find them at once."""

    def __init__(self, folder: BucketFolder) -> None:
        self._folder = folder

    def upload(self, files: Mapping[int, Path]) -> None:
        """Upload some blocks."""
        from huggingface_hub import HfApi

        HfApi().batch_bucket_files(
            self._folder.at.repo_id,
            add=[(file, self._folder.name(number, collected=True)) for number, file in files.items()],
        )

    def commit(self, numbers: Collection[int]) -> None:
        """There are no commits."""


class BucketBlocks(RemoteBlocks):
    """The blocks of one split of an output in a bucket."""

    def __init__(
        self,
        at: HubPath,
        target: Target,
        staging: Path,
        *,
        private: bool,
        counted_column: str = "",
        shard: Shard = WHOLE,
    ) -> None:
        self.at = at
        self._folder = BucketFolder(at, target)
        self._private = private
        self._places: dict[int, bool] = {}  # block → whether it is among those that are collected
        super().__init__(
            str(at),
            target,
            staging,
            BucketCarrier(self._folder),
            counted_column=counted_column,
            shard=shard,
            commit_every_s=0.0,
        )

    def _look(self) -> Collected:
        files = self._folder.files(collected=True)
        markers = [self._folder.marker(word) for word in MARKERS]
        there = {file.path for file in files.values()} & set(markers)
        readable = self._numbered(self._folder.files(collected=False))
        return Collected(readable, self._numbered(files), sorted(there), anew=markers[1] in there)

    def _numbered(self, files: Mapping[str, Any]) -> dict[int, Any]:
        blocks = {self.target.block_number(name): file for name, file in files.items()}
        return {number: file for number, file in blocks.items() if number is not None}

    def _listed(self) -> dict[int, int]:
        found = self._look()
        self._places = {number: number in found.collected for number in found.there}
        return {number: int(file.size) for number, file in found.there.items()}

    def _opened(self, number: int) -> Any:
        from huggingface_hub import HfFileSystem

        size = self._bytes_of(number)
        name = self._folder.name(number, collected=self._places.get(number, True))
        return HfFileSystem().open(
            f"{HUB_SCHEME}buckets/{self.at.repo_id}/{name}", "rb", size=size, block_size=REMOTE_BLOCK_BYTES
        )

    def _open_to_write(self) -> None:
        """Create the bucket where it is missing, and write there that a run has begun: only so it shows that we may."""
        from huggingface_hub import HfApi

        api = HfApi()
        api.create_bucket(self.at.repo_id, private=self._private, exist_ok=True)
        markers = MARKERS if self._begins_anew else MARKERS[:1]
        old = [file.path for file in self._look().collected.values()] if self._begins_anew else []
        self._remove(old)
        api.batch_bucket_files(self.at.repo_id, add=[(BEGUN, self._folder.marker(word)) for word in markers])

    def publish(self, whole: Whole) -> str | None:
        """Let readers see the split: copies of what was collected, then the card; look at it as they do; tidy up.

        Raises `PublishError` where that fails, or where a reader would not find what is expected.
        """
        if whole.rows != whole.plan.num_rows:
            raise PublishError(
                f"the blocks of {self.at} hold {whole.rows} rows, and {whole.plan.num_rows} are wanted; nothing is "
                "published. Start anew with --overwrite"
            )
        kept = f"{self.collected()} keeps all blocks; the same command goes on"
        try:
            Patience(BUCKET_PUBLISH_S).call(lambda: self._publish(whole, kept), f"publishing to {self.at}")
        except network_errors() as error:
            raise PublishError(f"publishing to {self.at} failed: {error}. {kept}") from error
        from huggingface_hub import HfApi

        return f"{HfApi().endpoint}/buckets/{self.at.repo_id}" + (f"/tree/{self.at.path}" if self.at.path else "")

    def _publish(self, whole: Whole, kept: str) -> None:
        from huggingface_hub import HfApi

        api, found = HfApi(), self._look()
        numbers = range(len(whole.plan))
        missing = [number for number in numbers if number not in found.there]
        if missing:
            raise PublishError(f"{self.at}: block {missing[0]} is gone; run again to write it anew")
        if found.collected or found.markers or whole.insists or not has_section(self._folder.read_card(), self.target):
            ours = {number: found.there[number].xet_hash for number in numbers}
            seen = {number: file.xet_hash for number, file in found.readable.items()}
            copies = [
                ("bucket", self.at.repo_id, ours[number], self._folder.name(number, collected=False))
                for number in numbers
                if seen.get(number) != ours[number]
            ]
            surplus = [file.path for number, file in found.readable.items() if number not in numbers]
            api.batch_bucket_files(self.at.repo_id, copy=copies, delete=surplus)
            written = max(file.mtime.isoformat() for file in found.there.values() if file.mtime)
            self._write_card(whole, written)
            self._verify(whole, ours, kept)
            self._write_card(whole, written)  # another run may have written the one that it read before
        self._tidy_up(found)

    def _tidy_up(self, published: Collected) -> None:
        """Remove what was published from where it was collected; what another shard has put there since stays."""
        still = self._look()
        copied = [
            file.path
            for number, file in still.collected.items()
            if number in published.collected and file.xet_hash == published.collected[number].xet_hash
        ]
        # what readers see is of this run now, in any case
        stale = still.markers if len(copied) == len(still.collected) else [self._folder.marker("anew")]
        self._remove([*copied, *(marker for marker in stale if marker in still.markers)])

    def _write_card(self, whole: Whole, written: str) -> None:
        """Write the card, and look whether it is there: of two runs that write it at once the later one wins."""
        from huggingface_hub import HfApi

        for _ in range(CARD_TRIES):
            earlier = self._folder.read_card()
            text = whole.card(earlier, written)
            if text == earlier:
                return
            HfApi().batch_bucket_files(self.at.repo_id, add=[(text.encode(), self._folder.card)])
        raise PublishError(f"the card of {self.at} is written by somebody else as well; the same command writes it")

    def _verify(self, whole: Whole, ours: Mapping[int, str], kept: str) -> None:
        from huggingface_hub import HfFileSystem

        def other_blocks() -> list[int]:
            return numbers_that_differ(ours, {number: file.xet_hash for number, file in self._look().readable.items()})

        first = self.read(0, list(whole.text_columns)).slice(0, 1).to_pylist()
        HfFileSystem.clear_instance_cache()  # it keeps what it listed, and a bucket has no commits to tell old from new
        check_as_reader(str(self.at), {"path": str(self.at)}, other_blocks, whole, first, kept)

    def _remove(self, paths: Sequence[str]) -> None:
        """Remove files; another shard may have removed some of them."""
        from huggingface_hub import HfApi
        from huggingface_hub.errors import BucketBatchError

        api = HfApi()
        try:
            api.batch_bucket_files(self.at.repo_id, delete=list(paths))
        except BucketBatchError:
            if list(api.get_bucket_paths_info(self.at.repo_id, paths)):
                raise

    def collected(self) -> str:
        """Say where the blocks are that are there already."""
        return f"{self.at}/{WORK_FOLDER}"
