"""Buckets of the Hub's stand-in: files without history, which the real clients upload by the Xet protocol.

`Buckets` is part of every `HubServer`. What is uploaded lies in a `Storage`; a bucket's files point into it. The
storage is asked at `/xet` of the same server, with tokens that the bucket's own routes hand out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import time
from typing import TYPE_CHECKING, Any

from aiohttp import web

from tests.hub_routes import Routes, origin, ranged
from tests.hub_state import DATE, HubError, Token
from tests.xet_cas import Storage

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

TOKEN_LIFETIME_S = 3600


@dataclasses.dataclass(frozen=True)
class BucketFile:
    """A file in a bucket."""

    xet_hash: str
    content: bytes
    mtime_ms: int

    def describe(self, path: str) -> dict[str, object]:
        """Its entry in a listing."""
        entry = {"type": "file", "path": path, "size": len(self.content), "xetHash": self.xet_hash}
        return entry | {"mtime": iso_time(self.mtime_ms), "uploadedAt": DATE}


@dataclasses.dataclass
class Bucket:
    """A bucket: files by their paths."""

    name: str
    private: bool = False
    files: dict[str, BucketFile] = dataclasses.field(default_factory=dict)
    batches: list[list[str]] = dataclasses.field(default_factory=list)  # the paths that each batch changed

    def describe(self) -> dict[str, object]:
        """What is said about it."""
        size = sum(len(file.content) for file in self.files.values())
        info: dict[str, object] = {"id": self.name, "private": self.private, "createdAt": DATE, "updatedAt": DATE}
        return info | {"size": size, "totalFiles": len(self.files)}

    def tree(self, prefix: str, recursive: bool) -> Iterator[dict[str, object]]:
        """The entries whose path starts with `prefix`, letter by letter; of folders below it the name alone."""
        folders = set()
        for path in sorted(self.files):
            if not path.startswith(prefix):
                continue
            below = path.removeprefix(f"{prefix}/") if prefix and path.startswith(f"{prefix}/") else path
            first, slash, _ = below.partition("/")
            if recursive or not slash:
                yield self.files[path].describe(path)
                continue
            folder = path[: len(path) - len(below)] + first
            if folder not in folders:
                folders.add(folder)
                yield {"type": "directory", "path": folder, "uploadedAt": DATE}


class Buckets:
    """All buckets of a hub, their storage, and what the clients call."""

    def __init__(self, routes: Routes) -> None:
        self.hub = routes.hub
        self.bytes_served = routes.bytes_served
        self.storage = Storage()
        self.buckets: dict[str, Bucket] = {}
        self.page_size = 1000

    def routes(self) -> list[web.RouteDef]:
        """The routes of buckets, and of their storage."""
        bucket = "/api/buckets/{owner}/{name}"
        return [
            web.get("/api/buckets/{owner}", self.list_buckets),
            web.post(bucket, self.create),
            web.get(bucket, self.info),
            web.delete(bucket, self.delete),
            web.get(bucket + "/tree", self.tree),
            web.get(bucket + "/tree/{path:.+}", self.tree),
            web.post(bucket + "/paths-info", self.paths_info),
            web.post(bucket + "/batch", self.batch),
            web.get(bucket + "/xet-{role:read|write}-token", self.xet_token),
            web.get("/buckets/{owner}/{name}/resolve/{path:.+}", self.resolve),
            web.get("/xet/v1/chunks/{prefix}/{hash}", self.find_chunk),
            web.post("/xet/v1/xorb-grants/{prefix}/{hash}", self.grant),
            web.post("/xet/v1/xorbs/{prefix}/{hash}", self.upload_xorb),
            web.get("/xet/xorbs/{hash}", self.stored_xorb),
            web.post("/xet/{version:v1|v2}/shards", self.upload_shard),
            web.get("/xet/v2/reconstructions/{hash}", self.reconstruct_by_ranges),
            web.get("/xet/v1/reconstructions/{hash}", self.reconstruct),
            web.post("/xet/v1/telemetry", self.telemetry),
        ]

    def put(self, name: str, path: str, content: bytes) -> None:
        """A file that is there before the client comes; the bucket is created where it is missing."""
        bucket = self.buckets.setdefault(name, Bucket(name))
        bucket.files[path] = BucketFile(self.storage.add_content(content), content, 0)

    # -- who and which

    def _token(self, request: web.Request) -> Token | None:
        return self.hub.identify(request.headers.get("Authorization", ""))

    def _find(self, name: str, token: Token | None) -> Bucket:
        bucket = self.buckets.get(name)
        if bucket is None or (bucket.private and not self.hub.is_member(name.partition("/")[0], token)):
            raise HubError(404 if token else 401, "Bucket not found", "RepoNotFound")
        return bucket

    def _bucket(self, request: web.Request, *, to_write: bool = False) -> Bucket:
        token = self._token(request)
        bucket = self._find(_bucket_name(request), token)
        if to_write:
            self.hub.check_write(bucket.name, token)
        return bucket

    # -- buckets

    async def list_buckets(self, request: web.Request) -> web.Response:
        """The buckets of a namespace."""
        token, owner = self._token(request), request.match_info["owner"]
        owner = token.user if owner == "me" and token else owner
        seen = [
            bucket.describe()
            for name, bucket in self.buckets.items()
            if name.startswith(f"{owner}/") and (not bucket.private or self.hub.is_member(owner, token))
        ]
        return web.json_response(seen)

    async def create(self, request: web.Request) -> web.Response:
        """A new bucket."""
        token = self._token(request)
        owner, name = request.match_info["owner"], request.match_info["name"]
        owner = token.user if owner == "me" and token else owner
        self.hub.check_write(owner, token)
        body = json.loads(await request.read() or b"{}")
        answer = {"url": f"{origin(request)}/buckets/{owner}/{name}", "name": f"{owner}/{name}"}
        if f"{owner}/{name}" in self.buckets:
            error = HubError(409, f"You already created this bucket: {owner}/{name}")
            error.body |= answer  # clients that say `exist_ok` read the address from the refusal
            raise error
        self.buckets[f"{owner}/{name}"] = Bucket(f"{owner}/{name}", body.get("visibility") == "private")
        return web.json_response(answer)

    async def info(self, request: web.Request) -> web.Response:
        """What is said about a bucket."""
        return web.json_response(self._bucket(request).describe())

    async def delete(self, request: web.Request) -> web.Response:
        """A bucket less."""
        del self.buckets[self._bucket(request, to_write=True).name]
        return web.json_response({})

    async def tree(self, request: web.Request) -> web.Response:
        """The entries whose paths start with some letters, page by page."""
        recursive = request.query.get("recursive", "false").lower() in ("true", "1")
        entries = list(self._bucket(request).tree(request.match_info.get("path", ""), recursive))
        start = int(request.query.get("cursor", "0"))
        end = start + self.page_size
        url = request.url.update_query(cursor=str(end))
        headers = {"Link": f'<{url}>; rel="next"'} if end < len(entries) else {}
        return web.json_response(entries[start:end], headers=headers)

    async def paths_info(self, request: web.Request) -> web.Response:
        """The entries of files with the given paths; missing ones are left out."""
        files = self._bucket(request).files
        asked = (await request.json())["paths"]
        return web.json_response([files[path].describe(path) for path in asked if path in files])

    async def batch(self, request: web.Request) -> web.Response:
        """Files more and less, each for itself: what fails is listed, and the rest is done."""
        bucket = self._bucket(request, to_write=True)
        operations = [json.loads(line) for line in (await request.read()).splitlines() if line.strip()]
        failed = [failure for operation in operations if (failure := self._do(bucket, operation))]
        bucket.batches.append([operation["path"] for operation in operations])
        succeeded = len(operations) - len(failed)
        status = 422 if failed and not succeeded else 200
        return web.json_response({"success": not failed, "succeeded": succeeded, "failed": failed}, status=status)

    def _do(self, bucket: Bucket, operation: Mapping[str, Any]) -> dict[str, str] | None:
        path = operation["path"]
        match operation["type"]:
            case "addFile" | "copyFile" if operation["xetHash"] in self.storage.files:
                name = operation["xetHash"]
                bucket.files[path] = BucketFile(name, self.storage.content(name), operation["mtime"])
            case "addFile" | "copyFile":
                return {"path": path, "error": "Xet hash not found"}
            case "deleteFile" if path not in bucket.files:
                return {"path": path, "error": "File not found"}
            case "deleteFile":
                del bucket.files[path]
            case kind:
                return {"path": path, "error": f"unknown operation {kind!r}"}
        return None

    async def resolve(self, request: web.Request) -> web.StreamResponse:
        """A file's content, whole or a range."""
        bucket, path = self._bucket(request), request.match_info["path"]
        file = bucket.files.get(path)
        if file is None:
            raise HubError(404, "Entry not found", "EntryNotFound")
        route = f"{origin(request)}/api/buckets/{bucket.name}/xet-read-token"
        headers = {"ETag": f'"{file.xet_hash}"', "Accept-Ranges": "bytes", "X-Linked-Size": str(len(file.content))}
        headers |= {"X-Xet-Hash": file.xet_hash, "X-Xet-Refresh-Route": route}
        response = ranged(request, file.content, headers)
        if request.method == "GET" and isinstance(response.body, bytes):
            self.bytes_served[f"{bucket.name}/{path}"] += len(response.body)
        return response

    # -- the storage

    async def xet_token(self, request: web.Request) -> web.Response:
        """A token for the storage: it is for one bucket, for reading or writing, for a while."""
        role = request.match_info["role"]
        bucket = self._bucket(request, to_write=role == "write")
        token, until = f"xet_{role}_{bucket.name}", int(time.time()) + TOKEN_LIFETIME_S
        address = f"{origin(request)}/xet"
        headers = {"X-Xet-Cas-Url": address, "X-Xet-Access-Token": token, "X-Xet-Token-Expiration": str(until)}
        return web.json_response({"casUrl": address, "accessToken": token, "exp": until}, headers=headers)

    def _check(self, request: web.Request, *, to_write: bool) -> None:
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if not token.startswith("xet_"):
            raise HubError(401, "no token for the storage")
        if to_write and not token.startswith("xet_write_"):
            raise HubError(403, "the token can only read")

    async def find_chunk(self, request: web.Request) -> web.Response:
        """No chunk is known from elsewhere."""
        self._check(request, to_write=False)
        raise HubError(404, "chunk not found")

    async def grant(self, request: web.Request) -> web.Response:
        """Storage elsewhere is not offered: clients then upload here."""
        self._check(request, to_write=True)
        raise HubError(404, "no grants")

    async def upload_xorb(self, request: web.Request) -> web.Response:
        """A row of chunks."""
        self._check(request, to_write=True)
        with _refusing():
            was_new = self.storage.add_xorb(request.match_info["hash"], await request.read())
        return web.json_response({"was_inserted": was_new})

    async def upload_shard(self, request: web.Request) -> web.Response:
        """What files are made of. Version 2 answers in lines, as the work proceeds."""
        self._check(request, to_write=True)
        with _refusing():
            self.storage.add_shard(await request.read())
        if request.match_info["version"] == "v1":
            return web.json_response({"result": 1})
        return web.Response(text=json.dumps({"type": "result"}) + "\n", content_type="application/x-ndjson")

    async def reconstruct_by_ranges(self, request: web.Request) -> web.Response:
        """Several ranges by one address are not offered: clients then ask in the older way."""
        self._check(request, to_write=False)
        raise HubError(404, "version 1 only")

    async def reconstruct(self, request: web.Request) -> web.Response:
        """Where the chunks of a file, or of a range of it, are."""
        self._check(request, to_write=False)
        name = request.match_info["hash"]
        if name not in self.storage.files:
            raise HubError(404, "file not found")
        size = sum(term.num_bytes for term in self.storage.files[name])
        asked = request.http_range
        start, stop, _ = slice(asked.start, asked.stop).indices(size)
        if start >= size:
            raise HubError(416, "range not satisfiable")
        return web.json_response(self.storage.reconstruction(name, start, stop, f"{origin(request)}/xet/xorbs"))

    async def stored_xorb(self, request: web.Request) -> web.StreamResponse:
        """A range of a xorb, as it is stored: the address is the right to it."""
        return ranged(request, self.storage.xorbs[request.match_info["hash"]].stored, {"Accept-Ranges": "bytes"})

    async def telemetry(self, request: web.Request) -> web.Response:
        """Thank you."""
        return web.json_response({})


def iso_time(since_ms: int) -> str:
    """A time as the Hub writes it."""
    moment = datetime.datetime.fromtimestamp(since_ms / 1000, datetime.UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _bucket_name(request: web.Request) -> str:
    return f"{request.match_info['owner']}/{request.match_info['name']}"


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    """Refuse what can't be taken apart."""
    try:
        yield
    except (ValueError, RuntimeError) as error:  # the latter from lz4
        raise HubError(400, str(error)) from error
