"""Reward files: what is a reward, and which error everything else is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from forge_ray.tasks import verifier
from forge_ray.tasks.verifier import MAX_BYTES, Rewards, VerifierError, parse_rewards


@pytest.mark.parametrize(
    ("text", "reward"),
    [("1", 1.0), ("0\n", 0.0), (" -0.5 \n", -0.5), ("1e-3", 1e-3), (".25", 0.25), ("3.", 3.0), ("-1e12", -1e12), ("\ufeff1\n", 1.0)],
)
def test_one_number_in_reward_txt(tmp_path: Path, text: str, reward: float) -> None:
    (tmp_path / "reward.txt").write_text(text)
    assert parse_rewards(tmp_path) == Rewards(reward, {"reward": reward})


@pytest.mark.parametrize(
    ("text", "reward", "rewards"),
    [
        ('{"reward": 0.5, "speed": 3}', 0.5, {"reward": 0.5, "speed": 3.0}),
        ('{"accuracy": true}', 1.0, {"accuracy": 1.0}),
        ('{"reward": false}', 0.0, {"reward": 0.0}),
    ],
)
def test_named_numbers_in_reward_json(tmp_path: Path, text: str, reward: float, rewards: dict[str, float]) -> None:
    (tmp_path / "reward.json").write_text(text)
    (tmp_path / "reward.txt").write_text("0.125")  # json wins
    assert parse_rewards(tmp_path) == Rewards(reward, rewards)


@pytest.mark.parametrize(
    ("name", "text", "error"),
    [
        ("reward.txt", "", verifier.RewardEmpty),
        ("reward.txt", " \n", verifier.RewardEmpty),
        ("reward.txt", "1 0", verifier.RewardMalformed),
        ("reward.txt", "one", verifier.RewardMalformed),
        ("reward.txt", "1_0", verifier.RewardMalformed),
        ("reward.txt", "١", verifier.RewardMalformed),
        ("reward.txt", "true", verifier.RewardMalformed),
        ("reward.txt", "nan", verifier.RewardNotFinite),
        ("reward.txt", "-Infinity", verifier.RewardNotFinite),
        ("reward.txt", "1e999", verifier.RewardNotFinite),
        ("reward.txt", "1" * (MAX_BYTES + 1), verifier.RewardMalformed),
        ("reward.json", "", verifier.RewardEmpty),
        ("reward.json", "{}", verifier.RewardEmpty),
        ("reward.json", '{"reward": 1', verifier.RewardMalformed),
        ("reward.json", "1.0", verifier.RewardMalformed),
        ("reward.json", "[1]", verifier.RewardMalformed),
        ("reward.json", "null", verifier.RewardMalformed),
        ("reward.json", "[" * 100_000, verifier.RewardMalformed),
        ("reward.json", '{"reward": "1"}', verifier.RewardNotANumber),
        ("reward.json", '{"reward": null}', verifier.RewardNotANumber),
        ("reward.json", '{"reward": [1]}', verifier.RewardNotANumber),
        ("reward.json", '{"reward": {"a": 1}}', verifier.RewardNotANumber),
        ("reward.json", '{"reward": NaN}', verifier.RewardNotFinite),
        ("reward.json", '{"reward": 1, "x": -Infinity}', verifier.RewardNotFinite),
        ("reward.json", '{"reward": 1e999}', verifier.RewardNotFinite),
        ("reward.json", '{"reward": ' + "9" * 400 + "}", verifier.RewardNotFinite),
        ("reward.txt", "1e308", verifier.RewardTooLarge),
        ("reward.txt", "-1.01e12", verifier.RewardTooLarge),
        ("reward.json", '{"reward": 1, "x": 1e13}', verifier.RewardTooLarge),
        ("reward.json", '{"reward": 1, "\\ud800": 1}', verifier.RewardMalformed),
    ],
)
def test_everything_else_is_a_typed_error_and_never_a_reward(tmp_path: Path, name: str, text: str, error: type[VerifierError]) -> None:
    (tmp_path / name).write_text(text)
    if name == "reward.json":
        (tmp_path / "reward.txt").write_text("1")  # no falling back
    with pytest.raises(VerifierError) as caught:
        parse_rewards(tmp_path)
    assert type(caught.value) is error
    assert name in str(caught.value) and "\n" not in str(caught.value) and len(str(caught.value)) < 300


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "reward.txt").write_bytes(b"\xff\xf0(\n")
    with pytest.raises(verifier.RewardMalformed):
        parse_rewards(tmp_path)
    (tmp_path / "reward.json").write_bytes(b'{"\xff": 1}')
    with pytest.raises(verifier.RewardMalformed):
        parse_rewards(tmp_path)


def test_no_file_at_all(tmp_path: Path) -> None:
    with pytest.raises(verifier.RewardMissing):
        parse_rewards(tmp_path)
    with pytest.raises(verifier.RewardMissing):
        parse_rewards(tmp_path / "nowhere")


def test_links_fifos_and_folders_are_no_rewards(tmp_path: Path) -> None:
    (tmp_path / "true").write_text("1")
    for make in (lambda p: os.symlink(tmp_path / "true", p), os.mkfifo, os.mkdir):
        place = tmp_path / "logs"
        place.mkdir()
        make(place / "reward.txt")
        with pytest.raises(verifier.RewardMalformed):
            parse_rewards(place)
        place.rename(tmp_path / f"done-{len(list(tmp_path.iterdir()))}")
