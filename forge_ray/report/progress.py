"""Live progress on a terminal: a rich table of the last steps with a status line. Where the output is no terminal, or one that is too
narrow for the table, a plain line per step. Whichever it is, the plain lines are in the driver's log.

Plain lines are rare on purpose: a phase reports at most every `PLAIN_SECONDS`, a step once. The object is used from the driver's loop only.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from forge_ray.outcome import Outcome
from forge_ray.report.metrics import StepMetrics
from forge_ray.report.records import pass_at_1
from forge_ray.rollout import RolloutRecord

log = logging.getLogger(__name__)

PLAIN_SECONDS = 10.0
SHOWN_STEPS = 12


def _number(value: float | None, form: str) -> str:
    return "–" if value is None or not math.isfinite(value) else format(value, form)


def _reward(step: StepMetrics) -> str:
    return _number(step.reward_mean, ".3f") + (f" ±{step.reward_ci:.3f}" if step.reward_ci is not None else "")


def _staleness(step: StepMetrics) -> str:
    return _number(step.staleness_mean, ".2f") + (f" ≤{step.staleness_max:g}" if step.staleness_max is not None else "")


def ended(outcomes: Mapping[str, int]) -> str:
    """`valid/truncated/error` counts."""
    ok, truncated = outcomes.get(Outcome.OK, 0), outcomes.get(Outcome.TRUNCATED, 0)
    return f"{ok}/{truncated}/{sum(outcomes.values()) - ok - truncated}"


COLUMNS: tuple[tuple[str, Callable[[StepMetrics], str]], ...] = (
    ("step", lambda s: str(s.step)),
    ("reward", _reward),
    ("signal", lambda s: "–" if s.signal is None else f"{s.signal}/{s.groups}"),
    ("pass", lambda s: _number(s.pass_rate, ".2f")),
    ("ok/trunc/err", lambda s: ended(s.outcomes)),
    ("staleness", _staleness),
    ("tok/s roll/train", lambda s: f"{_number(s.rollout_tokens_per_s, '.0f')}/{_number(s.train_tokens_per_s, '.0f')}"),
    ("loss", lambda s: _number(s.loss, "+.4f")),
    ("KL", lambda s: _number(s.kl, ".4f")),
    ("|Δ logprob|", lambda s: _number(s.logprob_diff, ".1e")),
    ("sync s", lambda s: _number(s.sync_s, ".2f")),
    ("s", lambda s: _number(s.seconds, ".1f")),
)


def step_line(step: StepMetrics, total: int | None = None) -> str:
    """One step as one plain line."""
    of = f"/{total}" if total else ""
    parts = [f"{name} {text(step)}" for name, text in COLUMNS[1:]]
    return f"step {step.step}{of} · " + " · ".join(parts)


class Progress:
    """Use as a context manager. `total` is the number of steps of the run."""

    def __init__(self, total: int | None = None, *, title: str = "", console: Console | None = None) -> None:
        self.total, self.title = total, title
        self.console = console or Console()
        self._steps: deque[StepMetrics] = deque(maxlen=SHOWN_STEPS)
        self._phases: dict[str, str] = {}
        self._live: Live | None = None
        self._said: dict[str, float] = {}
        self.changed = time.monotonic()
        """When something last went on."""

    def __enter__(self) -> Progress:
        if self.console.is_terminal:
            self._live = Live(self._view(), console=self.console, refresh_per_second=4, transient=False)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave the last table on the screen. May be called twice."""
        if self._live is not None:
            self._phases.clear()
            self._live.update(self._view(), refresh=True)
            self._live.stop()
            self._live = None

    def phase(self, name: str, detail: str = "") -> None:
        """Say what is going on: `phase("SFT", "120/400 loss 0.53")`. Phases run side by side until `done`."""
        fresh = name not in self._phases
        self._phases[name] = detail
        self._show(f"{name} {detail}".rstrip(), key=name, always=fresh)

    def done(self, name: str, detail: str = "") -> None:
        """End a phase."""
        self._phases.pop(name, None)
        self.note(f"{name}: done" + (f" ({detail})" if detail else ""))

    def rollouts(self, in_flight: int, accepted: int, outcomes: Mapping[str, int]) -> None:
        """State of the rollouts since the last step."""
        self.changed = time.monotonic()
        self._phases["rollouts"] = f"{in_flight} running, {accepted} accepted, ok/trunc/err {ended(outcomes)} since the last step"
        self._refresh()

    def evaluation(self, label: str, records: Iterable[RolloutRecord], total: int) -> None:
        """How far the held-out evaluation `label` is; the last record ends its phase."""
        records, name = list(records), f"evaluation {label}"
        rate = pass_at_1(record for record in records if record.reward is not None)
        if len(records) >= total:
            self._phases.pop(name, None)
            self.note(f"{name}: held-out pass@1 {rate or 'unknown: no rollout has a reward'}")
        else:
            self.phase(name, f"{len(records)}/{total}" + (f" pass@1 {rate.pass_at_1:.2f}" if rate else ""))

    def step(self, step: StepMetrics) -> None:
        """A training step ended."""
        self._steps.append(step)
        self._phases = {name: detail for name, detail in self._phases.items() if name == "rollouts"}  # what came before a step has ended
        if self._live is None or not self._fits(self._table()):
            self._print(step_line(step, self.total))
        self._tell(step_line(step, self.total))
        self._refresh()

    def note(self, text: str) -> None:
        """One line that stays."""
        self._print(text)
        self._tell(text)

    def warn(self, text: str) -> None:
        """A line that stays about something that is not as it should be. It is no sign of life."""
        self._print(text)
        log.warning("%s", text)

    def _print(self, text: str) -> None:
        self.console.print(escape(text), highlight=False, soft_wrap=True)

    def _tell(self, text: str) -> None:
        self.changed = time.monotonic()
        log.info("%s", text)

    def _show(self, line: str, *, key: str = "", always: bool = False) -> None:
        """On a terminal refresh the table, else print `line`, unless `key` spoke a moment ago."""
        self.changed = now = time.monotonic()
        if always or now - self._said.get(key, float("-inf")) >= PLAIN_SECONDS:
            self._said[key] = now
            log.info("%s", line)
            if self._live is None:
                self._print(line)
        self._refresh()

    def _refresh(self) -> None:
        if self._live is not None:
            self._live.update(self._view())

    def _fits(self, table: Table) -> bool:
        return Measurement.get(self.console, self.console.options.update_width(1000), table).maximum <= self.console.width

    def _table(self) -> Table:
        title = f"{self.title}  step {self._steps[-1].step}" + (f" of {self.total}" if self.total else "")
        table = Table(
            title=title.strip(), title_justify="left", header_style="bold", box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1), show_edge=False
        )
        for name, _ in COLUMNS:
            table.add_column(name, justify="right", no_wrap=True)
        for step in self._steps:
            table.add_row(*(text(step) for _, text in COLUMNS))
        return table

    def _view(self) -> RenderableType:
        parts: list[RenderableType] = []
        if self._steps and self._fits(table := self._table()):
            parts.append(table)
        parts.extend(Text.assemble((name, "bold"), " ", detail) for name, detail in self._phases.items())
        return Group(*parts)
