"""The state of the stand-in for the Hub: users, tokens, repositories, commits and stored objects, and who may do what.

It knows no HTTP; `tests/hub_routes.py` is how the clients reach it.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

USER = "me"
WRITE_TOKEN = "hf_write"
READ_TOKEN = "hf_read"
PR_TOKEN = "hf_pr"
GITATTRIBUTES = b"*.parquet filter=lfs diff=lfs merge=lfs -text\n"
LFS_SUFFIXES = (".parquet", ".arrow", ".png", ".jpg", ".jpeg", ".webp", ".tiff", ".bmp", ".zip", ".bin", ".safetensors")
LFS_FROM_BYTES = 10 * 1024 * 1024
DATE = "2026-07-16T12:00:00.000Z"


class HubError(Exception):
    """A refusal, with the status and the headers by which the clients tell one refusal from another."""

    def __init__(self, status: int, message: str, code: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": message}
        self.headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})


@dataclasses.dataclass(frozen=True)
class Token:
    """Who holds it, and what it may do: all that its user may (`write`), read that (`read`), or what its scopes say.

    A `fineGrained` one has permissions for entities, such as `{("org", "lab"): ("repo.write",)}`, and global ones.
    """

    user: str
    role: str
    scoped: Mapping[tuple[str, str], tuple[str, ...]] = dataclasses.field(default_factory=dict)
    everywhere: tuple[str, ...] = ()
    reads_gated: bool = True

    def allows(self, permission: str, owner: str, repo: str) -> bool:
        """Whether it carries a permission for a repository of this owner; `repo` is empty for one yet to be made."""
        if self.role != "fineGrained":
            return self.role == "write"
        entities = {("user", owner), ("org", owner), *((kind, repo) for kind in ("dataset", "model", "space") if repo)}
        given = [given for entity, given in self.scoped.items() if entity in entities]
        return permission in {*self.everywhere, *(each for group in given for each in group)}

    def describe(self) -> dict[str, object]:
        """Its entry in whoami."""
        access: dict[str, object] = {"displayName": "test", "role": self.role, "createdAt": DATE}
        if self.role == "fineGrained":
            scoped = [
                {"entity": {"_id": "0" * 24, "type": kind, "name": name}, "permissions": list(permissions)}
                for (kind, name), permissions in self.scoped.items()
            ]
            access["fineGrained"] = {
                "canReadGatedRepos": self.reads_gated,
                "global": list(self.everywhere),
                "scoped": scoped,
            }
        return access


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
        oid = os.urandom(20).hex()  # never that of another stand-in's commit: clients of this process cache by it
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
        reads = {("user", USER): ("repo.content.read",)}
        self.tokens = {
            WRITE_TOKEN: Token(USER, "write"),
            READ_TOKEN: Token(USER, "read"),
            PR_TOKEN: Token(USER, "fineGrained", reads, everywhere=("discussion.write",)),
        }
        self.orgs: dict[str, dict[str, str]] = {}  # organisation → member → role there
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
        if repo is None or (repo.private and not self.is_member(repo.owner, token)):
            raise HubError(404 if token else 401, "Repository not found", "RepoNotFound")
        return repo

    def check_content(self, repo: Repo, token: Token | None) -> None:
        """Refuse the files of a gated repository to those who were not let in."""
        if not repo.gated or self.is_member(repo.owner, token):
            return
        if token is None or token.user not in repo.granted or not token.reads_gated:
            message = f"Access to dataset {repo.name} is restricted. You must have access to it and be authenticated."
            raise HubError(403 if token else 401, message, "GatedRepo")

    def check_write(self, name: str, token: Token | None, pull_request: bool = False) -> Token:
        """Refuse those who may not write to a repository, or in a namespace; what a pull request needs is less."""
        if token is None:
            raise HubError(401, "Invalid username or password.")
        owner = name.partition("/")[0]
        repo = name if "/" in name else ""
        if pull_request and token.allows("discussion.write", owner, repo):
            return token
        role = "admin" if token.user == owner else self.orgs.get(owner, {}).get(token.user)
        if role in (None, "read") or not any(
            token.allows(f"repo.{what}write", owner, repo) for what in ("", "content.")
        ):
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

    def is_member(self, owner: str, token: Token | None) -> bool:
        """Whether a token belongs to a namespace."""
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
