"""Session tokens."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_ray.rollout import Purpose
from forge_ray.serve_proxy.sessions import Session, Sessions, UnknownSession

SECRET = bytes(range(32))
SESSIONS = Sessions(SECRET)


@given(st.text(min_size=0, max_size=80).filter(lambda text: text.isprintable()), st.sampled_from(["train", "eval"]))
def test_a_token_gives_back_what_it_was_issued_for(session: str, purpose: Purpose) -> None:
    token = SESSIONS.issue(session, purpose)
    assert re.fullmatch("[a-z0-9]+", token)
    assert Sessions(SECRET).verify(token) == Session(session, purpose)


@given(st.data())
def test_no_other_spelling_is_valid(data: st.DataObject) -> None:
    token = SESSIONS.issue("g00012-3.0", "train")
    at = data.draw(st.integers(0, len(token) - 1))
    other = data.draw(st.sampled_from("abcdefghijklmnopqrstuvwxyz0123456789-_./=é\n"))
    changed = token[:at] + other + token[at + 1 :]
    if changed != token:
        with pytest.raises(UnknownSession):
            SESSIONS.verify(changed)
    for cut in (token[:at], token + other, token.upper()):
        with pytest.raises(UnknownSession):
            SESSIONS.verify(cut)


def test_tokens_of_another_run_are_unknown() -> None:
    with pytest.raises(UnknownSession):
        SESSIONS.verify(Sessions(b"another secret of 32 bytes......").issue("g1-0.0", "train"))
    with pytest.raises(ValueError):
        Sessions(b"short")
