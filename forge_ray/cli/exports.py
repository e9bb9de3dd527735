"""`forge-ray rollouts export RUN --format F --out FILE`: writes what `forge_ray.trajectories.export` makes, whole or not at all."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from forge_ray.cli.stored_run import StoredRun, stored_run
from forge_ray.errors import UserError
from forge_ray.report.stored import select
from forge_ray.report.stored.select import Filter, Row

if TYPE_CHECKING:
    from forge_ray.trajectories.call import Call
    from forge_ray.trajectories.export.sequences import Tokens
    from forge_ray.trajectories.export.text import Text

AT_ONCE = 256
"""Rollouts whose calls are read at once."""


def export(arguments: argparse.Namespace, wanted: Filter) -> int:
    out = Path(arguments.out).expanduser()
    if os.path.lexists(out):
        raise UserError(f"{out} exists", where="--out", fix="remove it, or give another name")
    if not out.parent.is_dir():
        raise UserError(f"{out.parent} is no directory", where="--out", fix="make it")
    stored = stored_run(arguments.run)
    rows = select.rows(stored.reader, wanted)
    write = {"chat": _chat, "atif": _atif, "trl": _sequences, "verl": _sequences}[arguments.format]
    with _whole(out, directory=arguments.format == "atif") as path:
        print(f"{write(stored, rows, path, arguments.format)} in {out}")
    return 0


def _chat(stored: StoredRun, rows: Sequence[Row], path: Path, _: str) -> str:
    from forge_ray.trajectories.export import chat

    text, count, inexact, seen = text_of(stored), 0, 0, 0
    with path.open("w", encoding="utf-8") as file:
        for row, calls in _with_calls(stored, rows):
            for line in chat.lines(row, calls, text):
                file.write(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n")
                count, seen = count + 1, seen + bool(line["media"])
                inexact += not (line["exact"] or line["media"])
    notes = [f"{inexact} of them not exactly as the template would render them again"] if inexact else []
    notes += [f"{seen} with images, of which the placeholders are there alone"] if seen else []
    return f"{count} conversations of {len(rows)} rollouts" + (f" ({'; '.join(notes)})" if notes else "")


def _atif(stored: StoredRun, rows: Sequence[Row], path: Path, _: str) -> str:
    from forge_ray.trajectories.export import atif

    text, count = text_of(stored), 0
    path.mkdir()
    for row, calls in _with_calls(stored, rows):
        document = atif.document(row, calls, text)
        if document is not None:
            (path / f"{row['rollout']}.json").write_text(json.dumps(document, ensure_ascii=False, allow_nan=False), encoding="utf-8")
            count += 1
    left = f"; {len(rows) - count} rollouts have no reply" if count < len(rows) else ""
    return f"{count} trajectories{left}"


def _sequences(stored: StoredRun, rows: Sequence[Row], path: Path, form: str) -> str:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from forge_ray.trajectories.export import trl, verl

    kind, count = {"trl": trl, "verl": verl}[form], 0
    by_rollout = {row["rollout"]: row for row in rows}
    with pq.ParquetWriter(path, kind.SCHEMA, compression="zstd") as writer:
        for made in _parts(stored, rows):
            found = [kind.row(by_rollout[rollout], tokens) for rollout, tokens in made]
            writer.write_table(pa.Table.from_pylist(found, kind.SCHEMA))
            count += len(found)
    return f"{count} sequences of {len(rows)} rollouts"


def _parts(stored: StoredRun, rows: Sequence[Row]) -> Iterator[list[tuple[str, Tokens]]]:
    """The sequences of the rollouts, those of each step first."""
    from forge_ray.trajectories.export import sequences
    from forge_ray.trajectories.tree_schema import is_tree

    reader, lift = stored.reader, stored.config is not None and stored.config.proxy.train_grammar_calls
    trained: dict[int, list[str]] = {}
    other: list[str] = []
    steps = reader.trained_in()
    for row in rows:
        if (step := steps.get(row["rollout"])) is not None:
            trained.setdefault(step, []).append(row["rollout"])
        else:
            other.append(row["rollout"])
    for step, names in sorted(trained.items()):
        table = reader.samples(step)
        if is_tree(table):
            found = sequences.of_tries(table, reader.call_rows(names), train_grammar_calls=lift)
            yield list(sequences.of_trajectories(found, trained=True))
        else:
            yield list(sequences.of_batch(table, names))
    for first in range(0, len(other), AT_ONCE):
        calls = reader.call_rows(other[first : first + AT_ONCE])
        yield list(sequences.of_trajectories(sequences.untrained(calls, train_grammar_calls=lift), trained=False))


def _with_calls(stored: StoredRun, rows: Sequence[Row]) -> Iterator[tuple[Row, list[Call]]]:
    wanted = {row["rollout"]: row for row in rows}
    for record, calls in stored.reader.with_calls():
        if record.id in wanted:
            yield wanted[record.id], calls


def text_of(stored: StoredRun) -> Text:
    """The policy's tokenizer and template. Raises `UserError`."""
    from forge_ray.report.text import decoder, numbers
    from forge_ray.trajectories.export import template
    from forge_ray.trajectories.export.text import Text

    fix = "give the run's directory, with its model (inputs/model, or where policy.model is)"
    model = stored.model
    if model is None or (decode := decoder(model)) is numbers:
        raise UserError("texts need the policy's tokenizer", where="--format", fix=fix)
    own = stored.config.policy.chat_template if stored.config is not None else None
    try:
        return Text.of(decode, template.renderer(template.read(model, Path(own) if own else None), model))
    except template.TemplateError as error:
        raise UserError(str(error), where="--format", fix=fix) from None


@contextmanager
def _whole(out: Path, *, directory: bool) -> Iterator[Path]:
    """A path beside `out` that becomes `out` when all has gone well."""
    try:
        scratch = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}."))
    except OSError as error:
        raise UserError(f"{out} cannot be written ({error.strerror})", where="--out", fix="give a directory that you may write") from None
    try:
        yield scratch / out.name
        os.rename(scratch / out.name, out)
        if directory:
            out.chmod(0o755)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
