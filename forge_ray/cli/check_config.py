"""What a config names: models, tasks, functions, harnesses, servers, and whether each is there and fits."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from forge_ray.cli.check_machine import isolation
from forge_ray.cli.finding import Finding
from forge_ray.config import Config, Source
from forge_ray.errors import UserError

if TYPE_CHECKING:
    from forge_ray.tasks.task import Task

TEACHER = "train.loss.distillation.teacher"
MODELS = ("policy.model", TEACHER)
HUB = ", or get it from the hub first: hf download NAME --local-dir DIR"
"""What to do about a model that is only named as the Hugging Face hub names it."""


def learner(config: Config) -> Iterator[Finding]:
    """What the learner needs beyond the rest, by its config, and what of that cannot be."""
    from forge_ray.cli.check_learner import problems

    for topic, problem, fix in problems(config):
        yield Finding(topic, problem, False, fix=fix)
    wanted = {"deepspeed": config.train.strategy == "deepspeed", "peft": config.train.lora is not None}
    keys = {"deepspeed": ("train.strategy", "deepspeed"), "peft": ("train.lora", "lora")}
    for package in (package for package, needed in wanted.items() if needed):
        key, extra = keys[package]
        found = importlib.util.find_spec(package) is not None
        fix = f"install forge-ray with the {extra} extra (make env EXTRAS=cpu,{extra})"
        yield Finding(key, f"{package}{'' if found else ' cannot be imported'}", found, fix=fix)


def sinks(config: Config) -> Iterator[Finding]:
    from forge_ray.report import sinks

    for error in sinks.missing(config):
        yield Finding(error.where or "metrics", error.problem, False, fix=error.fix or "leave it out")


def sources(config: Config) -> Iterator[Finding]:
    from forge_ray.job.sources import DEMONSTRATIONS_FIX, PASSED, demonstrations_problem, gone
    from forge_ray.model_files import MODEL_FIX, TEACHER_FIX, policy_problem
    from forge_ray.reference import missing, missing_function, parse, unknown_argument

    yield from _policy_files(config)  # before the model, which is looked at with its template
    sft = config.train.sft
    named: list[tuple[str, Source | None]] = [
        ("policy.model", config.policy.model),
        ("tasks.train", config.tasks.train),
        ("tasks.heldout", config.tasks.heldout),
        ("train.sft.demonstrations", sft.demonstrations if sft else None),
        (TEACHER, distils.teacher if (distils := config.train.loss.distillation) else None),
    ]
    for field, source in named:
        if source is None:
            if field == "tasks.heldout":
                yield Finding(field, "none: nothing is evaluated", False, blocking=False, fix="name a folder of tasks to measure pass@1 on")
            continue
        path = source.function[0] if source.function else Path(source.path)
        if not path.exists():
            yield Finding(field, f"{path} does not exist", False, fix=f"correct the path{HUB if field in MODELS else ''}{gone()}")
        elif source.function is not None and (problem := missing_function(*source.function)) is not None:
            yield Finding(field, problem, False, fix="correct the name or the file")
        elif source.function is not None and (problem := unknown_argument(*source.function, source.options, PASSED)) is not None:
            yield Finding(f"{field}.options", problem, False, fix="correct the options")
        elif source.function is None and field.startswith("tasks."):
            yield _tasks(field, path, config)
        elif field == "policy.model" and source.function is None and (problem := policy_problem(config.policy, path)) is not None:
            yield Finding(field, problem, False, fix=MODEL_FIX)
        elif field == "train.sft.demonstrations" and source.function is None and (problem := demonstrations_problem(path)) is not None:
            yield Finding(field, problem, False, fix=DEMONSTRATIONS_FIX)
        elif field == TEACHER and source.function is None and (problem := _cannot_teach(config.policy.model, path)) is not None:
            yield Finding(field, problem, False, fix=TEACHER_FIX)
        else:
            yield Finding(field, f"{path}{f':{source.function[1]}' if source.function else ''}")
    if config.rollouts.reward is not None:  # the tasks may not be there yet
        problem = missing(parse(config.rollouts.reward, Path.cwd(), "rollouts.reward"))
        yield Finding("rollouts.reward", problem or config.rollouts.reward, problem is None, fix="correct the name or the file")


def _policy_files(config: Config) -> Iterator[Finding]:
    from forge_ray.job.sources import gone
    from forge_ray.model_files import template_problem

    for field in ("chat_template", "script"):
        value = getattr(config.policy, field)
        if value and not Path(value).is_file():
            problem = f"{value} {'is no file' if Path(value).exists() else 'does not exist'}"
            yield Finding(f"policy.{field}", problem, False, fix=f"correct the path{gone()}")
        elif value and field == "script":
            yield _script(value)
        elif value and (problem := template_problem(Path(value))) is not None:
            yield Finding("policy.chat_template", problem, False, fix="correct it")


def _cannot_teach(policy: Source, teacher: Path) -> str | None:
    """Why the model in `teacher` cannot rate the policy's tokens; what only a policy that is not made yet would tell is said later."""
    from forge_ray.model_files import model_problem, vocabulary_problem

    if (problem := model_problem(teacher)) is not None or policy.function is not None:
        return problem
    made = Path(policy.path)
    return vocabulary_problem(made, teacher) if (made / "tokenizer.json").is_file() else None


def _script(path: str) -> Finding:
    from forge_ray.serve_proxy.scripted_engine import load_script

    try:
        return Finding("policy.script", f"{path}: {len(load_script(path))} rules")
    except UserError as error:
        return Finding("policy.script", f"{error.where}: {error.problem}", False, fix=error.fix or "correct it")


def _tasks(field: str, path: Path, config: Config) -> Finding:
    from forge_ray.tasks.task import load_tasks

    try:
        tasks = load_tasks(path)
    except UserError as error:
        state = f"{error.where}: {error.problem}" if error.where else error.problem
        return Finding(field, state, False, fix=error.fix or "mend the task")
    kind, _ = isolation(config)
    named = [f"{task.name}: {problem}" for task in tasks for problem in task.unsupported(config.sandbox.backend, kind)]
    if named:
        return Finding(
            field,
            f"unsupported: {'; '.join(named[:3])}{f' (and {len(named) - 3} more)' if len(named) > 3 else ''}",
            False,
            fix="change the task or the sandbox backend",
        )
    if (refused := _rewards(tasks, config)) is not None:
        return refused
    notes = sorted({note for task in tasks for note in (*task.notes, *task.unenforced())})
    noted = f" ({notes[0]}{f', and {len(notes) - 1} more' if len(notes) > 1 else ''})" if notes else ""
    return Finding(field, f"{len(tasks)} task{'s' * (len(tasks) != 1)}{noted}")


def _rewards(tasks: list[Task], config: Config) -> Finding | None:
    """What is wrong with the reward functions of these tasks."""
    from forge_ray.rewards.plan import refuse

    try:
        refuse(tasks, config.rollouts)
    except UserError as error:
        return Finding(error.where or "rollouts.reward", error.problem, False, fix=error.fix or "correct it")
    return None


def template(config: Config) -> list[Finding]:
    """What the chat template and the server's parsers make of a conversation (some 20 seconds, in a process of its own)."""
    import asyncio
    import json
    import subprocess
    import sys
    import tempfile

    import yaml

    from forge_ray import ray_env
    from forge_ray.job.sources import resolve
    from forge_ray.model_files import MODEL_FIX, policy_problem
    from forge_ray.run_dir import RunDir

    with tempfile.TemporaryDirectory(prefix="forge-ray-check-") as directory:
        run = RunDir(Path(directory)).create()
        try:
            model = asyncio.run(resolve(config.policy.model, "policy.model", "model", run, config.seed))
        except UserError as error:
            return [Finding("policy.model", error.problem, False, fix="mend the function")]
        if (problem := policy_problem(config.policy, model)) is not None:
            return [Finding("policy.model", problem, False, fix=MODEL_FIX)]
        run.config.write_text(yaml.safe_dump(config.model_dump(mode="json")))
        command = [sys.executable, "-m", "forge_ray.serve_proxy.template_audit", str(run.config), str(model)]
        environment = {**os.environ, **ray_env.worker(), **config.policy.environment}
        done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode == 2:
        refused = json.loads(done.stdout.splitlines()[-1])
        return [Finding(refused["where"] or "policy", refused["problem"], False, fix=refused["fix"] or "correct policy")]
    if done.returncode != 0:
        last = [line for line in done.stderr.splitlines() if line.strip()][-1:] or ["no output"]
        return [
            Finding("chat template", f"it could not be audited ({last[0][:300]})", False, blocking=False, fix="or leave it out: --quick")
        ]
    entries = json.loads(done.stdout.splitlines()[-1])
    return [Finding(entry["topic"], entry["state"], entry["good"], blocking=False, fix=entry["fix"]) for entry in entries]


def verifiers(config: Config) -> Iterator[Finding]:
    """Whether each task's verifier tells its own solution from an untouched workspace."""
    import asyncio

    from forge_ray.job.task_check import problems
    from forge_ray.tasks.task import load_tasks

    for field, source in (("tasks.train", config.tasks.train), ("tasks.heldout", config.tasks.heldout)):
        if source is None or source.function is not None:
            continue
        try:
            tasks = load_tasks(source.path)
        except UserError:
            continue  # said above
        found = asyncio.run(problems(config, tasks, os.cpu_count() or 1))
        for task, problem in found:
            yield Finding(f"{field} {task.directory.name}", problem, False, fix="mend its verifier or its solution")
        solved = sum(task.solution is not None for task in tasks)
        yield Finding(field, f"{len(tasks) - len(found)} of {len(tasks)} verifiers tell right from wrong ({solved} tasks have a solution)")


def harnesses(config: Config) -> Iterator[Finding]:
    from forge_ray.harnesses import rehearsal
    from forge_ray.harnesses.harness import BUILT_IN, get

    for entry in config.harnesses:
        harness = get(entry.name, entry.options)
        try:
            missing, _ = harness.check(), harness.version()
        except UserError:
            raise
        except Exception as error:  # a person's own class
            problem = f"it cannot be checked ({type(error).__name__}: {error})"
            raise UserError(problem, where=f"harness {entry.name}", fix="mend the file") from error
        if missing:
            yield Finding(f"harness {entry.name}", missing[0].what, False, fix=missing[0].fix)
        elif entry.name not in BUILT_IN and (problem := rehearsal.problem(harness, _an_instruction(config))) is not None:
            yield Finding(f"harness {entry.name}", problem, False, fix="mend the file")
        else:
            yield Finding(f"harness {entry.name}", "ready")


def _an_instruction(config: Config) -> str | None:
    """The instruction of some task; None where tasks are made later."""
    source = config.tasks.train
    file = next(Path(source.path).glob("*/instruction.md"), None) if source.function is None else None
    return file.read_text(errors="replace") if file is not None and file.is_file() else None


def engine(config: Config) -> Iterator[Finding]:
    """Names in `policy.engine` and `policy.server` that vLLM does not have; `template` finds wrong values too."""
    from forge_ray.serve_proxy.arguments import refuse_unknown

    try:
        refuse_unknown(config.policy)
    except UserError as error:
        yield Finding(error.where or "policy.engine", error.problem, False, fix=error.fix or "correct it")


def upstreams(config: Config) -> Iterator[Finding]:
    for name, upstream in config.proxy.upstreams.items():
        topic, variable = f"proxy.upstreams.{name}", upstream.key_env
        if variable is not None and not os.environ.get(variable, "").strip():
            yield Finding(f"{topic}.key_env", f"${variable} is not set", False, fix=f"export {variable}=…")
        else:
            yield Finding(topic, f"{upstream.url}, {f'key in ${variable}' if variable else 'no key'}")
    taught = [harness.name for harness in config.harnesses if config.taught(harness)]
    if taught:
        state = f"{', '.join(taught)}: asks for another model than the policy, so it is evaluated and not trained"
        yield Finding("harnesses", state, len(taught) < len(config.harnesses), blocking=False, fix="train with another one")


def call_log(config: Config) -> Iterator[Finding]:
    from forge_ray.cli import check_log
    from forge_ray.run_dir import RunDir

    found = check_log.state(RunDir(Path(config.runs) / config.name))
    if found is not None:
        yield Finding("call log", found[0], found[1], blocking=False, fix="look at the lines that are named; everything else is read")
