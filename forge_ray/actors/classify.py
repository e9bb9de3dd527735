"""How a rollout ended: a pure function from what the recording and the sandbox saw to one `Outcome` and one line for a person.

The recording speaks first, the sandbox second, the program's own words third, and its exit code only through the adapter's `crashed`.
The first row that applies decides:

| what was seen                                                                        | outcome   |
|--------------------------------------------------------------------------------------|-----------|
| a part of ours failed (`Fault`): task, sandbox, proxy                                | that part |
| a limit of the sandbox other than time and memory ended the harness                  | sandbox   |
| the session ran into a limit of calls, tokens or context                             | truncated |
| a prompt did not fit the window, and no call ended after it                          | truncated |
| the sandbox's memory limit ended the harness                                         | sandbox   |
| no call ended, and some were lost with their replica                                 | engine    |
| no call began: the proxy refused all, does not answer, or gave the program no answer | proxy     |
| no call began: anything else                                                         | harness   |
| the engine failed under the last call, or under an earlier one and no final answer came after it | engine |
| the deadline, and the proxy does not answer or the program was still asking it       | proxy     |
| the deadline, infrastructure healthy                                                 | truncated |
| the last reply was cut at its length                                                 | truncated |
| the program says that it got no answer from its model API                            | proxy     |
| the program crashed                                                                  | harness   |
| the last reply was a final answer, or of a kind that cannot be told                  | ok        |
| the last reply asked for a tool, and the program says that this hands its work in    | ok        |
| the last reply was not delivered                                                     | proxy     |
| the last call was given up by the program itself                                     | harness   |
| the last reply asked for a tool: the program ended at a limit of its own             | truncated |

`ok` and `truncated` are verified, and a verifier without a valid reward makes either `verifier`. A truncated rollout in which
several limits were met is named by the first of them in time, with the real seconds where time was it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from forge_ray.outcome import RATED, Outcome

if TYPE_CHECKING:
    from forge_ray.sandboxes.sandbox import RunResult
    from forge_ray.serve_proxy.client import SessionSummary


@dataclass(frozen=True)
class Fault:
    """A part of ours failed; nothing that the harness did matters then."""

    outcome: Outcome
    detail: str


@dataclass(frozen=True)
class Deadline:
    """The wall-clock limit of the harness."""

    seconds: float
    source: str
    """Where it was set: `rollouts.deadline_s`, or the task's `agent.timeout_sec`."""


@dataclass(frozen=True)
class Evidence:
    """All that is known of a rollout whose harness has ended."""

    summary: SessionSummary
    run: RunResult
    deadline: Deadline
    crash: str | None = None
    """The adapter's word that the program crashed."""
    no_answer: str | None = None
    """The adapter's word that the program got no answer from its model API."""
    submitted: bool = False
    """The adapter's word that the model handed its work in by a tool call."""
    proxy_answers: bool = True
    """Whether the proxy answered a probe; only asked where no call began or the deadline came."""


def classify(evidence: Evidence | Fault) -> tuple[Outcome, str]:
    """Outcome and detail before verification."""
    if isinstance(evidence, Fault):
        return evidence.outcome, evidence.detail
    return _before_the_end(evidence) or _at_the_end(evidence)


def verified(outcome: Outcome, detail: str, problem: str | None) -> tuple[Outcome, str]:
    """Outcome and detail after verification; `problem` is the verifier's error, None with a valid reward."""
    if outcome not in RATED or problem is None:
        return outcome, detail
    return Outcome.VERIFIER, f"{problem} (the rollout before it: {outcome}, {detail})"


def _before_the_end(e: Evidence) -> tuple[Outcome, str] | None:
    """Something other than the program's own end ended the rollout, or it never began."""
    summary, run = e.summary, e.run
    if run.limit is not None and run.limit not in ("time", "memory"):
        return Outcome.SANDBOX, run.detail
    late = f"; the harness then ran into its deadline, {_time(e)}" if run.timed_out else ""
    if summary.limit is not None:
        used = f"{summary.calls} calls, {summary.sampled_tokens} sampled tokens"
        return Outcome.TRUNCATED, f"session limit of {summary.limit} ({used}){late}"
    if summary.overflow:
        return Outcome.TRUNCATED, f"a prompt did not fit the context window{late}"
    if run.limit == "memory":
        # Known by its signs only, and a program that was refused a call may print them: hence after the session's own limits.
        return Outcome.SANDBOX, run.detail
    if summary.last_status is None:
        return _never_called(e)
    if summary.last_status == "failed":
        who = "the engine" if summary.failed else "the server of the other model"
        return Outcome.ENGINE, f"{who} failed under the last call ({summary.failed} failed){late}"
    if not run.timed_out:
        return None
    if summary.failed and summary.last_reply != "answer":
        # The program was waiting for an engine that was gone: no fault of the policy's.
        return Outcome.ENGINE, f"{summary.failed} calls failed or were lost with their replica{late}"
    if not e.proxy_answers or e.no_answer is not None:
        return Outcome.PROXY, f"{e.no_answer or 'the proxy does not answer'}{late}"
    return Outcome.TRUNCATED, f"deadline: {_time(e)}"


def _at_the_end(e: Evidence) -> tuple[Outcome, str]:
    """The program ended by itself after at least one call."""
    summary = e.summary
    if summary.last_status == "length" or summary.last_reply == "length":
        return Outcome.TRUNCATED, "the last reply was cut at its length limit"
    if summary.failed and summary.last_reply != "answer":
        how = e.no_answer or e.crash or f"the harness ended without a final answer ({e.run.detail})"
        return Outcome.ENGINE, f"{summary.failed} calls failed or were lost with their replica; {how}"
    if e.no_answer is not None:
        return Outcome.PROXY, f"the harness got no answer: {e.no_answer}"
    if e.crash is not None:
        return Outcome.HARNESS, e.crash
    if summary.last_reply == "answer":
        return Outcome.OK, "final answer"
    if summary.last_reply == "tool_calls" and e.submitted:
        return Outcome.OK, "handed in by a tool call"
    if summary.last_reply == "tool_calls":
        return Outcome.TRUNCATED, f"the harness ended by itself after a tool call, without a final answer ({e.run.detail})"
    if summary.last_status == "cancelled":
        return Outcome.HARNESS, f"the harness gave its last call up and ended ({e.run.detail})"
    if summary.undelivered:
        return Outcome.PROXY, f"the last reply was not delivered ({summary.undelivered} undelivered)"
    return Outcome.OK, "ended; what the last reply was cannot be told"


def _never_called(e: Evidence) -> tuple[Outcome, str]:
    """No call has ended; one may have been lost with its replica."""
    if e.summary.failed:
        return Outcome.ENGINE, f"{e.summary.failed} calls failed or were lost with their replica, none succeeded"
    if not e.proxy_answers:
        return Outcome.PROXY, "the proxy does not answer"
    if e.summary.refused:
        return Outcome.PROXY, f"the proxy refused all {e.summary.refused} calls"
    if e.no_answer is not None:
        return Outcome.PROXY, f"the harness got no answer: {e.no_answer}"
    how = f"deadline: {_time(e)}" if e.run.timed_out else e.crash or e.run.detail
    return Outcome.HARNESS, f"never called the model; {how}"


def _time(e: Evidence) -> str:
    return f"{e.deadline.source} of {e.deadline.seconds:g} s, stopped after {e.run.seconds:.1f} s"
