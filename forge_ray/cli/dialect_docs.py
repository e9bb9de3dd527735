"""`docs/dialects.md`, made from the dialects' own lists."""

from __future__ import annotations

import inspect
from collections.abc import Iterable

from forge_ray.serve_proxy import dialects
from forge_ray.serve_proxy.dialects import fields
from forge_ray.serve_proxy.dialects.base import Dialect
from forge_ray.serve_proxy.dialects.fields import Fields

_HEAD = """\
# The dialects, field by field

<!-- Made by `make docs` from `forge_ray/serve_proxy/dialects/`. Change the lists there. -->

{introduction}

| asks for a completion | beside it |
|---|---|
{routes}

Every model name is served. `GET …/models` (with or without `/v1`, `/api/v1`), `HEAD /api/hello`, `/health` and the counting of tokens
answer and are not recorded; a WebSocket handshake is answered 426, on which clients use POST at once. Any other route is 404.

## Errors

In the dialect's own shape and words, with an `x-request-id`:

| status | when |
|---|---|
| 400 | a refused or wrong field, by name; a prompt that does not fit (the words by which harnesses know it: `context_length_exceeded`, \
`prompt is too long`), a session that has used up a limit |
| 401, 403 | an unknown key; a session that was closed |
| 413 | a body above `proxy.max_body_bytes` |
| 429 | more than `proxy.max_waiting` requests wait; `retry-after` in the header and in the text |
| 500 | the engine failed; the text names the request id, the replica's log has the cause |
| 503 | a weight update took longer than `proxy.max_pause_s`; `retry-after` as above |

Requests beyond `proxy.max_running` wait for their turn, one session after the other; all of them wait while the weights are updated. A
streamed reply that is silent for `proxy.keepalive_s` gets its headers and a comment that clients ignore (`: keep-alive`, in the messages
dialect `event: ping`). Until the first token every error has its own status; after the headers it is the stream's last event, in the
dialect's words. A reply that breaks off later is cut, so that no client takes it for whole. An unstreamed request (and one for
Gemini's array of responses) can be told nothing before its end: give such a harness a long time limit.
"""


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _table(rows: Iterable[tuple[str, str]]) -> list[str]:
    return [f"| `{name}` | {_cell(text)} |" for name, text in rows]


def _lists(found: Fields) -> list[str]:
    ignored = {**found.sampling, **found.ignored}
    refused = {name: reason for name, (_, reason) in found.refused.items()}
    lines: list[str] = []
    for title, rows in (("honoured", found.honoured), ("ignored, and named in the call's record", ignored), ("refused by name", refused)):
        lines += [f"| {title} | |", "|---|---|", *_table(rows.items()), ""]
    return lines


def dialect_pages(all_dialects: Iterable[Dialect] = dialects.ALL) -> str:
    """The text of the page."""
    introduction = inspect.cleandoc(fields.__doc__ or "").split("\n\n", 1)[1]
    routes = "\n".join(f"| `POST {d.path}` | {', '.join(f'`{path}`' for path in d.uncounted)} |" for d in all_dialects)
    lines = [_HEAD.format(introduction=introduction, routes=routes)]
    for dialect in all_dialects:
        document = inspect.cleandoc(type(dialect).__doc__ or "")
        lines += [f"## {dialect.name}", "", document, "", *_lists(dialect.fields)]
    return "\n".join(lines).rstrip() + "\n"
