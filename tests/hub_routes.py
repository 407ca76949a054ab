"""What the clients call of the stand-in for the Hub: HTTP here, the state in `tests/hub_state.py`."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from typing import TYPE_CHECKING, Any

from aiohttp import web

from tests.hub_discussions import Discussions
from tests.hub_faults import Faults
from tests.hub_jobs import JobsPlace
from tests.hub_state import (
    DATE,
    Blob,
    Commit,
    Hub,
    HubError,
    Repo,
    Token,
    apply_operation,
    describe_folder,
    is_large,
    list_tree,
    with_last_commit,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping


class Routes:
    """What the clients call."""

    def __init__(self, hub: Hub) -> None:
        self.hub = hub
        self.requests: Counter[str] = Counter()
        self.unknown: Counter[str] = Counter()
        self.bytes_served: Counter[str] = Counter()
        self.faults = Faults()
        self.parts: dict[str, dict[int, bytes]] = {}
        self.jobs = JobsPlace(self._check_jobs)
        self.discussions = Discussions(hub, self._repo, self._token)
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
                web.post(repo + "/tag/{revision}", self.create_tag),
                web.delete(repo + "/tag/{revision}", self.delete_tag),
                web.put(repo + "/settings", self.settings),
                web.post(files + ".git/info/lfs/objects/batch", self.lfs_batch),
                web.put("/lfs/objects/{oid}", self.lfs_put),
                web.put("/lfs/parts/{oid}/{number}", self.lfs_put_part),
                web.post("/lfs/complete/{oid}", self.lfs_complete),
                web.post("/lfs/verify", self.lfs_verify),
                web.get("/lfs/objects/{oid}", self.lfs_get),
                web.get(files + "/resolve/{revision}/{path:.+}", self.resolve),
                *self.jobs.routes(),
                *self.discussions.routes(repo),
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
            try:
                for hold in self.faults.holds:
                    await hold.pass_through(request)
                failure = self.faults.due(request)
                response = await handler(request) if failure is None or failure.late else None
            except HubError as error:
                return refuse(error)
            if failure and not failure.status:
                if request.transport:
                    request.transport.abort()
                raise web.HTTPServiceUnavailable  # which nobody hears
            if failure:
                return web.json_response({"error": "scripted"}, status=failure.status, headers=failure.headers)
            assert response is not None
            return response

        return guard

    # -- who and which

    def _token(self, request: web.Request) -> Token | None:
        return self.hub.identify(request.headers.get("Authorization", ""))

    def _check_jobs(self, request: web.Request, namespace: str) -> None:
        self.hub.check_write(namespace, self._token(request))

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
        orgs = [
            {"type": "org", "name": org, "roleInOrg": members[token.user]}
            for org, members in self.hub.orgs.items()
            if token.user in members
        ]
        user = {"type": "user", "id": "0" * 24, "name": token.user, "fullname": token.user, "isPro": False}
        return web.json_response(
            user | {"orgs": orgs, "auth": {"type": "access_token", "accessToken": token.describe()}, "canPay": False}
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
        self.hub.check_write(self._repo(request).name, self._token(request))
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
        self.hub.check_write(repo.name, self._token(request))
        body = json.loads(await request.read() or b"{}")
        if f"refs/heads/{name}" in repo.refs:
            raise HubError(409, f"Reference already exists: {name}")
        repo.refs[f"refs/heads/{name}"] = repo.at(body.get("startingPoint") or "main").oid
        return web.json_response({})

    async def delete_branch(self, request: web.Request) -> web.Response:
        """A branch less."""
        repo = self._repo(request)
        self.hub.check_write(repo.name, self._token(request))
        del repo.refs[repo.ref(request.match_info["revision"])]
        return web.json_response({})

    async def create_tag(self, request: web.Request) -> web.Response:
        """A new tag on a revision."""
        repo, name = self._repo(request), (await request.json())["tag"]
        self.hub.check_write(repo.name, self._token(request))
        if f"refs/tags/{name}" in repo.refs:
            raise HubError(409, f"Reference already exists: {name}")
        repo.refs[f"refs/tags/{name}"] = self._commit(request).oid
        return web.json_response({})

    async def delete_tag(self, request: web.Request) -> web.Response:
        """A tag less."""
        repo, name = self._repo(request), request.match_info["revision"]
        self.hub.check_write(repo.name, self._token(request))
        if repo.refs.pop(f"refs/tags/{name}", None) is None:
            raise HubError(404, f"Invalid rev id: {name}", "RevisionNotFound")
        return web.json_response({})

    async def settings(self, request: web.Request) -> web.Response:
        """Who may see a repository, and who must ask first."""
        repo, body = self._repo(request), await request.json()
        self.hub.check_write(repo.name, self._token(request))
        repo.private = body.get("visibility", "private" if repo.private else "public") == "private"
        repo.gated = bool(body.get("gated", repo.gated))
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
        return repo, self.hub.check_write(repo.name, self._token(request), pull_request)

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
        refused = self.faults.quota and self.faults.quota.refusal()
        if refused:
            return web.json_response({"error": "Too many commits"}, status=429, headers=refused)
        header, *operations = [json.loads(line) for line in (await request.read()).splitlines() if line.strip()]
        ref = repo.ref(request.match_info["revision"])
        base = repo.at(ref)
        if header["value"].get("parentCommit") not in (None, base.oid):
            raise HubError(412, "A commit has happened since. Please refresh and try again.")
        files = dict(base.files)
        for operation in operations:
            apply_operation(files, operation, self.hub.objects)
        title = f"{header['value']['summary']}\n{header['value'].get('description', '')}"
        opens = "create_pr" in request.query
        number = self.discussions.add(repo, title, token.user, status="open").num if opens else None
        target = f"refs/pr/{number}" if number else ref
        commit = repo.add_commit(target, base, files, token.user, title)
        url = page_url(request, repo.kind, repo.name)
        answer = {"success": True, "commitOid": commit.oid, "commitUrl": f"{url}/commit/{commit.oid}", "hookOutput": ""}
        return web.json_response(answer | ({"pullRequestUrl": f"{url}/discussions/{number}"} if number else {}))

    async def lfs_batch(self, request: web.Request) -> web.Response:
        """Where to put large files; nothing for those that are there."""
        repo = self._repo(request)
        self.hub.check_write(repo.name, self._token(request), pull_request=True)
        objects = (await request.json())["objects"]
        answers = [self._upload_actions(request, item["oid"], item["size"]) for item in objects]
        return web.json_response({"transfer": "basic", "objects": answers})

    def _upload_actions(self, request: web.Request, oid: str, size: int) -> dict[str, object]:
        answer: dict[str, object] = {"oid": oid, "size": size}
        if oid in self.hub.objects:
            return answer
        base, chunk = f"{origin(request)}/lfs", self.multipart_chunk_bytes
        ticket = self.faults.uploads.ticket()
        upload: dict[str, object] = {"href": f"{base}/objects/{oid}?ticket={ticket}"}
        if size >= self.multipart_from_bytes:
            numbers = range(1, -(-size // chunk) + 1)
            parts = {str(number): f"{base}/parts/{oid}/{number}?ticket={ticket}" for number in numbers}
            upload = {"href": f"{base}/complete/{oid}", "header": {"chunk_size": str(chunk)} | parts}
        return answer | {"actions": {"upload": upload, "verify": {"href": f"{base}/verify"}}}

    async def lfs_put(self, request: web.Request) -> web.Response:
        """A large file in one piece."""
        return self._store(request.match_info["oid"], await self._received(request))

    async def _received(self, request: web.Request) -> bytes:
        if self.faults.uploads.is_dead(request):
            raise HubError(403, "Request has expired")
        return await self.faults.uploads.receive(request)

    async def lfs_put_part(self, request: web.Request) -> web.Response:
        """One part of a large file."""
        content, names = await self._received(request), request.match_info
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
