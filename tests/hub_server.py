"""A stand-in for the Hugging Face Hub on loopback, good enough for the real `huggingface_hub` and `datasets` clients.

    with HubServer() as hub:
        hub.put("me/pages", "data/train.parquet", content)
        subprocess.run([sys.executable, "client.py"], env=hub_env(hub, home=tmp_path))
        assert hub.commits("me/out")[-1].title == "..."

Three layers: `Hub` is the state (users, repositories, commits, stored objects) and knows no HTTP; `Routes` is what the
clients call; `HubServer` runs both in a thread and is what tests hold. Everything is in memory. Clients reach it
through HF_ENDPOINT, with HF_HUB_DISABLE_XET=1: large files go by the LFS protocol.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import hashlib
import json
import os
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any, Self

from aiohttp import web

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping
    from pathlib import Path

USER = "me"
WRITE_TOKEN = "hf_write"
READ_TOKEN = "hf_read"
PR_TOKEN = "hf_pr"
GITATTRIBUTES = b"*.parquet filter=lfs diff=lfs merge=lfs -text\n"
LFS_SUFFIXES = (".parquet", ".arrow", ".png", ".jpg", ".jpeg", ".webp", ".tiff", ".bmp", ".zip", ".bin", ".safetensors")
LFS_FROM_BYTES = 10 * 1024 * 1024
DATE = "2026-07-16T12:00:00.000Z"


# ---------------------------------------------------------------------------------------------------------------------
# State
# ---------------------------------------------------------------------------------------------------------------------


class HubError(Exception):
    """A refusal, with the status and the headers by which the clients tell one refusal from another."""

    def __init__(self, status: int, message: str, code: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": message}
        self.headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})


@dataclasses.dataclass(frozen=True)
class Token:
    """Who holds it, and what it may do: `read`, `pr` (pull requests only) or `write`."""

    user: str
    role: str


@dataclasses.dataclass(frozen=True)
class Blob:
    """One file's content, and whether it is stored as a large file."""

    content: bytes
    lfs: bool

    @property
    def sha256(self) -> str:
        """The name of the content in large file storage."""
        return hashlib.sha256(self.content).hexdigest()

    @property
    def oid(self) -> str:
        """The git object's name: of the content, or of the pointer that stands for it."""
        stored = self._pointer() if self.lfs else self.content
        return hashlib.sha1(b"blob %d\0" % len(stored) + stored).hexdigest()

    @property
    def etag(self) -> str:
        """What `resolve` names the content by."""
        return self.sha256 if self.lfs else self.oid

    def _pointer(self) -> bytes:
        text = f"version https://git-lfs.github.com/spec/v1\noid sha256:{self.sha256}\nsize {len(self.content)}\n"
        return text.encode()

    def describe(self, path: str) -> dict[str, object]:
        """Its entry in tree, paths-info and siblings."""
        entry: dict[str, object] = {"type": "file", "oid": self.oid, "size": len(self.content), "path": path}
        if self.lfs:
            entry["lfs"] = {"oid": self.sha256, "size": len(self.content), "pointerSize": len(self._pointer())}
        return entry


@dataclasses.dataclass(frozen=True)
class Commit:
    """A state of all files."""

    oid: str
    title: str
    description: str
    parent: str | None
    user: str
    files: Mapping[str, Blob]


@dataclasses.dataclass
class Repo:
    """A repository: references that point to commits."""

    kind: str
    name: str
    private: bool = False
    gated: bool = False
    granted: set[str] = dataclasses.field(default_factory=set)
    refs: dict[str, str] = dataclasses.field(default_factory=dict)
    history: dict[str, Commit] = dataclasses.field(default_factory=dict)

    @property
    def owner(self) -> str:
        """The namespace it lives in."""
        return self.name.partition("/")[0]

    @property
    def pull_requests(self) -> int:
        """How many pull requests it has."""
        return sum(ref.startswith("refs/pr/") for ref in self.refs)

    def ref(self, revision: str) -> str:
        """The full name of a branch, tag or pull request; HubError where there is none."""
        for name in (revision, f"refs/heads/{revision}", f"refs/tags/{revision}"):
            if name in self.refs:
                return name
        raise HubError(404, f"Invalid rev id: {revision}", "RevisionNotFound")

    def at(self, revision: str) -> Commit:
        """The commit that a revision (name or commit id) stands for."""
        return self.history.get(revision) or self.history[self.refs[self.ref(revision)]]

    def add_commit(self, ref: str, base: Commit | None, files: Mapping[str, Blob], user: str, title: str) -> Commit:
        """Put a commit on top of `base`, and let `ref` point to it."""
        title, _, description = title.partition("\n")
        parent = base.oid if base else None
        oid = hashlib.sha1(f"{self.name} {parent} {len(self.history)} {title}".encode()).hexdigest()
        self.history[oid] = commit = Commit(oid, title, description, parent, user, dict(files))
        self.refs[ref] = oid
        return commit

    def log(self, revision: str) -> list[Commit]:
        """The commits of a revision, the newest first."""
        commits = [self.at(revision)]
        while (parent := commits[-1].parent) is not None:
            commits.append(self.history[parent])
        return commits


class Hub:
    """Users, tokens, repositories and stored objects, with the rules of access."""

    def __init__(self) -> None:
        roles = {WRITE_TOKEN: "write", READ_TOKEN: "read", PR_TOKEN: "pr"}
        self.tokens = {token: Token(USER, role) for token, role in roles.items()}
        self.orgs: dict[str, set[str]] = {}
        self.repos: dict[tuple[str, str], Repo] = {}
        self.objects: dict[str, bytes] = {}

    def identify(self, authorization: str) -> Token | None:
        """Whose request it is: None without a token, HubError with an unknown one."""
        token = authorization.removeprefix("Bearer ").strip()
        if token and token not in self.tokens:
            raise HubError(401, "Invalid credentials in Authorization header")
        return self.tokens.get(token)

    def find(self, kind: str, name: str, token: Token | None) -> Repo:
        """A repository that this token may see."""
        repo = self.repos.get((kind, name))
        if repo is None or (repo.private and not self._is_member(repo.owner, token)):
            raise HubError(404 if token else 401, "Repository not found", "RepoNotFound")
        return repo

    def check_content(self, repo: Repo, token: Token | None) -> None:
        """Refuse the files of a gated repository to those who were not let in."""
        if repo.gated and not self._is_member(repo.owner, token) and (token is None or token.user not in repo.granted):
            message = f"Access to dataset {repo.name} is restricted. You must have access to it and be authenticated."
            raise HubError(403 if token else 401, message, "GatedRepo")

    def check_write(self, owner: str, token: Token | None, pull_request: bool = False) -> Token:
        """Refuse those who may not write; what a pull request needs is less."""
        if token is None:
            raise HubError(401, "Invalid username or password.")
        if pull_request and token.role in ("write", "pr"):
            return token
        if token.role != "write" or not self._is_member(owner, token):
            message = "Forbidden: you don't have the rights to write; pass `create_pr=1` to create a Pull Request."
            raise HubError(403, message)
        return token

    def create(self, kind: str, name: str, user: str, private: bool = False) -> Repo:
        """A new repository with its first commit; HubError where the name is taken."""
        if (kind, name) in self.repos:
            raise HubError(409, f"You already created this {kind} repo: {name}")
        repo = self.repos[kind, name] = Repo(kind, name, private)
        repo.add_commit("refs/heads/main", None, {".gitattributes": Blob(GITATTRIBUTES, False)}, user, "initial commit")
        return repo

    def _is_member(self, owner: str, token: Token | None) -> bool:
        return token is not None and (token.user == owner or token.user in self.orgs.get(owner, ()))


def is_large(path: str, size: int) -> bool:
    """Whether a file goes to large file storage."""
    return path.endswith(LFS_SUFFIXES) or size >= LFS_FROM_BYTES


def apply_operation(files: dict[str, Blob], operation: Mapping[str, Any], objects: Mapping[str, bytes]) -> None:
    """Do one line of a commit to the files."""
    value = operation["value"]
    path = value["path"]
    match operation["key"]:
        case "file":
            files[path] = Blob(base64.b64decode(value["content"]), False)
        case "lfsFile" if value["oid"] in objects:
            files[path] = Blob(objects[value["oid"]], True)
        case "lfsFile":
            raise HubError(400, f"LFS pointer pointed to a file that does not exist: {path}")
        case "deletedFile" if path in files:
            del files[path]
        case "deletedFile":
            raise HubError(404, f"A file with this name doesn't exist: {path}", "EntryNotFound")
        case "deletedFolder":
            for name in [name for name in files if name.startswith(path.rstrip("/") + "/")]:
                del files[name]
        case key:
            raise HubError(400, f"unknown operation {key!r}")


def list_tree(commit: Commit, folder: str, recursive: bool) -> list[dict[str, object]]:
    """The entries below a folder: its folders, then its files, each in the order of their names."""
    prefix = f"{folder}/" if folder else ""
    folders: dict[str, None] = {}
    files = []
    for path in sorted(commit.files):
        if not path.startswith(prefix):
            continue
        parts = path.removeprefix(prefix).split("/")
        depth = len(parts) if recursive else min(2, len(parts))
        folders |= dict.fromkeys(prefix + "/".join(parts[:n]) for n in range(1, depth))
        if recursive or len(parts) == 1:
            files.append(commit.files[path].describe(path))
    if folder and not files and not folders:
        raise HubError(404, f"{folder} does not exist on this revision", "EntryNotFound")
    return [describe_folder(path) for path in folders] + files


def with_last_commit(entry: Mapping[str, object], commit: Commit) -> dict[str, object]:
    """An entry as `expand` wants it: here the revision's own commit stands for the last that changed the file."""
    return {**entry, "lastCommit": {"id": commit.oid, "title": commit.title, "date": DATE}}


def describe_folder(path: str) -> dict[str, object]:
    """A folder's entry in tree and paths-info."""
    return {"type": "directory", "oid": hashlib.sha1(path.encode()).hexdigest(), "size": 0, "path": path}


# ---------------------------------------------------------------------------------------------------------------------
# HTTP
# ---------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Failure:
    """A scripted refusal of the next `times` requests whose method and path fit."""

    method: str
    path: str
    status: int
    times: int
    headers: Mapping[str, str]

    def strikes(self, request: web.Request) -> bool:
        """Whether it is this request's turn; counts down."""
        due = self.times > 0 and request.method == self.method and self.path in request.path
        self.times -= due
        return due


class Routes:
    """What the clients call."""

    def __init__(self, hub: Hub) -> None:
        self.hub = hub
        self.requests: Counter[str] = Counter()
        self.unknown: Counter[str] = Counter()
        self.bytes_served: Counter[str] = Counter()
        self.failures: list[Failure] = []
        self.parts: dict[str, dict[int, bytes]] = {}
        self.tree_page_size = 1000
        self.multipart_from_bytes = 16 * 1024 * 1024
        self.multipart_chunk_bytes = 8 * 1024 * 1024

    def application(self) -> web.Application:
        """The aiohttp application with all routes."""
        app = web.Application(client_max_size=1 << 32, middlewares=[self._guard()])
        repo = "/api/{kind:models|datasets|spaces}/{owner}/{name}"
        files = "/{prefix:(?:datasets/|spaces/)?}{owner}/{name}"
        app.router.add_routes(
            [
                web.get("/api/whoami-v2", self.whoami),
                web.post("/api/validate-yaml", self.validate_yaml),
                web.post("/api/repos/create", self.create_repo),
                web.delete("/api/repos/delete", self.delete_repo),
                web.get(repo, self.repo_info),
                web.get(repo + "/revision/{revision}", self.repo_info),
                web.get(repo + "/auth-check", self.auth_check),
                web.get(repo + "/auth-check/write", self.auth_check_write),
                web.get(repo + "/refs", self.refs),
                web.get(repo + "/commits/{revision}", self.commits),
                web.get(repo + "/tree/{revision}", self.tree),
                web.get(repo + "/tree/{revision}/{path:.+}", self.tree),
                web.post(repo + "/paths-info/{revision}", self.paths_info),
                web.post(repo + "/preupload/{revision}", self.preupload),
                web.post(repo + "/commit/{revision}", self.commit),
                web.post(repo + "/branch/{revision}", self.create_branch),
                web.delete(repo + "/branch/{revision}", self.delete_branch),
                web.post(files + ".git/info/lfs/objects/batch", self.lfs_batch),
                web.put("/lfs/objects/{oid}", self.lfs_put),
                web.put("/lfs/parts/{oid}/{number}", self.lfs_put_part),
                web.post("/lfs/complete/{oid}", self.lfs_complete),
                web.post("/lfs/verify", self.lfs_verify),
                web.get("/lfs/objects/{oid}", self.lfs_get),
                web.get(files + "/resolve/{revision}/{path:.+}", self.resolve),
            ]
        )
        return app

    def _guard(self) -> Any:
        @web.middleware
        async def guard(
            request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
        ) -> web.StreamResponse:
            resource = request.match_info.route.resource
            if resource is None:
                self.unknown[f"{request.method} {request.path}"] += 1
                return refuse(HubError(404, "Sorry, we can't find the page you are looking for."))
            self.requests[f"{request.method} {resource.canonical}"] += 1
            failure = next((failure for failure in self.failures if failure.strikes(request)), None)
            if failure and not failure.status:
                if request.transport:
                    request.transport.abort()
                raise web.HTTPServiceUnavailable  # which nobody hears
            if failure:
                return web.json_response({"error": "scripted"}, status=failure.status, headers=failure.headers)
            try:
                return await handler(request)
            except HubError as error:
                return refuse(error)

        return guard

    # -- who and which

    def _token(self, request: web.Request) -> Token | None:
        return self.hub.identify(request.headers.get("Authorization", ""))

    def _repo(self, request: web.Request) -> Repo:
        names = request.match_info
        kind = (names.get("kind") or names["prefix"].rstrip("/") or "models").removesuffix("s")
        return self.hub.find(kind, f"{names['owner']}/{names['name']}", self._token(request))

    def _commit(self, request: web.Request) -> Commit:
        return self._repo(request).at(request.match_info.get("revision", "main"))

    async def whoami(self, request: web.Request) -> web.Response:
        """The token's user."""
        token = self._token(request)
        if token is None:
            raise HubError(401, "Invalid username or password.")
        orgs = [{"type": "org", "name": org} for org, members in self.hub.orgs.items() if token.user in members]
        access = {"displayName": "test", "role": "write" if token.role == "write" else "read", "createdAt": DATE}
        user = {"type": "user", "id": "0" * 24, "name": token.user, "fullname": token.user, "isPro": False}
        return web.json_response(
            user | {"orgs": orgs, "auth": {"type": "access_token", "accessToken": access}, "canPay": False}
        )

    async def validate_yaml(self, request: web.Request) -> web.Response:
        """No card is refused."""
        return web.json_response({"errors": [], "warnings": []})

    # -- repositories

    async def create_repo(self, request: web.Request) -> web.Response:
        """A new repository."""
        token, body = self._token(request), await request.json()
        owner = body.get("organization") or (token.user if token else "")
        user = self.hub.check_write(owner, token).user
        kind, name = body.get("type") or "model", f"{owner}/{body['name']}"
        private = body.get("visibility") == "private" or bool(body.get("private"))
        url = page_url(request, kind, name)
        try:
            self.hub.create(kind, name, user, private)
        except HubError as error:
            # clients that say `exist_ok` read the address from the refusal
            error.body["url"] = url
            raise
        return web.json_response({"url": url, "name": name, "id": "0" * 24})

    async def delete_repo(self, request: web.Request) -> web.Response:
        """A repository less."""
        token, body = self._token(request), await request.json()
        owner = body.get("organization") or (token.user if token else "")
        self.hub.check_write(owner, token)
        repo = self.hub.find(body.get("type") or "model", f"{owner}/{body['name']}", token)
        del self.hub.repos[repo.kind, repo.name]
        return web.json_response({})

    async def repo_info(self, request: web.Request) -> web.Response:
        """The repository at a revision, with its files' names."""
        repo, commit = self._repo(request), self._commit(request)
        blobs = "blobs" in request.query
        siblings = [{"rfilename": path} | (_blob_info(blob) if blobs else {}) for path, blob in commit.files.items()]
        info = {
            "_id": "0" * 24,
            "id": repo.name,
            "author": repo.owner,
            "sha": commit.oid,
            "lastModified": DATE,
            "createdAt": DATE,
            "private": repo.private,
            "gated": "auto" if repo.gated else False,
            "disabled": False,
            "downloads": 0,
            "likes": 0,
            "tags": [],
            "siblings": siblings,
        }
        return web.json_response(info)

    async def auth_check(self, request: web.Request) -> web.Response:
        """200 to those who may read."""
        self.hub.check_content(self._repo(request), self._token(request))
        return web.json_response({})

    async def auth_check_write(self, request: web.Request) -> web.Response:
        """200 to those who may write."""
        self.hub.check_write(self._repo(request).owner, self._token(request))
        return web.json_response({})

    async def refs(self, request: web.Request) -> web.Response:
        """Branches, tags and pull requests."""
        groups: dict[str, list[dict[str, str]]] = {"branches": [], "tags": [], "converts": [], "pullRequests": []}
        keys = {"heads": "branches", "tags": "tags", "convert": "converts", "pr": "pullRequests"}
        for ref, oid in self._repo(request).refs.items():
            _, group, name = ref.split("/", 2)
            groups[keys[group]].append({"name": name, "ref": ref, "targetCommit": oid})
        return web.json_response(groups)

    async def commits(self, request: web.Request) -> web.Response:
        """The history of a revision."""
        log = self._repo(request).log(request.match_info["revision"])
        return web.json_response([_commit_entry(commit) for commit in log])

    async def create_branch(self, request: web.Request) -> web.Response:
        """A new branch from a starting point, or from main."""
        repo, name = self._repo(request), request.match_info["revision"]
        self.hub.check_write(repo.owner, self._token(request))
        body = json.loads(await request.read() or b"{}")
        if f"refs/heads/{name}" in repo.refs:
            raise HubError(409, f"Reference already exists: {name}")
        repo.refs[f"refs/heads/{name}"] = repo.at(body.get("startingPoint") or "main").oid
        return web.json_response({})

    async def delete_branch(self, request: web.Request) -> web.Response:
        """A branch less."""
        repo = self._repo(request)
        self.hub.check_write(repo.owner, self._token(request))
        del repo.refs[repo.ref(request.match_info["revision"])]
        return web.json_response({})

    # -- files

    async def tree(self, request: web.Request) -> web.Response:
        """The entries below a folder, page by page."""
        commit = self._commit(request)
        recursive = request.query.get("recursive", "false").lower() in ("true", "1")
        entries = list_tree(commit, request.match_info.get("path", ""), recursive)
        start = int(request.query.get("cursor", "0"))
        end = start + self.tree_page_size
        url = request.url.update_query(cursor=str(end))
        headers = {"Link": f'<{url}>; rel="next"'} if end < len(entries) else {}
        page = [with_last_commit(entry, commit) for entry in entries[start:end]]
        return web.json_response(page, headers=headers)

    async def paths_info(self, request: web.Request) -> web.Response:
        """The entries with the given paths; missing ones are left out."""
        commit, form = self._commit(request), await request.post()
        found = []
        for path in map(str, form.getall("paths", [])):
            if path in commit.files:
                found.append(commit.files[path].describe(path))
            elif any(name.startswith(path.rstrip("/") + "/") for name in commit.files):
                found.append(describe_folder(path))
        return web.json_response([with_last_commit(entry, commit) for entry in found])

    async def resolve(self, request: web.Request) -> web.StreamResponse:
        """A file's content, or the way to it in large file storage."""
        repo, commit = self._repo(request), self._commit(request)
        self.hub.check_content(repo, self._token(request))
        path = request.match_info["path"]
        blob = commit.files.get(path)
        if blob is None:
            raise HubError(404, "Entry not found", "EntryNotFound")
        headers = {"X-Repo-Commit": commit.oid, "ETag": f'"{blob.etag}"', "Accept-Ranges": "bytes"}
        if not blob.lfs:
            self.bytes_served[path] += len(blob.content) if request.method == "GET" else 0
            return ranged(request, blob.content, headers)
        self.hub.objects[blob.sha256] = blob.content
        headers |= {"X-Linked-Size": str(len(blob.content)), "X-Linked-Etag": f'"{blob.sha256}"'}
        # clients follow a redirect on the same host for the file's headers: the storage must be another one
        storage = request.url.with_host("localhost").with_path(f"/lfs/objects/{blob.sha256}").with_query(path=path)
        return web.Response(status=302, headers=headers | {"Location": str(storage)})

    async def lfs_get(self, request: web.Request) -> web.StreamResponse:
        """Stored bytes, whole or a range."""
        content = self.hub.objects[request.match_info["oid"]]
        response = ranged(request, content, {"Accept-Ranges": "bytes", "ETag": f'"{request.match_info["oid"]}"'})
        if request.method == "GET" and isinstance(response.body, bytes):
            self.bytes_served[request.query.get("path", "")] += len(response.body)
        return response

    # -- uploads and commits

    def _writer(self, request: web.Request) -> tuple[Repo, Token]:
        repo = self._repo(request)
        pull_request = "create_pr" in request.query or request.match_info.get("revision", "").startswith("refs/pr/")
        return repo, self.hub.check_write(repo.owner, self._token(request), pull_request)

    async def preupload(self, request: web.Request) -> web.Response:
        """Which files go as text, which as large files, and what is there already."""
        repo, _ = self._writer(request)
        current = repo.at(request.match_info["revision"]).files
        asked = (await request.json())["files"]
        answers = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if is_large(file["path"], file["size"]) else "regular",
                "shouldIgnore": False,
                "oid": current[file["path"]].etag if file["path"] in current else None,
            }
            for file in asked
        ]
        return web.json_response({"files": answers})

    async def commit(self, request: web.Request) -> web.Response:
        """One commit in NDJSON: a header, then operations; refused if the parent has moved on."""
        repo, token = self._writer(request)
        header, *operations = [json.loads(line) for line in (await request.read()).splitlines() if line.strip()]
        ref = repo.ref(request.match_info["revision"])
        base = repo.at(ref)
        if header["value"].get("parentCommit") not in (None, base.oid):
            raise HubError(412, "A commit has happened since. Please refresh and try again.")
        files = dict(base.files)
        for operation in operations:
            apply_operation(files, operation, self.hub.objects)
        number = repo.pull_requests + 1 if "create_pr" in request.query else None
        target = f"refs/pr/{number}" if number else ref
        title = f"{header['value']['summary']}\n{header['value'].get('description', '')}"
        commit = repo.add_commit(target, base, files, token.user, title)
        url = page_url(request, repo.kind, repo.name)
        answer = {"success": True, "commitOid": commit.oid, "commitUrl": f"{url}/commit/{commit.oid}", "hookOutput": ""}
        return web.json_response(answer | ({"pullRequestUrl": f"{url}/discussions/{number}"} if number else {}))

    async def lfs_batch(self, request: web.Request) -> web.Response:
        """Where to put large files; nothing for those that are there."""
        repo = self._repo(request)
        self.hub.check_write(repo.owner, self._token(request), pull_request=True)
        objects = (await request.json())["objects"]
        answers = [self._upload_actions(request, item["oid"], item["size"]) for item in objects]
        return web.json_response({"transfer": "basic", "objects": answers})

    def _upload_actions(self, request: web.Request, oid: str, size: int) -> dict[str, object]:
        answer: dict[str, object] = {"oid": oid, "size": size}
        if oid in self.hub.objects:
            return answer
        base, chunk = f"{origin(request)}/lfs", self.multipart_chunk_bytes
        upload: dict[str, object] = {"href": f"{base}/objects/{oid}"}
        if size >= self.multipart_from_bytes:
            numbers = range(1, -(-size // chunk) + 1)
            parts = {str(number): f"{base}/parts/{oid}/{number}" for number in numbers}
            upload = {"href": f"{base}/complete/{oid}", "header": {"chunk_size": str(chunk)} | parts}
        return answer | {"actions": {"upload": upload, "verify": {"href": f"{base}/verify"}}}

    async def lfs_put(self, request: web.Request) -> web.Response:
        """A large file in one piece."""
        return self._store(request.match_info["oid"], await request.read())

    async def lfs_put_part(self, request: web.Request) -> web.Response:
        """One part of a large file."""
        content, names = await request.read(), request.match_info
        self.parts.setdefault(names["oid"], {})[int(names["number"])] = content
        return web.Response(headers={"ETag": f'"{hashlib.md5(content).hexdigest()}"'})

    async def lfs_complete(self, request: web.Request) -> web.Response:
        """All parts are there: join them in the order given."""
        body = await request.json()
        parts = self.parts.pop(request.match_info["oid"])
        return self._store(body["oid"], b"".join(parts[part["partNumber"]] for part in body["parts"]))

    def _store(self, oid: str, content: bytes) -> web.Response:
        if hashlib.sha256(content).hexdigest() != oid:
            raise HubError(400, f"the content is not {oid}")
        self.hub.objects[oid] = content
        return web.json_response({})

    async def lfs_verify(self, request: web.Request) -> web.Response:
        """Whether an object is there with its size."""
        body = await request.json()
        if len(self.hub.objects.get(body["oid"], b"")) != body["size"]:
            raise HubError(404, "Object not found")
        return web.json_response({})


def refuse(error: HubError) -> web.Response:
    """An error as the Hub sends it: the clients read the headers."""
    return web.json_response(error.body, status=error.status, headers=error.headers)


def origin(request: web.Request) -> str:
    """This server's address, as the client sees it."""
    return f"http://{request.host}"


def page_url(request: web.Request, kind: str, name: str) -> str:
    """The address of a repository's page."""
    prefix = "" if kind == "model" else f"{kind}s/"
    return f"{origin(request)}/{prefix}{name}"


def ranged(request: web.Request, content: bytes, headers: Mapping[str, str]) -> web.Response:
    """The content, or the range that was asked for."""
    wanted = request.http_range
    if "Range" not in request.headers:
        return web.Response(body=content, headers=headers, content_type="application/octet-stream")
    start, stop, _ = slice(wanted.start, wanted.stop).indices(len(content))
    if start >= len(content):
        return web.Response(status=416, headers={"Content-Range": f"bytes */{len(content)}"})
    span = {"Content-Range": f"bytes {start}-{stop - 1}/{len(content)}"}
    return web.Response(status=206, body=content[start:stop], headers={**headers, **span})


def _blob_info(blob: Blob) -> dict[str, object]:
    entry = blob.describe("")
    info: dict[str, object] = {"size": entry["size"], "blobId": entry["oid"]}
    if blob.lfs:
        info["lfs"] = {"sha256": blob.sha256, "size": len(blob.content), "pointerSize": 134}
    return info


def _commit_entry(commit: Commit) -> dict[str, object]:
    authors = [{"user": commit.user}]
    return {"id": commit.oid, "title": commit.title, "message": commit.description, "authors": authors, "date": DATE}


# ---------------------------------------------------------------------------------------------------------------------
# For tests
# ---------------------------------------------------------------------------------------------------------------------


class HubServer:
    """The stand-in, running in a thread for the length of a `with` block."""

    token = WRITE_TOKEN
    read_token = READ_TOKEN
    pr_token = PR_TOKEN

    def __init__(self) -> None:
        self.hub = Hub()
        self.routes = Routes(self.hub)
        self.url = ""
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="hub", daemon=True)

    @property
    def requests(self) -> Counter[str]:
        """How often each route was called: `GET /api/{kind}/{owner}/{name}` and so on."""
        return self.routes.requests

    @property
    def unknown(self) -> Counter[str]:
        """Requests that no route answers, each with a 404."""
        return self.routes.unknown

    @property
    def bytes_served(self) -> Counter[str]:
        """Bytes of content that went out, by the file's path."""
        return self.routes.bytes_served

    def repo(self, name: str, kind: str = "dataset") -> Repo:
        """A repository's state; KeyError where there is none."""
        return self.hub.repos[kind, name]

    def commits(self, name: str, revision: str = "main", kind: str = "dataset") -> list[Commit]:
        """The commits of a revision, the oldest first."""
        return self.repo(name, kind).log(revision)[::-1]

    def files(self, name: str, revision: str = "main", kind: str = "dataset") -> dict[str, bytes]:
        """The files of a revision."""
        return {path: blob.content for path, blob in self.repo(name, kind).at(revision).files.items()}

    def create(self, name: str, *, kind: str = "dataset", private: bool = False, gated: bool = False) -> Repo:
        """A repository that is there before the client comes."""
        repo = self.hub.create(kind, name, name.partition("/")[0], private)
        repo.gated = gated
        return repo

    def put(self, name: str, path: str, content: bytes, kind: str = "dataset") -> Commit:
        """A file on the main branch, in a commit of its own; the repository is created where it is missing."""
        repo = self.hub.repos.get((kind, name)) or self.create(name, kind=kind)
        base = repo.at("main")
        files = {**base.files, path: Blob(content, is_large(path, len(content)))}
        return repo.add_commit("refs/heads/main", base, files, repo.owner, f"Add {path}")

    def put_all(self, name: str, files: Iterable[tuple[str, bytes]]) -> None:
        """Several files."""
        for path, content in files:
            self.put(name, path, content)

    def fail(self, method: str, path: str, status: int, times: int = 1, retry_after: float | None = None) -> None:
        """Refuse the next `times` requests with this method and this text in their path; status 0 hangs up on them."""
        headers = {} if retry_after is None else {"Retry-After": f"{retry_after:g}"}
        self.routes.failures.append(Failure(method, path, status, times, headers))

    def __enter__(self) -> Self:
        self._thread.start()
        if not self._started.wait(10):
            raise RuntimeError("the hub did not start")
        return self

    def __exit__(self, *exc: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        runner = web.AppRunner(self.routes.application(), access_log=None, shutdown_timeout=0.1)
        self._loop.run_until_complete(self._listen(runner))
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())
        self._loop.close()

    async def _listen(self, runner: web.AppRunner) -> None:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self._started.set()


def hub_env(server: HubServer, home: Path, token: str | None = WRITE_TOKEN) -> dict[str, str]:
    """The environment in which the real clients talk to `server`, and keep their files under `home`."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    settings = {
        "HF_ENDPOINT": server.url,
        "HF_HOME": str(home / "hf"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DISABLE_UPDATE_CHECK": "1",
        "HF_HUB_DISABLE_IMPLICIT_TOKEN": "" if token else "1",
        "NO_PROXY": "127.0.0.1,localhost",
    }
    return inherited | settings | ({"HF_TOKEN": token} if token else {})
