"""Verification in a sandbox: by files that the harness could not touch, and a failure is no reward."""

from __future__ import annotations

import asyncio

import pytest

from forge_ray.tasks import verifier
from tests.sandbox_maker import DAEMON, LONG, Maker

CHECKING = """#!/bin/bash
set -u
cd "${WORKSPACE:-/workspace}"
ls -A "${TESTS_DIR:-/tests}" "${VERIFIER_DIR:-/logs/verifier}" ~
if [ "$(cat answer.txt 2>/dev/null)" = "$(cat "${TESTS_DIR:-/tests}/expected.txt")" ]; then r=1; else r=0; fi
echo "{\\"reward\\": $r, \\"speed\\": 2}" > "${VERIFIER_DIR:-/logs/verifier}/reward.json"
exit 3
"""


@pytest.mark.parametrize(("answer", "reward"), [("42", 1.0), ("41", 0.0), (None, 0.0)])
async def test_a_verifier_judges_the_workspace(maker: Maker, answer: str | None, reward: float) -> None:
    maker.task(test=CHECKING, tests={"expected.txt": "42\n"})
    async with await maker.sandbox() as box:
        if answer:
            await box.run(["sh", "-c", f"echo {answer} > answer.txt"], deadline_s=LONG)
        verdict = await box.verify(timeout_s=LONG)
        assert (verdict.reward, verdict.rewards) == (reward, {"reward": reward, "speed": 2.0})


async def test_the_harness_can_neither_see_nor_prepare_the_verification(maker: Maker) -> None:
    maker.task(test=CHECKING, tests={"expected.txt": "42\n", "sub/lib.py": ""})
    async with await maker.sandbox() as box:
        await box.put({"daemon.py": DAEMON}, to="workspace")
        # Where the verifier will look. The real root is written to only where it is the sandbox's own.
        bases = "'' ../verifier" if maker.isolation == "bubblewrap" else "../verifier"
        script = f"""
        for base in {bases}; do
          cat $base/tests/expected.txt
          mkdir -p $base/tests $base/logs/verifier $base/home
          echo 'raise SystemExit' > $base/tests/conftest.py
          echo 42 > $base/tests/expected.txt
          echo 1 > $base/logs/verifier/reward.txt; echo '{{"reward": 1}}' > $base/logs/verifier/reward.json
        done 2>/dev/null
        echo 'echo 1 > $VERIFIER_DIR/reward.json' > ~/.bashrc
        python3 daemon.py
        echo wrong > answer.txt
        """
        await box.run(["bash", "-c", script], deadline_s=LONG)
        if maker.isolation == "bubblewrap":
            assert "42" not in box.log_text()
        verdict = await box.verify(timeout_s=LONG)
        assert verdict.reward == 0.0
        listed = set(box.log_text("verifier").split())
        assert {"expected.txt", "sub", "test.sh"} <= listed and not listed & {"conftest.py", ".bashrc", "reward.txt"}
        # A second verification starts as clean as the first.
        assert (await box.verify(timeout_s=LONG)).reward == 0.0


@pytest.mark.parametrize(
    ("body", "error", "words"),
    [
        ("exit 0", verifier.RewardMissing, ["reward.json", "exit code 0"]),
        ("no-such-tool || exit 9", verifier.RewardMissing, ["exit code 9"]),
        ("kill -9 $$", verifier.VerifierKilled, ["137"]),
        ("echo '{' > $VERIFIER_DIR/reward.json; echo 1 > $VERIFIER_DIR/reward.txt", verifier.RewardMalformed, ["reward.json"]),
        ("ln -s /etc/hostname $VERIFIER_DIR/reward.txt", verifier.RewardMalformed, ["reward.txt"]),
        ("rm -rf $VERIFIER_DIR", verifier.VerifierError, []),
        ("echo 1 > $VERIFIER_DIR/reward.txt; trap '' TERM; while :; do sleep 1; done", verifier.VerifierTimeout, ["limit is 2 s"]),
    ],
)
async def test_a_verifier_that_fails_gives_no_reward(
    maker: Maker, body: str, error: type[verifier.VerifierError], words: list[str]
) -> None:
    maker.task(test=f"#!/bin/sh\n{body}\n")
    async with await maker.sandbox() as box:
        with pytest.raises(error) as caught:
            await box.verify(timeout_s=2 if error is verifier.VerifierTimeout else LONG)
        assert all(word in str(caught.value) for word in words) and "\n" not in str(caught.value)


async def test_the_verifier_has_its_own_environment_and_harbors_paths(wrapped: Maker) -> None:
    checks = "[ $PWD = /workspace ] && [ $HOME = /home/agent ] && [ -x /tests/test.sh ] && [ -d /logs/agent ]"
    test = f"#!/bin/bash\n{checks} && echo $A$B > /logs/verifier/reward.txt\n"
    wrapped.task(toml='environment.env = { A = "0", B = "5" }\nverifier.env = { A = "1" }', test=test)
    async with await wrapped.sandbox() as box:
        assert (await box.verify(timeout_s=LONG)).reward == 15.0


async def test_many_at_once(maker: Maker) -> None:
    maker.task(test=CHECKING, tests={"expected.txt": "42\n"})

    async def rollout(number: int) -> tuple[float | None, str]:
        async with await maker.sandbox(f"g{number}-0.0") as box:
            await box.run(["sh", "-c", f"echo {42 if number % 2 else number} > answer.txt"], deadline_s=LONG)
            digest = await box.archive(maker.root / "archive")
            return (await box.verify(timeout_s=LONG)).reward, digest

    results = await asyncio.gather(*(rollout(number) for number in range(20)))
    assert [reward for reward, _ in results] == [float(number % 2) for number in range(20)]
    stored = sorted(path.name for path in (maker.root / "archive").iterdir())
    assert stored == sorted({f"{digest}.tar.gz" for _, digest in results}) and len(stored) == 11
    assert maker.clean()
