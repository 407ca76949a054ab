"""A stand-in for the Hugging Face Hub on loopback, good enough for the real `huggingface_hub` and `datasets` clients.

    with HubServer() as hub:
        hub.put("me/pages", "data/train.parquet", content)
        subprocess.run([sys.executable, "client.py"], env=hub_env(hub, home=tmp_path))
        assert hub.commits("me/out")[-1].title == "..."

`Hub` (tests/hub_state.py) is the state and knows no HTTP; `Routes` (tests/hub_routes.py) is what the clients call, with
the faults of tests/hub_faults.py; `HubServer` runs both in a thread and is what tests hold. Everything is in memory.
Clients reach it through HF_ENDPOINT, with HF_HUB_DISABLE_XET=1: large files of repositories go by the LFS protocol, and
those of buckets (tests/hub_buckets.py) by the Xet protocol, since there is no other way.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import Counter
from typing import TYPE_CHECKING, Self

from aiohttp import web

from tests.hub_buckets import Buckets
from tests.hub_faults import Failure, Hold, Quota, Uploads
from tests.hub_routes import Routes
from tests.hub_state import PR_TOKEN, READ_TOKEN, WRITE_TOKEN, Blob, Commit, Hub, Repo, is_large

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from tests.hub_discussions import Discussions
    from tests.hub_jobs import JobsPlace


class HubServer:
    """The stand-in, running in a thread for the length of a `with` block."""

    token = WRITE_TOKEN
    read_token = READ_TOKEN
    pr_token = PR_TOKEN

    def __init__(self) -> None:
        self.hub = Hub()
        self.routes = Routes(self.hub)
        self.buckets = Buckets(self.routes)
        self.jobs.files_of = self.bucket_files
        self.url = ""
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="hub", daemon=True)

    @property
    def jobs(self) -> JobsPlace:
        """Where jobs run."""
        return self.routes.jobs

    @property
    def discussions(self) -> Discussions:
        """Discussions and pull requests."""
        return self.routes.discussions

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

    def bucket_files(self, name: str) -> dict[str, bytes]:
        """The files of a bucket; KeyError where there is none."""
        return {path: file.content for path, file in self.buckets.buckets[name].files.items()}

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

    def fail(
        self,
        method: str,
        path: str,
        status: int,
        times: int = 1,
        *,
        skip: int = 0,
        retry_after: float | None = None,
        rate_limit: int | None = None,
        late: bool = False,
    ) -> None:
        """Script a refusal of requests with this method and this text in their path (not in their query).

            hub.fail("POST", "/commit/", 412, times=3)                the next three commits
            hub.fail("PUT", "/lfs/objects/", 503, skip=2)             the third upload
            hub.fail("GET", "/resolve/", 0)                           hangs up on the next reader
            hub.fail("POST", "/commit/", 429, retry_after=5)          with `Retry-After: 5`
            hub.fail("GET", "/api/datasets/", 429, rate_limit=5)      with `RateLimit: "api";r=0;t=5`
            hub.fail("POST", "/commit/", 0, late=True)                does the commit, and hangs up

        Of several that fit, the first that is due strikes, and those scripted after it don't count the request. What is
        refused has no effect (but where it is refused `late`), and is counted in `requests`.
        """
        headers = {} if retry_after is None else {"Retry-After": f"{retry_after:g}"}
        if rate_limit is not None:
            headers |= {
                "RateLimit": f'"api";r=0;t={rate_limit}',
                "RateLimit-Policy": '"fixed window";"api";q=500;w=300',
            }
        self.routes.faults.failures.append(Failure(method, path, status, times, headers, skip, late))

    def limit_commits(self, commits: int, window_s: float) -> Quota:
        """Take no more than so many commits, in all repositories together, in a window of time; 429 beyond them."""
        self.routes.faults.quota = quota = Quota(commits, window_s)
        return quota

    def hold(self, method: str, path: str) -> Hold:
        """Keep requests waiting that have this method and this text in their path, for the length of a `with` block."""
        hold = Hold(method, path)
        self.routes.faults.holds.append(hold)
        return hold

    @property
    def uploads(self) -> Uploads:
        """How large files come in: `uploads.expire(2)`, `uploads.bytes_per_s = 1e6`."""
        return self.routes.faults.uploads

    def __enter__(self) -> Self:
        self._thread.start()
        if not self._started.wait(10):
            raise RuntimeError("the hub did not start")
        return self

    def __exit__(self, *exc: object) -> None:
        self.jobs.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        application = self.routes.application()
        application.router.add_routes(self.buckets.routes())
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
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
