"""How far texts are from the truth: edits, CER and WER, and the interval of a difference between two sides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

FloatArray: TypeAlias = "NDArray[np.float64]"
IntArray: TypeAlias = "NDArray[np.int64]"

BOOTSTRAP_WORK = 300_000_000  # pages drawn in all: a few seconds; a million pages need no more than 1,000 resamples


def edit_distances(texts_a: Sequence[str], texts_b: Sequence[str]) -> IntArray:
    """The Levenshtein distance of each pair, in characters."""
    import numpy as np
    from rapidfuzz.distance import Levenshtein
    from rapidfuzz.process import cpdist

    if not texts_a:
        return np.zeros(0, dtype=np.int64)
    distances = cpdist(texts_a, texts_b, scorer=Levenshtein.distance, dtype=np.int64, workers=-1)
    return np.asarray(distances, dtype=np.int64)


@dataclass(frozen=True)
class SideErrors:
    """Edits from the truth, page by page. A page whose truth is empty has rate 0 if the text is empty, else 1."""

    character_edits: IntArray
    characters: IntArray
    word_edits: IntArray
    words: IntArray

    def cer(self) -> FloatArray:
        """Character error rate of each page."""
        return _rates(self.character_edits, self.characters)

    def wer(self) -> FloatArray:
        """Word error rate of each page."""
        return _rates(self.word_edits, self.words)


def _rates(edits: IntArray, totals: IntArray) -> FloatArray:
    import numpy as np

    return np.where(totals > 0, edits / np.maximum(totals, 1), (edits > 0).astype(np.float64))


def side_errors(truths: Sequence[str], texts: Sequence[str]) -> SideErrors:
    """Edits that lead from each truth to its text, in characters and in words."""
    import jiwer
    import numpy as np

    words = [truth.split() for truth in truths]
    word_edits = [0] * len(truths)
    differing = [index for index, truth in enumerate(truths) if words[index] != texts[index].split()]
    if differing:
        # jiwer splits at single spaces only
        references = [" ".join(words[index]) for index in differing]
        answers = [" ".join(texts[index].split()) for index in differing]
        for index, chunks in zip(differing, jiwer.process_words(references, answers).alignments, strict=True):
            word_edits[index] = sum(
                max(chunk.ref_end_idx - chunk.ref_start_idx, chunk.hyp_end_idx - chunk.hyp_start_idx)
                for chunk in chunks
                if chunk.type != "equal"
            )
    return SideErrors(
        character_edits=edit_distances(truths, texts),
        characters=np.array([len(truth) for truth in truths], dtype=np.int64),
        word_edits=np.array(word_edits, dtype=np.int64),
        words=np.array([len(split) for split in words], dtype=np.int64),
    )


@dataclass(frozen=True)
class Interval:
    """A 95 % interval of a mean, by resampling pages."""

    mean: float
    low: float
    high: float
    resamples: int


def paired_bootstrap(differences: FloatArray, resamples: int, seed: int) -> Interval:
    """The mean of per-page differences and where it would lie had other pages been drawn."""
    import numpy as np

    pages = len(differences)
    resamples = min(resamples, max(1000, BOOTSTRAP_WORK // pages))
    random = np.random.default_rng(seed)
    at_once = max(1, 1_000_000 // pages)
    means = np.concatenate(
        [
            differences[random.integers(0, pages, size=(min(at_once, resamples - done), pages))].mean(axis=1)
            for done in range(0, resamples, at_once)
        ]
    )
    low, high = np.quantile(means, (0.025, 0.975))
    return Interval(mean=float(differences.mean()), low=float(low), high=float(high), resamples=resamples)
