"""What a token may do to a dataset of the Hub, read out of what `whoami` says of it.

What it does not say is left open: the Hub itself refuses in the end, and a field that changes must lock nobody out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

WRITING = frozenset({"repo.write", "repo.content.write"})
CREATING = "repo.write"
PROPOSING = "discussion.write"
ROLES_THAT_READ = frozenset({"read", "no_access"})


@dataclass(frozen=True)
class Rights:
    """What a token may do to one dataset: write to it, create it, propose changes in a pull request.

    `lacks` says what stands in the way, and `advice` what to do about it.
    """

    writes: bool = True
    creates: bool = True
    proposes: bool = True
    lacks: str = ""
    advice: str = ""


def rights_of(user: Mapping[str, Any], repo_id: str) -> Rights:
    """Return what the token of `user` (the answer of `whoami`) may do to a dataset."""
    token = _mapping(_mapping(user.get("auth")).get("accessToken"))
    owner, name = repo_id.split("/")[0], user.get("name")
    match token.get("role"):
        case "read":
            lacks, advice = f"the token of {name!r} can only read", f"use one that can write to {owner!r}"
            return Rights(writes=False, creates=False, proposes=False, lacks=lacks, advice=advice)
        case "fineGrained":
            given = _permissions(token, owner, repo_id)
            return _rights_of_scopes(given, str(name), repo_id) if given else Rights()
        case _:
            lacks = _standing(user, owner)
            advice = f"name an output of your own, or ask to be let into {owner!r}"
            return Rights(writes=False, creates=False, lacks=lacks, advice=advice) if lacks else Rights()


def _rights_of_scopes(given: _Given, name: str, repo_id: str) -> Rights:
    owner = repo_id.split("/")[0]
    if CREATING in given.of_owner:
        return Rights()
    if WRITING & given.here:
        return Rights(
            creates=False,
            lacks=f"the token of {name!r} can write to {repo_id!r} alone, and create nothing",
            advice=f"create the dataset by hand, or give the token write access to all repositories of {owner!r}",
        )
    has = ", ".join(sorted(given.here)) or "none"
    return Rights(
        writes=False,
        creates=False,
        proposes=PROPOSING in given.here,
        lacks=f"the token of {name!r} may not write to {repo_id!r} (its permissions there: {has})",
        advice=f"give it write access to the contents of the repositories of {owner!r}",
    )


@dataclass(frozen=True)
class _Given:
    """A fine-grained token's permissions: for the dataset, and for all that its owner has."""

    here: frozenset[str]
    of_owner: frozenset[str]


def _permissions(token: Mapping[str, Any], owner: str, repo_id: str) -> _Given | None:
    """Return what a fine-grained token carries; None where it says so in words that are not known here."""
    fine = token.get("fineGrained")
    if not isinstance(fine, Mapping) or not isinstance(fine.get("scoped"), list):
        return None
    everywhere = frozenset(_words(fine.get("global")))
    of_owner, here = set(everywhere), set(everywhere)
    for scope in fine["scoped"]:
        entity = _mapping(_mapping(scope).get("entity"))
        if not entity.get("name"):
            return None
        permissions = _words(scope.get("permissions"))
        if entity.get("type") in {"user", "org"} and _same(entity["name"], owner):
            of_owner |= permissions
            here |= permissions
        elif entity.get("type") == "dataset" and _same(entity["name"], repo_id):
            here |= permissions
    return _Given(frozenset(here), frozenset(of_owner))


def _standing(user: Mapping[str, Any], owner: str) -> str:
    """Say why this user can't write in a namespace; nothing where nothing is known against it."""
    name, orgs = str(user.get("name")), user.get("orgs")
    if _same(name, owner) or not isinstance(orgs, list):
        return ""
    known = {str(org.get("name")): org.get("roleInOrg") for org in orgs if isinstance(org, Mapping)}
    ours = next((org for org in known if _same(org, owner)), None)
    if ours is None:
        return f"the token is of {name!r}, who is no member of {owner!r} (but of: {', '.join([name, *known])})"
    return f"{name!r} can only read in {owner!r} (role: {known[ours]})" if known[ours] in ROLES_THAT_READ else ""


def _same(name: object, other: str) -> bool:
    return str(name).lower() == other.lower()


def _words(value: object) -> set[str]:
    return set(map(str, value)) if isinstance(value, list) else set()


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
