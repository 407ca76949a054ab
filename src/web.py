"""Plain HTTP to a server: addresses, and one request at a time without redirects; no client library is needed."""

from __future__ import annotations

import ipaddress
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

from .errors import UsageError


def base_url(url: str) -> str:
    """Return `scheme://host:port/path` without a trailing `/v1`."""
    parts = urllib.parse.urlsplit(url if "://" in url else f"http://{url}")
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise UsageError(f"--server {url!r} is no URL; give one like http://127.0.0.1:8000")
    if parts.username or parts.password:
        raise UsageError(
            "--server holds a user name or password; give the key in the variable that --api-key-env names"
        )
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"


def is_local(url: str) -> bool:
    """Whether the URL names this machine's loopback."""
    host = urllib.parse.urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def fetch(url: str, key: str, body: bytes | None = None, timeout_s: float = 5.0) -> tuple[int, bytes]:
    """GET an address, or POST a JSON body to it; return (status, body). Raises `OSError` where nothing answers."""
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, body, headers)  # noqa: S310 - http(s) only
    # a proxy named in the environment is not for loopback
    proxies = urllib.request.ProxyHandler({} if is_local(url) else None)
    opener = urllib.request.build_opener(_NoRedirect, proxies)
    try:
        with opener.open(request, timeout=timeout_s) as response:
            return int(response.status), response.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: the key is for this server alone."""

    def redirect_request(self, *_: Any) -> None:
        """Refuse."""
        return
