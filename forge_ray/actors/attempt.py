"""One attempt at one rollout, from an empty sandbox to a record on disk, as a plain coroutine that knows nothing of Ray.

    session token → sandbox → harness → session closed → classified → workspace archived → verified → `result.json`

Invariants: an attempt returns a record, whatever fails: each step has the outcome class it fails with. The record is on disk before
it is returned. The session is closed and the sandbox gone by then, also when the attempt is cancelled (that leaves no record).
Nothing here blocks the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from forge_ray.actors.classify import Deadline, Evidence, Fault, classify, verified
from forge_ray.config import Config
from forge_ray.config import Harness as HarnessConfig
from forge_ray.errors import ForgeRayError, UserError
from forge_ray.harnesses.harness import Harness, Launch, get
from forge_ray.outcome import RATED, Outcome
from forge_ray.rewards.verdict import Subject, Verdict, judge
from forge_ray.rollout import RolloutRecord, RolloutRequest
from forge_ray.run_dir import RunDir, write_atomic
from forge_ray.sandboxes.sandbox import RunResult, Sandbox, SandboxBackend
from forge_ray.tasks.digest import image_digest, task_digest
from forge_ray.tasks.task import Task, load_task
from forge_ray.tasks.verifier import VerifierError

if TYPE_CHECKING:
    from forge_ray.serve_proxy.client import ProxyClient, SessionSummary
    from forge_ray.serve_proxy.sessions import Sessions

CLOSE_S, ARCHIVE_S, PROBE_S, GIVE_UP_S = 600, 600, 10, 3
"""Seconds granted to closing a session (a replica may have to come back first), to archiving, to a probe of the proxy, and to closing the
session of an attempt that is given up (a run that stops waits for it)."""

log = logging.getLogger(__name__)


@dataclass
class Bench:
    """What all attempts of one pool share."""

    config: Config
    run: RunDir
    backend: SandboxBackend
    proxy: ProxyClient
    sessions: Sessions
    _window: int | None = None

    async def context_window(self) -> int:
        """Tokens of prompt and reply together that a call may have: the engine's window or the run's smaller limit."""
        if self._window is None:
            self._window = min(int(replica["window"]) for replica in await self.proxy.status())
        return min(self._window, self.config.proxy.limits.context_tokens or self._window)


class _Failed(Exception):
    """A step failed; the outcome is decided."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.detail)
        self.fault = fault


def rollout_id(key: str, number: int) -> str:
    """Id of attempt `number` of the rollout `key`: session id, directory name and sandbox label."""
    return f"{key}.{number}"


def result_file(run: RunDir, id: str) -> Path:
    return run.rollouts / id / "result.json"


async def attempt(request: RolloutRequest, number: int, bench: Bench) -> RolloutRecord:
    """Run attempt `number` of `request`. `rollouts/<id>/` exists and holds no result yet."""
    return await _Attempt(request, number, bench).run()


class _Attempt:
    def __init__(self, request: RolloutRequest, number: int, bench: Bench) -> None:
        self.request, self.number, self.bench = request, number, bench
        self.id = rollout_id(request.key, number)
        self.logs = bench.run.rollouts / self.id
        self.seconds: dict[str, float] = {}
        self.result: RunResult | None = None
        self.summary: SessionSummary | None = None
        self.digest: str | None = None
        self.task_digest: str | None = None
        self.image_digest: str | None = None
        self.image_base: str | None = None
        self.harness_version: str | None = None
        self.verdict: Verdict | None = None
        self.ended: Outcome | None = None

    async def run(self) -> RolloutRecord:
        started, begin = time.time(), time.monotonic()
        try:
            outcome, detail = await self._steps()
        except _Failed as failed:
            outcome, detail = classify(failed.fault)
        self.seconds["total"] = time.monotonic() - begin
        verdict = self.verdict if outcome in RATED else None
        scored = verdict.scored if verdict else None
        record = RolloutRecord(
            id=self.id,
            key=self.request.key,
            purpose=self.request.purpose,
            task=self.request.task,
            task_name=self.request.task_name,
            harness=self.request.harness,
            group=self.request.group,
            attempt=self.number,
            outcome=outcome,
            detail=detail,
            reward=verdict.rewards.reward if verdict else None,
            rewards=verdict.rewards.rewards if verdict else {},
            call_rewards=scored.calls if scored else {},
            reward_digest=scored.digest if scored else None,
            ended=self.ended,
            exit_code=self.result.exit_code if self.result else None,
            task_digest=self.task_digest,
            image_digest=self.image_digest,
            image_base=self.image_base,
            harness_version=self.harness_version,
            workspace_digest=self.digest,
            calls=self.summary.calls if self.summary else 0,
            sampled_tokens=self.summary.sampled_tokens if self.summary else 0,
            upstream_calls=self.summary.upstream if self.summary else 0,
            started=started,
            seconds={name: round(value, 4) for name, value in self.seconds.items()},
        )
        await asyncio.to_thread(write_atomic, result_file(self.bench.run, self.id), record.model_dump_json(indent=2) + "\n")
        return record

    async def _steps(self) -> tuple[Outcome, str]:
        bench = self.bench
        async with self._step(Outcome.TASK):
            task = await asyncio.to_thread(load_task, self.request.task)
            self.task_digest = await asyncio.to_thread(task_digest, task.directory)
            self.image_digest = await asyncio.to_thread(image_digest, task.directory)
            self.image_base = task.image.base
        if missing := bench.backend.unsupported(task):
            raise _Failed(Fault(Outcome.TASK, f"{task.name} is not supported: {'; '.join(missing)}"))
        async with self._step(Outcome.HARNESS):
            harness = await asyncio.to_thread(self._harness)
            self.harness_version = await asyncio.to_thread(harness.version)
        async with self._step(Outcome.SANDBOX, "create", task.spec.environment.build_timeout_sec):
            try:
                sandbox = await bench.backend.create(task, self.id, self.logs)
            except UserError as error:
                raise _Failed(Fault(Outcome.TASK, str(error))) from error
        try:
            return await self._in_sandbox(task, harness, sandbox)
        finally:
            try:
                await sandbox.destroy()
            except ForgeRayError as error:  # the rollout is what it is; the next pool to start looks for leftovers
                log.warning("%s: %s", self.id, error)

    async def _in_sandbox(self, task: Task, harness: Harness, sandbox: Sandbox) -> tuple[Outcome, str]:
        token = self.bench.sessions.issue(self.id, self.request.purpose)
        url = self.bench.proxy.url(token)
        deadline = self._deadline(task)
        async with self._step(Outcome.PROXY):
            window = await self.bench.context_window()
        try:
            result = self.result = await self._run_harness(harness, sandbox, self._launch(task, sandbox, url, token, window), deadline)
            # Before the session is closed: closing waits for a lost replica's successor, after which everything answers again.
            answers = await _answers(url) if result.timed_out else True
            async with self._step(Outcome.PROXY, "close"):
                summary = self.summary = await self.bench.proxy.close_session(self.id, timeout_s=CLOSE_S)
        except BaseException:
            await self._close_after_failure()
            raise
        async with self._step(Outcome.HARNESS):
            text = await asyncio.to_thread(sandbox.log_text)
            crash, no_answer = harness.crashed(result.exit_code, text), harness.no_answer(result.exit_code, text)
            submitted = harness.submitted(result.exit_code, text)
        if summary.last_status is None and not result.timed_out:
            answers = await _answers(url)
        outcome, detail = classify(Evidence(summary, result, deadline, crash, no_answer, submitted, answers))
        if outcome not in RATED:
            return outcome, detail
        async with self._step(Outcome.SANDBOX, "archive", ARCHIVE_S):
            self.digest = await sandbox.archive(self.bench.run.rollouts / "archive")
        self.ended = outcome
        return await self._verify(task, sandbox, outcome, detail)

    async def _run_harness(self, harness: Harness, sandbox: Sandbox, launch: Launch, deadline: Deadline) -> RunResult:
        async with self._step(Outcome.HARNESS):
            command = harness.configure(launch)
        async with self._step(Outcome.SANDBOX, "harness"):
            await sandbox.put(command.home_files, to="home")
            await sandbox.put(command.workspace_files, to="workspace")
            return await sandbox.run(
                command.argv,
                deadline_s=deadline.seconds,
                env=command.env,
                stdin=command.stdin,
                visible=command.visible,
                log="harness",
            )

    async def _verify(self, task: Task, sandbox: Sandbox, outcome: Outcome, detail: str) -> tuple[Outcome, str]:
        config, run, problem = self.bench.config, self.bench.run, None
        archive = run.rollouts / "archive" / f"{self.digest}.tar.gz"
        subject = Subject(run, self.id, archive, self.request.harness, str(outcome), self.logs)
        async with self._step(Outcome.VERIFIER, "verify"):
            try:
                self.verdict = await judge(subject, task, sandbox, config)
            except VerifierError as error:
                problem = str(error)
        return verified(outcome, detail, problem)

    @property
    def _configured(self) -> HarnessConfig | None:
        return next((h for h in self.bench.config.harnesses if h.name == self.request.harness), None)

    def _harness(self) -> Harness:
        configured = self._configured
        return get(self.request.harness, dict(configured.options) if configured else {})

    def _launch(self, task: Task, sandbox: Sandbox, url: str, token: str, window: int) -> Launch:
        config, configured = self.bench.config, self._configured
        return Launch(
            instruction=task.instruction,
            workspace=sandbox.workspace,
            home=sandbox.home,
            base_url=url,
            key=token,
            model=(configured.model if configured else None) or config.policy.served_name,
            context_window=window,
            max_output=config.proxy.max_call_tokens,
        )

    def _deadline(self, task: Task) -> Deadline:
        own, given = self.bench.config.rollouts.deadline_s, task.agent_timeout_s
        return Deadline(own, "rollouts.deadline_s") if given is None or own <= given else Deadline(given, "the task's agent.timeout_sec")

    async def _close_after_failure(self) -> None:
        """Close the session of a harness that is gone already, so that its calls end and no later one is taken."""
        try:
            await self.bench.proxy.close_session(self.id, timeout_s=GIVE_UP_S)
        except Exception as error:  # any failure: the attempt has failed already, and the token is used by nobody
            log.warning("%s: its session could not be closed: %s", self.id, error)

    @asynccontextmanager
    async def _step(self, outcome: Outcome, phase: str | None = None, limit: float | None = None) -> AsyncIterator[None]:
        """Time a step, bound it, and turn whatever it raises into a fault of class `outcome`. What is no typed error is a bug of ours or of
        an adapter: its traceback goes to `fault.log`."""
        begin = time.monotonic()
        try:
            async with asyncio.timeout(limit):
                yield
        except _Failed:
            raise
        except TimeoutError as error:
            after = f"not done after {time.monotonic() - begin:.1f} s" if limit else str(error) or "timed out"
            raise _Failed(Fault(outcome, f"{phase}: {after}")) from error
        except ForgeRayError as error:
            raise _Failed(Fault(outcome, f"{phase}: {error}" if phase else str(error))) from error
        except Exception as error:
            await asyncio.to_thread(write_atomic, self.logs / "fault.log", traceback.format_exc())
            raise _Failed(Fault(outcome, f"{phase or outcome}: {type(error).__name__}: {error} (see fault.log)")) from error
        finally:
            if phase:
                self.seconds[phase] = time.monotonic() - begin


async def _answers(url: str) -> bool:
    """Whether anything but a server error comes back from the proxy (a closed session's refusal will do)."""
    import httpx

    try:
        async with httpx.AsyncClient(timeout=PROBE_S, trust_env=False) as client:
            return (await client.get(f"{url}/v1/models")).status_code < 500
    except httpx.HTTPError:
        return False
