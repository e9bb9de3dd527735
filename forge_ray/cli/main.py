"""The command line: `forge-ray check | train | rollout | eval | … | rollouts`.

Bad input is one line on stderr and exit code 2; a run that failed is one line and exit code 1; Ctrl-C ends with 130. Only the
chosen command's module is imported, so that `--help` needs neither Ray nor torch.
"""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from forge_ray import __version__
from forge_ray.cli import rollouts
from forge_ray.errors import ForgeRayError, UserError

COMMANDS = {
    "check": "validate a config and this machine; says what is missing and how to get it",
    "train": "train a policy: SFT where the config has it, then GRPO on rollouts of the real harness",
    "rollout": "run one rollout and print its trajectory call by call",
    "eval": "evaluate a checkpoint (or the initial policy) on the held-out tasks",
    "ablate": "train with each value of a setting, over several seeds: one table of what it changes",
    "transfer": "train in some harnesses, evaluate in others: the table train-harness × eval-harness",
    "serve": "serve the policy through the recording proxy alone, for any program that you point at it",
    "replay": "print a recorded session token by token: what was asked, what was answered, what is trained",
    "export": "write a checkpoint as a Hugging Face model directory, for transformers and vLLM",
    "rollouts": "list, show, count and export the stored rollouts of a run",
}


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line. Options have their whole names: `arguments` has to know which of them take a value."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise UserError(message, where="command line", fix=f"see {self.prog} --help")


def parser() -> Parser:
    """The whole command line."""
    top = Parser(prog="forge-ray", description="Train agents by reinforcement learning inside the real programs they are deployed in.")
    top.add_argument("--version", action="version", version=f"forge-ray {__version__}")
    commands = top.add_subparsers(dest="command", metavar="command", required=True)
    made = {name: commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".") for name, text in COMMANDS.items()}
    for name in ("check", "rollout", "serve", "ablate", "transfer"):
        made[name].add_argument("config", help="a run.yaml, or the directory or name of a run")
    made["train"].add_argument("config", nargs="?", help="a run.yaml")
    made["train"].add_argument("--resume", metavar="RUN", help="continue the run in this directory, or of this name (no config)")
    made["train"].add_argument("--from-rollouts", metavar="RUN[,RUN…]", help="train on the stored rollouts of these runs; no harness runs")
    made["train"].add_argument("--rewards", metavar="R", help="with --from-rollouts: recorded (default), latest, or the name of a rescore")
    made["rollout"].add_argument("--task", required=True, metavar="T", help="name of a training or held-out task, or a task directory")
    made["rollout"].add_argument("--harness", metavar="H", help="name of a harness (default: the config's first)")
    made["rollout"].add_argument("--checkpoint", metavar="C", help="a checkpoint directory, or `latest`")
    made["eval"].add_argument("config", nargs="?", help="a run.yaml, or the directory or name of a run")
    made["eval"].add_argument("--resume", metavar="RUN", help="go on with the evaluation in this run directory (no config)")
    made["eval"].add_argument(
        "--checkpoint", metavar="C", help="a checkpoint directory, or `latest` of the run (default: the initial policy)"
    )
    made["eval"].add_argument("--k", type=int, default=None, metavar="K", help="rollouts per task (default: eval.samples)")
    made["eval"].add_argument("--against", metavar="X", help="compare with this checkpoint, or with the evaluation in this run directory")
    made["eval"].add_argument("--bootstrap", action="store_true", help="intervals by resampling tasks, not Wilson's and Student's")
    made["eval"].add_argument("--json", metavar="FILE", help="write all estimates there too")
    made["ablate"].add_argument(
        "--over", action="append", required=True, metavar="KEY=A,B", help="the setting and its values; may be repeated"
    )
    made["ablate"].add_argument("--seeds", type=int, default=3, metavar="N", help="seeds, from the config's on (default: 3)")
    made["transfer"].add_argument("--train", metavar="A,B,A+B", help="harnesses to train in (default: each alone, and all together)")
    made["transfer"].add_argument("--eval", metavar="A,B", help="harnesses to evaluate in (default: all of the config)")
    made["transfer"].add_argument("--k", type=int, default=None, metavar="K", help="rollouts per task (default: eval.samples)")
    made["check"].add_argument("--quick", action="store_true", help="leave out the audit of the chat template, which loads vLLM")
    made["check"].add_argument(
        "--tasks", action="store_true", help="also run each task's verifier on its own solution and on an untouched workspace"
    )
    made["serve"].add_argument("--checkpoint", metavar="C", help="a checkpoint directory, or `latest` (default: the initial policy)")
    made["serve"].add_argument(
        "--session", metavar="S", action="append", help="name of a session, which gets a key of its own; may be repeated (default: serve)"
    )
    made["replay"].add_argument("session", help="id of a rollout (or of a served session) or its beginning, or <run>/rollouts/<id>")
    made["replay"].add_argument("--run", metavar="RUN", help="the run's directory (default: the newest that has the rollout)")
    made["replay"].add_argument("--full", action="store_true", help="write out every token of long prompts")
    made["export"].add_argument("run", help="a run's directory or its name")
    made["export"].add_argument("directory", help="where the model is written; must not be there")
    chosen = made["export"].add_mutually_exclusive_group()
    chosen.add_argument("--step", type=int, metavar="N", help="the checkpoint of this step (default: the newest)")
    chosen.add_argument("--best", action="store_true", help="the one of the highest held-out pass@1, else of the highest mean reward")
    made["export"].add_argument("--adapter", action="store_true", help="of a run with train.lora: the adapters alone, in peft's form")
    rollouts.add_arguments(made["rollouts"])
    for name, command in made.items():
        if name not in PLAIN:  # read what is stored, under no config
            command.add_argument("overrides", nargs="*", metavar="key=value", help="dotted overrides of the config")
    return top


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse `argv`; overrides may stand anywhere after the config."""
    top = parser()
    # argparse gives positionals that follow an option to nobody: take key=value words out first.
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] in PLAIN:  # take no overrides, and a location or a condition may hold a `=`
        return top.parse_args(words)
    overrides = [
        word for i, word in enumerate(words) if "=" in word and not word.startswith("-") and (i == 0 or words[i - 1] not in OPTIONS)
    ]
    rest = [word for i, word in enumerate(words) if not (word in overrides and "=" in word)]
    parsed = top.parse_args(rest)
    if parsed.overrides:
        raise UserError(
            f"{parsed.overrides[0]!r} is no override", where="command line", fix="write key.sub=value, for example train.steps=5"
        )
    parsed.overrides = overrides
    return parsed


PLAIN = frozenset({"rollouts", "export"})
"""Commands without overrides."""
OPTIONS = frozenset(
    {
        "--task",
        "--harness",
        "--checkpoint",
        "--k",
        "--resume",
        "--session",
        "--run",
        "--against",
        "--from-rollouts",
        "--rewards",
        "--json",
        "--over",
        "--seeds",
        "--train",
        "--eval",
    }
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    code = _run(argv)
    if "ray" in sys.modules:
        from forge_ray.job import threads

        threads.leave(code)  # Ray's own end of the process would let what is still inside it start another cluster
    return code


def _run(argv: Sequence[str] | None) -> int:
    try:
        parsed = arguments(argv)
        return importlib.import_module(f"forge_ray.cli.{parsed.command}").run(parsed)
    except UserError as error:
        print(f"forge-ray: {error}", file=sys.stderr)
        return 2
    except ForgeRayError as error:
        print(f"forge-ray: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        # What is left is to leave: one more Ctrl-C would only put a traceback in the place of the exit code.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        print("forge-ray: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
