"""Content-addressed storage as the Xet protocol has it: xorbs and shards as the real `hf_xet` writes them.

A file is a row of terms, each a range of chunks in a xorb; a xorb is a row of chunks, each with a header of its own and
perhaps compressed; a shard says which terms a file is made of. What is uploaded is taken apart here, and put together
again, so that tests compare bytes with bytes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import struct
from typing import TYPE_CHECKING

import lz4.frame

if TYPE_CHECKING:
    from collections.abc import Iterator

HEADER_BYTES = 48  # of a shard, and of each entry in it
CHUNK_HEADER_BYTES = 8
CHUNK_BYTES = 64 * 1024
BOOKEND = b"\xff" * 32
WITH_VERIFICATION, WITH_METADATA = 1 << 31, 1 << 30
EMPTY_FILE = "0" * 64
UNCOMPRESSED, LZ4, GROUPED_LZ4 = range(3)


@dataclasses.dataclass(frozen=True)
class Term:
    """Chunks `start` to `stop` (not included) of a xorb, which are `num_bytes` bytes of a file."""

    xorb: str
    start: int
    stop: int
    num_bytes: int


@dataclasses.dataclass(frozen=True)
class Xorb:
    """A xorb as it came in, where each of its chunks ends in it, and how the chunks are stored."""

    stored: bytes
    ends: tuple[int, ...]
    schemes: tuple[int, ...]

    def place(self, start: int, stop: int) -> tuple[int, int]:
        """The first and the last byte of some chunks, as they are stored."""
        return (self.ends[start - 1] if start else 0), self.ends[stop - 1] - 1

    def chunks(self, start: int, stop: int) -> Iterator[bytes]:
        """Some chunks, as they were before they were compressed."""
        for number in range(start, stop):
            first, last = self.place(number, number + 1)
            yield _unpacked(self.stored[first + CHUNK_HEADER_BYTES : last + 1], self.schemes[number])


class Storage:
    """Xorbs by their hashes, and the terms of files by theirs. ValueError says what is wrong with what comes in."""

    def __init__(self) -> None:
        self.xorbs: dict[str, Xorb] = {}
        self.files: dict[str, tuple[Term, ...]] = {EMPTY_FILE: ()}

    def add_xorb(self, name: str, stored: bytes) -> bool:
        """Take a xorb in; say whether it was new."""
        was_new = name not in self.xorbs
        self.xorbs[name] = parse_xorb(stored)
        return was_new

    def add_content(self, content: bytes) -> str:
        """Take in a whole file that no client uploaded, in chunks as they may be; return its name."""
        if not content:
            return EMPTY_FILE
        name = hashlib.sha256(content).hexdigest()
        chunks = [content[start : start + CHUNK_BYTES] for start in range(0, len(content), CHUNK_BYTES)]
        self.add_xorb(name, b"".join(_chunk_header(chunk) + chunk for chunk in chunks))
        self.files[name] = (Term(name, 0, len(chunks), len(content)),)
        return name

    def add_shard(self, content: bytes) -> None:
        """Take in what files are made of; every term must be there."""
        for name, terms in parse_shard(content):
            self.files[name] = terms
            self.content(name)

    def content(self, name: str) -> bytes:
        """A whole file."""
        return b"".join(self._term_content(term) for term in self.files[name])

    def _term_content(self, term: Term) -> bytes:
        if term.xorb not in self.xorbs:
            raise ValueError(f"no xorb {term.xorb}, of which a file is to be made")
        content = b"".join(self.xorbs[term.xorb].chunks(term.start, term.stop))
        if len(content) != term.num_bytes:
            raise ValueError(f"a term of {len(content)} bytes where the shard says {term.num_bytes}")
        return content

    def reconstruction(self, name: str, start: int, stop: int, address: str) -> dict[str, object]:
        """Where the client finds bytes `start` to `stop` (not included) of a file, in the words of the protocol."""
        wanted: list[Term] = []
        position = skipped = 0
        for term in self.files[name]:
            if position < stop and position + term.num_bytes > start:
                skipped = skipped if wanted else start - position
                wanted.append(term)
            position += term.num_bytes
        fetches: dict[str, list[dict[str, object]]] = {}
        for term in wanted:
            first, last = self.xorbs[term.xorb].place(term.start, term.stop)
            chunks, span = {"start": term.start, "end": term.stop}, {"start": first, "end": last}
            fetches.setdefault(term.xorb, []).append(
                {"url": f"{address}/{term.xorb}", "range": chunks, "url_range": span}
            )
        terms = [
            {"hash": term.xorb, "unpacked_length": term.num_bytes, "range": {"start": term.start, "end": term.stop}}
            for term in wanted
        ]
        return {"offset_into_first_range": skipped, "terms": terms, "fetch_info": fetches}


def parse_xorb(stored: bytes) -> Xorb:
    """Find the chunks in a xorb; what stands behind them, a table of them, is not needed."""
    ends, schemes = [], []
    offset = 0
    while offset < len(stored) and stored[offset] == 0:  # each begins with the version, and the table with letters
        header = stored[offset : offset + CHUNK_HEADER_BYTES]
        num_stored, num_bytes = int.from_bytes(header[1:4], "little"), int.from_bytes(header[5:8], "little")
        schemes.append(header[4])
        offset += CHUNK_HEADER_BYTES + num_stored
        ends.append(offset)
        content = _unpacked(stored[offset - num_stored : offset], header[4])
        if len(content) != num_bytes:
            raise ValueError(f"chunk {len(ends) - 1} has {len(content)} bytes where its header says {num_bytes}")
    if not ends:
        raise ValueError("a xorb without chunks")
    return Xorb(stored, tuple(ends), tuple(schemes))


def _chunk_header(chunk: bytes) -> bytes:
    size = len(chunk).to_bytes(3, "little")
    return b"\0" + size + bytes([UNCOMPRESSED]) + size


def _unpacked(stored: bytes, scheme: int) -> bytes:
    if scheme == UNCOMPRESSED:
        return stored
    if scheme == LZ4:
        return bytes(lz4.frame.decompress(stored))
    if scheme == GROUPED_LZ4:
        return _ungrouped(lz4.frame.decompress(stored))
    raise ValueError(f"unknown compression {scheme}")


def _ungrouped(grouped: bytes) -> bytes:
    """Undo the grouping: first all first bytes of four stand together, then all second ones, and so on."""
    content = bytearray(len(grouped))
    offset = 0
    for place in range(4):
        count = len(range(place, len(grouped), 4))
        content[place::4] = grouped[offset : offset + count]
        offset += count
    return bytes(content)


def parse_shard(content: bytes) -> Iterator[tuple[str, tuple[Term, ...]]]:
    """Give the hash of each file in a shard with the terms that it is made of."""
    (version,) = struct.unpack_from("<Q", content, 32)
    if version != 2:
        raise ValueError(f"a shard of version {version}")
    offset = HEADER_BYTES
    while content[offset : offset + 32] != BOOKEND:
        flags, count = struct.unpack_from("<II", content, offset + 32)
        name = hash_in_words(content[offset : offset + 32])
        offset += HEADER_BYTES
        yield name, tuple(_term(content, offset + HEADER_BYTES * number) for number in range(count))
        offset += HEADER_BYTES * count * (2 if flags & WITH_VERIFICATION else 1)
        offset += HEADER_BYTES if flags & WITH_METADATA else 0


def _term(content: bytes, offset: int) -> Term:
    _, num_bytes, start, stop = struct.unpack_from("<IIII", content, offset + 32)
    return Term(hash_in_words(content[offset : offset + 32]), start, stop, num_bytes)


def hash_in_words(digest: bytes) -> str:
    """A hash as the protocol writes it: four little-endian numbers of 64 bits."""
    return "".join(f"{number:016x}" for number in struct.unpack("<4Q", digest))
