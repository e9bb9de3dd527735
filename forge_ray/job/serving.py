"""The proxy alone (`forge-ray serve`): up until Ctrl-C, with a key for each of some sessions, whose calls are told as they end.

Any program can be pointed at it. The run directory is the command's own, so that nothing that is played with gets into a training run;
`forge-ray replay` reads it like any other.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from forge_ray.config import Config
from forge_ray.job.runtime import Runtime
from forge_ray.job.single import in_runtime, start_proxy
from forge_ray.report.progress import Progress
from forge_ray.report.text import Decode
from forge_ray.report.trajectory import status, visible
from forge_ray.run_dir import RunDir, secret

if TYPE_CHECKING:
    from forge_ray.serve_proxy.client import ProxyClient
    from forge_ray.serve_proxy.sessions import Sessions
    from forge_ray.trajectories.call import Call
    from forge_ray.trajectories.upstream import UpstreamCall

PERIOD_S = 0.5
"""Between two looks into the call log."""
UNTOLD_S = 5.0
"""Patience with the word on a reply's delivery: a replica that dies gives none."""
SHOWN = 72
"""Characters of a reply that its line shows."""


def serve(config: Config, run: RunDir, model: Path | None, sessions: Sequence[str]) -> None:
    """Serve until the process is interrupted, with a key for each of `sessions`. Raises what starting a run raises."""

    async def work(runtime: Runtime, progress: Progress) -> None:
        client = await start_proxy(runtime, progress, model)
        from forge_ray.report.text import decoder
        from forge_ray.serve_proxy.sessions import Sessions

        issuer = Sessions(secret(run))
        window = min(replica["window"] for replica in await client.status())
        for line in (*properties(config, window), *lines_of(client, issuer, sessions, config), "", "calls (Ctrl-C ends):"):
            progress.note(line)
        await _watch(run, sessions, progress, decoder(model or await runtime.model()))

    in_runtime(config, run, work)


def properties(config: Config, window: int) -> Iterator[str]:
    """What a program has to know of the policy, whatever its dialect. `window`: tokens of a prompt and its reply."""
    cap = config.proxy.max_call_tokens
    yield ""
    yield f"{'model':<14} {config.policy.served_name} (any other name is served as well, as a side call)"
    yield f"{'window':<14} {window} tokens" + (f", {cap} of them for a reply (proxy.max_call_tokens)" if cap is not None else "")


def lines_of(client: ProxyClient, issuer: Sessions, sessions: Sequence[str], config: Config) -> Iterator[str]:
    """The addresses of every session, below its name where there are several."""
    for session in sessions:
        yield from ([""] if len(sessions) == 1 else ["", f"{'session':<14} {session}"])
        key = issuer.issue(session, "train")
        yield from addresses(client.base_url, client.url(key), key, config.policy.served_name)


def addresses(plain: str, url: str, key: str, model: str) -> Iterator[str]:
    """How a program of each dialect is pointed at the proxy. `plain`: without the session; `url`: the session's own."""
    yield f"{'key':<14} {key}"
    for dialect, base, variables in (
        ("OpenAI", f"{url}/v1", f"OPENAI_BASE_URL={url}/v1 OPENAI_API_KEY={key}"),
        ("Anthropic", url, f"ANTHROPIC_BASE_URL={url} ANTHROPIC_API_KEY={key} ANTHROPIC_MODEL={model}"),
        ("Gemini", url, f"GOOGLE_GEMINI_BASE_URL={url} GEMINI_API_KEY={key}"),
    ):
        yield f"{dialect:<14} {base}"
        yield f"{'':<14} export {variables}"
    yield f"{'by key alone':<14} {plain} (OpenAI: {plain}/v1), where a program takes no path in its address"


def told(name: str, call: Call, decode: Decode) -> str:
    """One line about a call that has ended."""
    seconds = f"{call.ended - call.opened:.2f} s" if call.ended is not None else "–"
    text = " ".join(visible(decode(call.ids)).split())
    how = f"{call.splice}: {call.reason}" if call.splice == "fork" and call.reason else call.splice
    return (
        f"{time.strftime('%H:%M:%S', time.localtime(call.ended or call.opened))} {name} · "
        f"{call.dialect}{' streamed' if call.streamed else ''} · {call.kind} · {visible(how)} · "
        f"prompt {len(call.prompt_ids)} ({len(call.prompt_ids) - call.shared} new) · sampled {len(call.ids)} · "
        f"{visible(status(call))}{f' ({call.reply})' if call.reply else ''} · {seconds} · {text[:SHOWN]}{'…' if len(text) > SHOWN else ''}"
    )


def told_other(call: UpstreamCall, name: str = "") -> str:
    """One line about a call that another model answered."""
    text = " ".join(visible(call.error or call.reply.get("text") or "").split())
    return (
        f"{time.strftime('%H:%M:%S', time.localtime(call.ended))} {name}{visible(call.model)}, another model · {call.dialect}"
        f"{' streamed' if call.streamed else ''} · {call.status}, status {call.http_status} · {call.ended - call.opened:.2f} s · "
        f"{text[:SHOWN]}{'…' if len(text) > SHOWN else ''}"
    )


async def _watch(run: RunDir, sessions: Sequence[str], progress: Progress, decode: Decode) -> None:
    """Tell the calls of `sessions` as they end, and what was refused, for ever."""
    from forge_ray.trajectories.call_log import CallLogReader

    readers = {session: CallLogReader(run.calls) for session in sessions}  # each keeps the session that it parsed last
    told_calls: set[str] = set()
    numbers: Counter[str] = Counter()
    refused: dict[str, Counter[str]] = {session: Counter() for session in sessions}
    while True:
        for session, reader in readers.items():
            name = f"{session} " if len(sessions) > 1 else ""
            await asyncio.to_thread(reader.refresh)
            for call in await asyncio.to_thread(reader.session, session):
                late = call.ended is not None and time.time() - call.ended > UNTOLD_S
                if call.id not in told_calls and call.status != "open" and (call.delivered is not None or late):
                    told_calls.add(call.id)
                    numbers[session] += 1
                    progress.note(told(f"{name}call {numbers[session]}", call, decode))
            for other in reader.upstream(session):
                if other.id not in told_calls:
                    told_calls.add(other.id)
                    progress.note(told_other(other, name))
            now = Counter(reader.state(session).refused_for)
            for reason, number in (now - refused[session]).items():
                progress.note(f"{name}refused: {reason}{f' ({number} requests)' if number > 1 else ''}; the answer says why")
            refused[session] = now
        await asyncio.sleep(PERIOD_S)
