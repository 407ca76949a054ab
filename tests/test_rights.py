"""What a token may do to a dataset, read out of what the Hub says of it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from src.rights import Rights, rights_of
from tests.hub_state import Token

USER = {"name": "me", "orgs": [{"name": "lab", "roleInOrg": "write"}, {"name": "club", "roleInOrg": "read"}]}


def whoami(token: Token) -> dict[str, Any]:
    return USER | {"auth": {"type": "access_token", "accessToken": token.describe()}}


def scoped(*scopes: tuple[str, str, str], everywhere: str = "") -> Token:
    return Token("me", "fineGrained", {scope[:2]: (scope[2],) for scope in scopes}, tuple(everywhere.split()))


def may(rights: Rights) -> str:
    """The rights in letters: write, create, propose."""
    flags = {"w": rights.writes, "c": rights.creates, "p": rights.proposes}
    return "".join(letter for letter, is_so in flags.items() if is_so)


@pytest.mark.parametrize(
    ("token", "repo_id", "rights"),
    [
        (Token("me", "write"), "me/out", "wcp"),
        (Token("me", "write"), "Me/out", "wcp"),
        (Token("me", "write"), "lab/out", "wcp"),
        (Token("me", "write"), "club/out", "p"),
        (Token("me", "write"), "other/out", "p"),
        (Token("me", "read"), "me/out", ""),
        (scoped(("user", "me", "repo.write")), "me/out", "wcp"),
        (scoped(("user", "me", "repo.write")), "lab/out", ""),
        (scoped(("org", "lab", "repo.write")), "lab/out", "wcp"),
        (scoped(("org", "lab", "repo.content.write")), "lab/out", "wp"),
        (scoped(("dataset", "me/out", "repo.write")), "me/out", "wp"),
        (scoped(("dataset", "me/out", "repo.write")), "me/other", ""),
        (scoped(("model", "me/out", "repo.write")), "me/out", ""),
        (scoped(("user", "me", "repo.content.read")), "me/out", ""),
        (scoped(("user", "me", "repo.content.read"), everywhere="discussion.write"), "me/out", "p"),
        (scoped(("user", "me", "discussion.write")), "me/out", "p"),
        (scoped(("user", "me", "discussion.write")), "lab/out", ""),
    ],
)
def test_a_token_may_what_the_hub_says(token: Token, repo_id: str, rights: str) -> None:
    found = rights_of(whoami(token), repo_id)
    assert may(found) == rights
    assert bool(found.lacks and found.advice) == (not found.creates), "what is missing is said"


@pytest.mark.parametrize(
    "access",
    [
        {},
        {"role": "god"},
        {"role": "fineGrained"},
        {"role": "fineGrained", "fineGrained": {"scoped": "all"}},
        {"role": "fineGrained", "fineGrained": {"scoped": [{"entity": {"_id": "0"}, "permissions": []}]}},
        {"role": "fineGrained", "fineGrained": {"scoped": ["repo.write"]}},
    ],
)
def test_what_is_said_in_words_that_are_not_known_locks_nobody_out(access: dict[str, Any]) -> None:
    assert may(rights_of({"name": "me", "auth": {"accessToken": access}}, "me/out")) == "wcp"
    assert may(rights_of({"name": "me", "auth": {"accessToken": access}}, "other/out")) == "wcp", "no word of orgs"


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.text(max_size=5)
    | st.sampled_from(["me", "lab", "read", "fineGrained", "repo.write"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["name", "orgs", "role", "fineGrained", "scoped", "global", "entity", "permissions"]), inner
        )
    ),
    max_leaves=12,
)


@given(JSON, JSON, JSON)
def test_no_answer_of_the_hub_is_too_strange(access: Any, orgs: Any, fine: Any) -> None:
    user = {"name": "me", "orgs": orgs, "auth": {"accessToken": access}}
    rights_of(user, "me/out")
    user["auth"] = {"accessToken": {"role": "fineGrained", "fineGrained": fine}}
    rights_of(user, "lab/out")
