"""Discussions and pull requests of the stand-in for the Hub: opened, listed, looked at, marked as ready or closed."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from aiohttp import web

from tests.hub_state import DATE, Blob, HubError, Repo

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tests.hub_state import Hub, Token

PAGE = 10  # discussions a page


@dataclasses.dataclass
class Discussion:
    """One of a repository's, numbered from 1; a pull request has the ref `refs/pr/<number>`."""

    num: int
    title: str
    author: str
    status: str
    is_pull_request: bool

    def describe(self, repo: Repo) -> dict[str, Any]:
        """Its entry in a list."""
        return {
            "num": self.num,
            "title": self.title,
            "author": {"name": self.author, "type": "user"},
            "status": self.status,
            "isPullRequest": self.is_pull_request,
            "createdAt": DATE,
            "repo": {"name": repo.name, "type": repo.kind},
        }


class Discussions:
    """What the clients call. `find_repo` and `find_token` answer for a request."""

    def __init__(
        self,
        hub: Hub,
        find_repo: Callable[[web.Request], Repo],
        find_token: Callable[[web.Request], Token | None],
    ) -> None:
        self._hub = hub
        self._find_repo = find_repo
        self._find_token = find_token
        self._there: dict[tuple[str, str], dict[int, Discussion]] = {}

    def routes(self, repo: str) -> Iterable[web.RouteDef]:
        """The routes below a repository's."""
        return [
            web.get(repo + "/discussions", self.list),
            web.post(repo + "/discussions", self.create),
            web.get(repo + "/discussions/{num}", self.details),
            web.post(repo + "/discussions/{num}/status", self.change_status),
        ]

    def of(self, repo: Repo) -> dict[int, Discussion]:
        """A repository's discussions, by number."""
        return self._there.setdefault((repo.kind, repo.name), {})

    def add(self, repo: Repo, title: str, author: str, *, status: str, is_pull_request: bool = True) -> Discussion:
        """A new one."""
        num = 1 + max([*self.of(repo), 0])
        made = self.of(repo)[num] = Discussion(num, title, author, status, is_pull_request)
        if is_pull_request:
            repo.refs.setdefault(f"refs/pr/{num}", repo.refs["refs/heads/main"])
        return made

    def merge(self, repo: Repo, num: int) -> None:
        """Merge a pull request: main gets the files that it changed."""
        head, main = repo.at(f"refs/pr/{num}"), repo.at("main")
        base = next(commit for commit in repo.log(f"refs/pr/{num}") if commit in repo.log("main"))
        changed = {path: blob for path, blob in head.files.items() if base.files.get(path) != blob}
        files: dict[str, Blob] = {path: blob for path, blob in main.files.items() if path in head.files} | changed
        repo.add_commit("refs/heads/main", main, files, repo.owner, f"Merge pull request #{num}")
        self.of(repo)[num].status = "merged"

    async def list(self, request: web.Request) -> web.Response:
        """Page by page, the newest first."""
        repo, query = self._find_repo(request), request.query
        found = [
            one
            for one in reversed(self.of(repo).values())
            if query.get("author") in (None, one.author)
            and not (query.get("type") == "pull_request" and not one.is_pull_request)
            and query.get("status") in (None, "all", one.status)
        ]
        start = PAGE * int(query.get("p", "0"))
        page = [one.describe(repo) for one in found[start : start + PAGE]]
        return web.json_response({"discussions": page, "count": len(found), "start": start})

    async def create(self, request: web.Request) -> web.Response:
        """A new one; a pull request begins as a draft."""
        repo, body = self._find_repo(request), await request.json()
        user = self._hub.check_write(repo.name, self._find_token(request), pull_request=True).user
        is_pull_request = bool(body["pullRequest"])
        status = "draft" if is_pull_request else "open"
        made = self.add(repo, body["title"], user, status=status, is_pull_request=is_pull_request)
        return web.json_response({"num": made.num})

    async def details(self, request: web.Request) -> web.Response:
        """One of them."""
        repo, one = self._one(request)
        more = {"events": [], "changes": {"base": "refs/heads/main"}, "filesWithConflicts": [], "diff": ""}
        return web.json_response(one.describe(repo) | more)

    async def change_status(self, request: web.Request) -> web.Response:
        """Mark one as open or closed: its author may, and who may write."""
        repo, one = self._one(request)
        user = self._hub.check_write(repo.name, self._find_token(request), pull_request=True).user
        if user not in (one.author, repo.owner):
            raise HubError(403, "Forbidden: only its author may change its status")
        one.status = (await request.json())["status"]
        event = {"id": "0" * 24, "type": "status-change", "createdAt": DATE, "author": {"name": user}}
        return web.json_response({"newStatus": event | {"data": {"status": one.status}}})

    def _one(self, request: web.Request) -> tuple[Repo, Discussion]:
        repo = self._find_repo(request)
        num = int(request.match_info["num"])
        if num not in self.of(repo):
            raise HubError(404, f"There is no discussion #{num}", "DiscussionNotFound")
        return repo, self.of(repo)[num]
