"""Live progress: one line per step without a terminal, a table with one, nothing of a harness interpreted as markup."""

from __future__ import annotations

import io

from rich.console import Console

from forge_ray.outcome import Outcome
from forge_ray.report import signal
from forge_ray.report.metrics import StepMetrics
from forge_ray.report.progress import Progress
from forge_ray.report.summary import Summary
from forge_ray.rollout import RolloutRecord

STEP = StepMetrics(
    step=3, seconds=4.25, reward_mean=0.5, reward_ci=0.081, pass_rate=0.5, staleness_mean=0.4, staleness_max=1,
    outcomes={"ok": 60, "truncated": 3, "sandbox": 1}, rollout_tokens_per_s=210.4, train_tokens_per_s=1800.0, loss=-0.0123, kl=0.001,
    logprob_diff=2e-7, sync_s=0.06,
)  # fmt: skip


def console(width: int | None = None) -> tuple[Console, io.StringIO]:
    text = io.StringIO()
    return Console(file=text, force_terminal=width is not None, width=width or 80, color_system=None), text


def record(number: int, reward: float | None) -> RolloutRecord:
    key = f"eval-before-{number:03d}-0"
    return RolloutRecord(
        id=f"{key}.0", key=key, purpose="eval", task="/t", task_name=f"t{number}", harness="react", group=None, attempt=0,
        outcome=Outcome.OK if reward is not None else Outcome.SANDBOX, detail="", reward=reward,
    )  # fmt: skip


def test_a_step_is_one_plain_line() -> None:
    target, text = console()
    with Progress(15, console=target) as progress:
        progress.step(STEP)
    (line,) = text.getvalue().splitlines()
    for part in (
        "step 3/15", "reward 0.500 ±0.081", "pass 0.50", "ok/trunc/err 60/3/1", "staleness 0.40 ≤1", "210/1800", "loss -0.0123",
        "KL 0.0010",
        "logprob| 2.0e-07", "sync s 0.06", "s 4.2",
    ):  # fmt: skip
        assert part in line


def test_a_step_that_teaches_nothing_says_so() -> None:
    silent = StepMetrics(step=1, groups=8, degenerate_groups=8, reward_mean=0.0)
    said = signal.warning(silent)
    assert said is not None and "all rollouts of each group got the same reward (0); nothing was trained" in said and "easier" in said
    assert "harder" in (signal.warning(silent.model_copy(update={"reward_mean": 1.0})) or "")
    assert "larger train.group_size" in (signal.warning(silent.model_copy(update={"reward_mean": 0.5})) or "")
    for taught in ({"degenerate_groups": 7}, {"groups": None}):
        assert signal.warning(silent.model_copy(update=taught)) is None
    steps = [silent.model_copy(update={"degenerate_groups": n}) for n in (8, 3, 8)]
    assert signal.untaught(steps) == 2
    assert "2 of 3 steps trained nothing: all rollouts" in "\n".join(Summary(name="x", seed=0, steps=3, untaught_steps=2).lines())


def test_a_step_without_a_token_to_train_says_so() -> None:
    empty = StepMetrics(step=1, groups=8, degenerate_groups=2, rollouts_untrained=48, tokens=0)
    assert signal.warning(empty) is None and "48 rollouts have no token that may be trained" in (signal.untrainable(empty) or "")
    for other in ({"tokens": 1}, {"rollouts_untrained": 0}):
        assert signal.untrainable(empty.model_copy(update=other)) is None


def test_what_is_not_known_is_a_dash() -> None:
    target, text = console()
    with Progress(console=target) as progress:
        progress.step(StepMetrics(step=1, loss=float("nan")))
    assert "loss –" in text.getvalue() and "nan" not in text.getvalue()


def test_plain_phases_do_not_flood() -> None:
    target, text = console()
    with Progress(console=target) as progress:
        for step in range(1000):
            progress.phase("SFT", f"{step}/1000 loss 1.0")
        progress.done("SFT", "loss 0.3")
    lines = text.getvalue().splitlines()
    assert lines[0] == "SFT 0/1000 loss 1.0" and lines[-1] == "SFT: done (loss 0.3)" and len(lines) < 10


def test_markup_of_others_is_shown_as_it_is() -> None:
    for width in (None, 140):
        target, text = console(width)
        with Progress(console=target) as progress:
            progress.phase("rollout", "[red]task[/red] [/]")
            progress.note("detail [bold]x[/bold] [/nothing]")
        assert "[bold]x[/bold] [/nothing]" in text.getvalue()


def test_a_table_where_it_fits_and_lines_where_not() -> None:
    for width, table in ((140, True), (80, False)):
        target, text = console(width)
        with Progress(15, title="demo", console=target) as progress:
            progress.step(STEP)
        shown = text.getvalue()
        assert ("demo  step 3 of 15" in shown) is table
        assert ("step 3/15 · reward" in shown) is not table
        assert "0.500 ±0.081" in shown and "…" not in shown


def test_an_evaluation_ends_with_its_rate() -> None:
    target, text = console()
    records = [record(0, 1.0), record(1, 0.0), record(2, None)]
    with Progress(console=target) as progress:
        for end in (1, 2, 3):
            progress.evaluation("before", records[:end], 3)
    assert "evaluation before 1/3 pass@1 1.00" in text.getvalue()
    assert "evaluation before: held-out pass@1 0.500 [" in text.getvalue() and "(2 tasks, 2 rollouts)" in text.getvalue()
