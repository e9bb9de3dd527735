"""`report.html`: one file that needs nothing else, made from a run directory, also one that is empty or was cut short.

Everything that came from a harness, a policy or a task is escaped; the page has no script. Readable in dark and light.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape

from pydantic import ValidationError

from forge_ray.report import asynchrony
from forge_ray.report.evaluation.comparison import compare_harnesses
from forge_ray.report.evaluation.summary import outcomes_by_task
from forge_ray.report.examples import Example, choose, trajectory_html
from forge_ray.report.metrics import StepMetrics, read_metrics
from forge_ray.report.records import evaluation_points, evaluations, family, harness_title, pass_at_1, read_records
from forge_ray.report.signal import SAME
from forge_ray.report.statistics import Interval, PassRate
from forge_ray.report.style import CSS
from forge_ray.report.summary import Summary, read_config, summarize
from forge_ray.report.svg import Line, Points, chart
from forge_ray.report.text import decoder, model_directory
from forge_ray.rollout import RolloutRecord
from forge_ray.run_dir import RunDir, write_atomic


def write_report(run: RunDir, records: Sequence[RolloutRecord] | None = None) -> None:
    """Write `report.html` from the run's config, metrics, summary (made up where `summary.json` is missing), rollouts and call log.
    `records`: the run's, where they have been read already."""
    write_atomic(run.report, render(run, records))


def render(run: RunDir, records: Sequence[RolloutRecord] | None = None) -> str:
    """The page."""
    records = read_records(run) if records is None else records
    summary, steps = _summary(run, records), read_metrics(run.metrics)
    by_label = evaluations(records)
    bound = _logprob_bound(run)
    body = [
        f"<h1>{escape(summary.name)}</h1>",
        f'<p class="lead">{_lead(summary)}</p>',
        _section("Reward", _reward_chart(run, steps, by_label), _REWARD_NOTE + _untaught(summary)),
        _section("Held-out tasks", _heldout_table(by_label) + _estimates_table(summary, by_label) + _comparison(by_label), _HELDOUT_NOTE),
        _section(
            "Rollout against trainer",
            chart([_line("mean |rollout − trainer logprob|", steps, "logprob_diff")], y_label="nats"),
            _LOGPROB_NOTE + (f" The run stops above {bound:g}." if bound else ""),
        ),
        _section("Asynchrony", asynchrony.section(steps), asynchrony.NOTE),
        _section("Where the time went", _seconds_table(summary)),
        _section("How rollouts ended", _outcomes_table(summary)),
        _section("Three trajectories", "".join(_examples(run, by_label, records)), _EXAMPLES_NOTE),
        _section("The run", _facts(run, summary)),
    ]
    title = f"ForgeRay: {escape(summary.name)}"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{title}</title><style>{CSS}</style></head>\n<body><main>\n" + "\n".join(body) + "\n</main></body></html>\n"
    )


_REWARD_NOTE = (
    "Line: mean reward of each step's trained rollouts, with its 95 % interval over trajectories. "
    "Points: pass@1 on held-out tasks with a 95 % interval."
)
_LOGPROB_NOTE = "The recorded logprobs against the trainer's own, under the weights that sampled the token."
_HELDOUT_NOTE = (
    "pass@1 is the mean over tasks of the share of rollouts that pass. The intervals count the samples of one task as related, not as "
    "independent; for a single kind of task they are wide because it has few tasks. Rollouts that an infrastructure error ended "
    "have no reward and are left out. pass@k: any of k rollouts passes; pass^k: all of k do; flips: two rollouts of one task end "
    "differently (means over tasks, intervals over tasks)."
)
_EXAMPLES_NOTE = (
    "What the policy sampled is marked, the fainter the less likely it was; hover for the logprob. "
    "The rest of the text is the prompt, of which only what is new to a call is shown."
)


def _untaught(summary: Summary) -> str:
    count = summary.untaught_steps
    return f" <b>{count} of {summary.steps} steps trained nothing</b>: {SAME}." if count else ""


def _summary(run: RunDir, records: Sequence[RolloutRecord]) -> Summary:
    try:
        return Summary.model_validate_json(run.summary.read_bytes())
    except (OSError, ValidationError):
        return summarize(run, records)


def _logprob_bound(run: RunDir) -> float | None:
    train = read_config(run).get("train")
    bound = train.get("logprob_bound") if isinstance(train, dict) else None
    return float(bound) if isinstance(bound, int | float) else None


def _section(title: str, content: str, note: str = "") -> str:
    return f"<section><h2>{escape(title)}</h2>{content}" + (f'<p class="note">{escape(note)}</p>' if note else "") + "</section>"


def _lead(summary: Summary) -> str:
    before, after = summary.heldout.get("before"), summary.heldout.get("after")
    if before and after:
        return (
            f"pass@1 on held-out tasks went from <b>{before.pass_at_1:.2f}</b> [{before.low:.2f}, {before.high:.2f}] to "
            f"<b>{after.pass_at_1:.2f}</b> [{after.low:.2f}, {after.high:.2f}] in {summary.steps} steps."
        )
    return f"{summary.steps} steps were trained; there is no held-out evaluation {'after' if before else 'before and after'} training."


def _line(name: str, steps: Sequence[StepMetrics], value: str, half: str | None = None) -> Line:
    return Line(
        name,
        [step.step for step in steps],
        [getattr(step, value) for step in steps],
        [getattr(step, half) for step in steps] if half else None,
    )


def _reward_chart(run: RunDir, steps: Sequence[StepMetrics], by_label: dict[str, list[RolloutRecord]]) -> str:
    """Over all, and of each harness where there are several."""
    lines, points = [_line("training reward", steps, "reward_mean", "reward_ci")], [_points(run, "held-out pass@1", by_label)]
    trained = {name for step in steps for name in step.harnesses or ()}
    names = sorted(trained | {record.harness for records in by_label.values() for record in records})
    for number, name in enumerate(names) if len(names) > 1 else ():
        title, colour = harness_title(name), f"hsl({(number * 137 + 150) % 360} 55% 50%)"
        rewards = [(step.harnesses or {}).get(name, {}).get("reward_mean") for step in steps]
        lines.append(Line(title, [step.step for step in steps], rewards, colour=colour))
        own = {label: [record for record in records if record.harness == name] for label, records in by_label.items()}
        points.append(_points(run, f"held-out in {title}", own, colour))
    known = [step.reward_mean for step in steps if step.reward_mean is not None]
    return chart(lines, points, y_label="reward", y_range=(min([0.0, *known]), max([1.0, *known])))


def _points(run: RunDir, name: str, by_label: dict[str, list[RolloutRecord]], colour: str = Points.colour) -> Points:
    found = evaluation_points(run, by_label)
    return Points(name, [(step, rate.pass_at_1, rate.low, rate.high) for step, rate in found], colour)


def _cell(rate: PassRate | None) -> str:
    if rate is None:
        return '<td class="empty">–</td>'
    bar = f'<i class="bar" style="width:{rate.pass_at_1 * 100:.0f}%"></i>'
    return f'<td class="rate">{bar}<b>{rate.pass_at_1:.2f}</b> <small>[{rate.low:.2f}, {rate.high:.2f}] n={rate.n}</small></td>'


def _heldout_table(by_label: dict[str, list[RolloutRecord]]) -> str:
    """pass@1 of the first and the last evaluation."""
    if not by_label:
        return '<p class="empty">no evaluation was made</p>'
    labels = list(by_label)
    sides = {label: by_label[label] for label in (labels[0], labels[-1])}
    rows = [
        *_part_rows(sides, lambda record: family(record.task)),
        *_part_rows(sides, lambda record: f"in {harness_title(record.harness)}"),
    ]
    rows.append(f'<tr class="total"><th>all tasks</th>{"".join(_cell(pass_at_1(records)) for records in sides.values())}</tr>')
    head = "".join(f"<th>{escape(label)}</th>" for label in sides)
    return f"<table><thead><tr><th>tasks</th>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _part_rows(sides: Mapping[str, Sequence[RolloutRecord]], part: Callable[[RolloutRecord], str | None]) -> list[str]:
    """A row for each part of the rollouts, where there are several."""
    names = sorted({name for records in sides.values() for record in records if (name := part(record))})
    rows = []
    for name in names if len(names) > 1 else []:
        cells = "".join(_cell(pass_at_1(record for record in records if part(record) == name)) for records in sides.values())
        rows.append(f"<tr><th>{escape(name)}</th>{cells}</tr>")
    return rows


def _estimates_table(summary: Summary, by_label: dict[str, list[RolloutRecord]]) -> str:
    """pass@k, pass^k and flips of every evaluation with several rollouts per task."""
    found = {label: tree for label, tree in summary.evaluations.items() if label in by_label and tree["flip_rate"]}
    if not found:
        return ""
    rows = []
    for label, tree in found.items():
        most = max(tree["pass@k"], key=int)
        cells = "".join(f"<td>{Interval(**cell)}</td>" for cell in (tree["pass@k"][most], tree["pass^k"][most], tree["flip_rate"]))
        rows.append(f"<tr><th>{escape(label)}, k = {most}</th>{cells}</tr>")
    head = "<tr><th>evaluation</th><th>pass@k</th><th>pass^k</th><th>flips</th></tr>"
    return f"<table><thead>{head}</thead><tbody>{''.join(rows)}</tbody></table>"


def _comparison(by_label: dict[str, list[RolloutRecord]]) -> str:
    """The paired test of the last evaluation against the first."""
    if len(by_label) < 2:
        return ""
    *_, last = by_label
    first = next(iter(by_label))
    compared = compare_harnesses(*(outcomes_by_task(by_label[label]) for label in (last, first)))
    return f"<p>{escape(f'{last} against {first}, paired by task: {compared}')}</p>" if compared else ""


def _bars(rows: Iterable[tuple[str, float, str]]) -> str:
    rows = list(rows)
    most = max((value for _, value, _ in rows), default=0) or 1
    return "".join(
        f'<tr><th>{escape(name)}</th><td class="rate"><i class="bar" style="width:{value / most * 100:.1f}%"></i>{escape(text)}</td></tr>'
        for name, value, text in rows
    )


def _seconds_table(summary: Summary) -> str:
    phases = {name: value for name, value in summary.seconds.items() if name != "total"}
    if not phases:
        return '<p class="empty">nothing was measured</p>'
    rows = _bars((name, value, f"{value:.1f} s") for name, value in phases.items())
    total = summary.seconds.get("total", sum(phases.values()))
    return f'<table>{rows}<tr class="total"><th>in all</th><td>{total:.1f} s</td></tr></table><p class="note">Phases may overlap.</p>'


def _outcomes_table(summary: Summary) -> str:
    if not summary.outcomes:
        return '<p class="empty">no rollout ended</p>'
    return f"<table>{_bars((name, count, str(count)) for name, count in summary.outcomes.items())}</table>"


def _examples(run: RunDir, by_label: dict[str, list[RolloutRecord]], records: Sequence[RolloutRecord]) -> Iterable[str]:
    examples: list[Example] = choose(by_label, records)
    if not examples:
        yield '<p class="empty">no rollout with a call was recorded</p>'
        return
    from forge_ray.errors import ForgeRayError
    from forge_ray.trajectories.call_log import CallLogReader

    decode, log = decoder(model_directory(run)), CallLogReader(run.calls)
    try:
        log.refresh()
    except ForgeRayError as error:
        yield f'<p class="empty">the call log is damaged: {escape(str(error))}</p>'
    for problem in log.problems:
        yield f'<p class="empty">the call log is damaged: {escape(str(problem))}</p>'
    for example in examples:
        try:
            calls = log.session(example.record.id)
        except ForgeRayError as error:
            yield f'<p class="empty">{escape(example.record.id)}: {escape(str(error))}</p>'
            continue
        yield trajectory_html(example, calls, decode)


def _facts(run: RunDir, summary: Summary) -> str:
    rows = {
        "directory": str(run.root),
        "seed": str(summary.seed),
        "steps": str(summary.steps),
        "rollouts": str(summary.offline or summary.rollouts),
        "sampled tokens": f"{summary.tokens:,}",
        "trained tokens": f"{summary.trained_tokens:,}",
        "versions": ", ".join(f"{name} {version}" for name, version in summary.versions.items()),
    }
    return "<table>" + "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in rows.items()) + "</table>"
