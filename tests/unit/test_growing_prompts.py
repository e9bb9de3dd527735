"""Prompts that grow are tokenised from where they grew, with exactly the ids of the whole text, whatever the tokenizer makes of a start."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from forge_ray.serve_proxy.growing_prompts import BLOCK, BUDGET, GrowingPrompts, common, marks

CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "naïve café 漢字 👩‍💻 \n\n  x = {'a': 1}\t",
    "aaaa abab baba <|im <|end im_start|>",
] * 20
START, END = "<|im_start|>", "<|im_end|>"


def byte_level(prefix: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return tokenizer


def metaspace(scheme: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>"]))
    return tokenizer


def prepended() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>"]))
    return tokenizer


def word_piece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.train_from_iterator(CORPUS, trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]"]))
    return tokenizer


MAKERS: dict[str, Callable[[], Tokenizer]] = {
    "byte level": lambda: byte_level(False),
    "byte level, prefix space": lambda: byte_level(True),
    "metaspace first": lambda: metaspace("first"),
    "metaspace always": lambda: metaspace("always"),
    "prepend": prepended,
    "word piece": word_piece,
}


@pytest.fixture(scope="module", params=list(MAKERS))
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    made = MAKERS[request.param]()
    made.add_special_tokens([AddedToken(START, normalized=False), AddedToken(END, normalized=False)])
    return made


def encoder(tokenizer: Tokenizer) -> Callable[[str], list[int]]:
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


def found(tokenizer: Tokenizer) -> dict[str, int]:
    return marks(tokenizer.get_added_tokens_decoder().values(), encoder(tokenizer))


pieces = st.sampled_from(
    [START, END, " ", "  ", "\n", "the fox", "a", "é", "漢", "👩‍💻", "<|im", "_end|>", "x = {'a': 1}", "<|im_end|", "|>", "▁", ""]
)
texts = st.lists(pieces, max_size=12).map("".join)


@settings(max_examples=120, deadline=None)
@given(changes=st.lists(st.tuples(st.integers(0, 60), texts, st.sampled_from(["a", "b"])), min_size=1, max_size=12))
def test_the_ids_are_those_of_the_whole_text(tokenizer: Tokenizer, changes: list[tuple[int, str, str]]) -> None:
    """Two sessions whose prompts grow, are cut anywhere and go on in another way."""
    encode = encoder(tokenizer)
    prompts, last = GrowingPrompts(found(tokenizer)), {"a": "", "b": ""}
    for cut, more, session in changes:
        text = last[session] = (last[session][: len(last[session]) - cut] if cut < 30 else last[session]) + more
        plan = prompts.plan(session, text)
        assert prompts.keep(plan, encode(plan.rest)) == encode(text)


def test_only_what_is_new_is_encoded(tokenizer: Tokenizer) -> None:
    encode, prompts = encoder(tokenizer), GrowingPrompts(found(tokenizer))
    text, encoded = "", []
    for turn in range(50):
        text += f"{START}user\nthe fox jumps {turn}{END}\n{START}assistant\nthe lazy dog{END}\n"
        plan = prompts.plan("s", text)
        encoded.append(len(plan.rest))
        assert prompts.keep(plan, encode(plan.rest)) == encode(text)
    assert max(encoded[1:]) < 120 < len(text)
    other = prompts.plan("t", text)
    assert other.rest == text, "another session knows nothing of it"


def test_what_is_kept_is_bounded() -> None:
    tokenizer = MAKERS["byte level"]()
    tokenizer.add_special_tokens([AddedToken(END, normalized=False)])
    encode, prompts = encoder(tokenizer), GrowingPrompts(found(tokenizer), budget=200_000)
    for number in range(200):
        plan = prompts.plan(f"s{number % 50}", f"{number} the quick brown fox{END}" * 20)
        prompts.keep(plan, encode(plan.rest))
        assert prompts.used < 220_000
    for number in range(50):
        prompts.forget(f"s{number}")
    assert prompts.used == 0


def test_many_long_sessions_fit_the_budget() -> None:
    """64 of 128k tokens, which are used in turns: none goes before its next turn."""
    text = "word and more " * 24_000
    prompts = GrowingPrompts({END: 7})
    for turn in range(2):
        for number in range(64):
            plan = prompts.plan(f"s{number}", text + END + "x" * turn)
            assert (plan.rest == END + "x") == (turn == 1)
            prompts.keep(plan, [7, 1] if turn else [1] * 128_000 + [7])
    assert prompts.used <= BUDGET


def test_side_conversations_keep_their_own() -> None:
    """A main agent and sub-agents take turns: each goes on from its own prompt."""
    tokenizer = MAKERS["byte level"]()
    tokenizer.add_special_tokens([AddedToken(END, normalized=False)])
    encode, prompts = encoder(tokenizer), GrowingPrompts(found(tokenizer))
    talks = {name: f"{name} says something long to begin with{END}" for name in ("main", "one", "two")}
    for turn in range(10):
        for name in talks:
            talks[name] += f"\nturn {turn} of {name}{END}"
            plan = prompts.plan("s", talks[name])
            assert prompts.keep(plan, encode(plan.rest)) == encode(talks[name])
            assert turn == 0 or len(plan.rest) < 60


@pytest.mark.parametrize(
    "token",
    [
        AddedToken("<|x|>", rstrip=True, normalized=False),
        AddedToken("<|x|>", lstrip=True, normalized=False),
        AddedToken("<|x|>", single_word=True, normalized=False),
        AddedToken("<|x|>", normalized=True),
        AddedToken("||", normalized=False),
        AddedToken(f"{END}x", normalized=False),
    ],
    ids=str,
)
def test_tokens_that_look_around_are_no_marks(token: AddedToken) -> None:
    tokenizer = MAKERS["byte level"]()
    tokenizer.add_special_tokens([token, AddedToken(END, normalized=False), AddedToken("[ok]", normalized=False)])
    have = found(tokenizer)
    assert token.content not in have and "[ok]" in have
    assert (END in have) == (END not in token.content)


def test_marks_that_cannot_be_counted_are_not_used() -> None:
    """Ids and text that disagree (a tokenizer that maps a mark to something else here) end reuse, not exactness."""
    prompts = GrowingPrompts({END: 7})
    plan = prompts.plan("s", f"a{END}b")
    assert prompts.keep(plan, [1, 2, 3]) == [1, 2, 3]
    assert prompts.plan("s", f"a{END}bc").rest == f"a{END}bc"


@given(st.integers(0, 3 * BLOCK), st.integers(0, 40), st.integers(0, 40))
def test_common(length: int, one: int, other: int) -> None:
    same = "ab" * (length // 2)
    assert common(same + "x" * one, same + "y" * other) == len(same)
    assert common(same + "x" * one, same + "x" * other) == len(same) + min(one, other)
