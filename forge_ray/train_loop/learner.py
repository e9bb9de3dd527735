"""A rank's learner: the model, its strategy, and what a run keeps of them. No Ray here: the worker feeds it, a test can as well.

    base ← checkpoint 0, or the initial model (then SFT, then checkpoint 0)
    model ← newest checkpoint;  per step: train the batch, publish, save where due

Everything that several ranks do together (`train`, `publish`, `save`) they must all call, in the same order.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from forge_ray.config import Config
from forge_ray.run_dir import RunDir
from forge_ray.train_loop import checkpoint, lora, models, parts, recipe, weight_sync
from forge_ray.train_loop.history import WeightHistory
from forge_ray.train_loop.part import Part, Passes
from forge_ray.train_loop.ranks import Ranks
from forge_ray.train_loop.strategies import Strategy, make
from forge_ray.train_loop.update import Guard, Scorer, train_step

Tell = Callable[[dict[str, Any]], None]
"""Posts an event to the driver."""
Supervise = Callable[[Strategy, Passes], None]
"""Trains what the strategy holds on demonstrations."""


class Learner:
    """Ready to train step `step` when it is made. Collective."""

    def __init__(
        self,
        config: Config,
        run: RunDir,
        initial: Path,
        *,
        ranks: Ranks,
        device: torch.device,
        incarnation: int,
        tell: Tell = lambda event: None,
        supervise: Supervise | None = None,
        teacher: Path | None = None,
    ) -> None:
        """`initial`: the run's initial model directory. `supervise`: the supervised start, if there is one. `teacher`: the model directory
        that `train.loss.distillation` names."""
        self.config, self.run = config, run
        self._initial, self._ranks, self._device = initial, ranks, device
        self._incarnation, self._tell = incarnation, tell
        train = config.train
        torch.manual_seed(config.seed)
        found = self._resume_point()
        self._unknown = range(0) if found is None else self._weights_of_then(found)
        self._lora: Any = None
        if found is None:
            self._model: Any = self._load(initial)
            self.step = 0
            if supervise is None:
                self._save(None, 0, None)
            else:
                self._supervise(supervise)
        else:
            self.step = found
            self._model = self._load(checkpoint.path(run, found if train.lora is None else 0))
        packed = models.prepare(self._model, train)
        if train.lora is not None:
            self._lora = lora.attach(self._model, train.lora, checkpoint.path(run, self.step) if self.step else None)
        self.strategy = make(train, self._model, ranks, device)
        self.passes = self._passes(self.strategy, packed)
        if train.builder == "tree":
            self._check_tree(self.strategy.module)
        self._others = self._other_policies(teacher)
        self._history, self._guard = WeightHistory(train.max_staleness), Guard(train.optimizer)
        self.restored = checkpoint.restore(run, self.step, self.strategy, ranks) if self.step else None
        """`trainer.json` of the checkpoint that the learner goes on from."""

    def train(self, part: Part) -> dict[str, Any]:
        """Train the batch of the current step; returns the step's metrics. Collective."""
        metrics = train_step(
            self.strategy, part, self.config, self.step,
            others=self._others, history=self._history, guard=self._guard, passes=self.passes, unknown=self._unknown,
        )  # fmt: skip
        self.step += 1
        return metrics

    def publish(self) -> tuple[str, Path | None]:
        """Write the current weights for the replicas: version label, and the file on rank 0. Collective."""
        version = f"{self._incarnation}.{self.step}"
        if self._lora is not None:
            tensors, metadata = lora.published(self._model, self.strategy.tensors())
            if self.config.train.sft is not None:  # else the replicas have it: it is the model that they started with
                metadata["base"] = self._publish_base()
        else:
            tensors, metadata = weight_sync.collect(self.strategy.tensors(), keep=self._ranks.rank == 0), {}
        return version, weight_sync.publish(self.run, tensors, version, metadata) if self._ranks.rank == 0 else None

    def save(self, metrics: dict[str, Any] | None) -> Path:
        """Write the checkpoint of the current step. Collective; it is on disk when this returns."""
        return self._save(self.strategy, self.step, metrics)

    def part(self, table: Any) -> Part:
        """This rank's share of a step batch, of an Arrow table."""
        return parts.of(table, self.config.train, self.passes)

    def _save(self, strategy: Any, step: int, metrics: dict[str, Any] | None) -> Path:
        # With the step's metrics: a driver that dies before it has written them down would leave a hole in the resumed run's.
        unknown = [self._unknown.start, self._unknown.stop]
        extra = {
            "incarnation": self._incarnation, "seed": self.config.seed, "metrics": metrics, "recipe": recipe.of(self.config),
            "unknown": unknown,
        }  # fmt: skip
        written = checkpoint.save(
            self.run, step, strategy, self._ranks, model=self._model, lora=self._lora, tokenizer_from=self._initial, extra=extra
        )
        self._tell({"kind": "checkpoint", "step": step, "path": str(written)})
        return written

    def _passes(self, strategy: Strategy, packed: bool) -> Passes:
        train = self.config.train
        return Passes(
            self._device, train.optimizer.microbatch_tokens, self._ranks,
            lockstep=strategy.lockstep, autocast=train.precision == "bfloat16", packed=packed,
        )  # fmt: skip

    def _supervise(self, supervise: Supervise) -> None:
        """The supervised start, of all weights, by the run's strategy. What it made is checkpoint 0, from which the run goes on."""
        train = self.config.train
        assert train.sft is not None
        # Not packed: demonstrations that are trained together are of about the same length.
        models.prepare(self._model, train.model_copy(update={"packing": False}))
        strategy = make(train, self._model, self._ranks, self._device, train.sft.optimizer)
        supervise(strategy, self._passes(strategy, packed=False))
        self._save(strategy, 0, None)
        strategy.close()
        del strategy
        self._model = None
        gc.collect()  # engines and their models name each other
        self._model = self._load(checkpoint.path(self.run, 0))

    def _resume_point(self) -> int | None:
        """Rank 0's view of the newest checkpoint, on every rank."""
        found = -1
        if self._ranks.rank == 0:
            checkpoint.sweep(self.run)
            newest, damaged = checkpoint.newest(self.run)
            for what in damaged:
                self._tell({"kind": "note", "text": f"a checkpoint is left out: {what}"})
            found = -1 if newest is None else newest
        found = self._ranks.most(found)
        return None if found < 0 else found

    def _weights_of_then(self, step: int) -> range:
        """Versions after the checkpoint of `step` whose weights do not come again, because the config has changed since they were made:
        stored tokens of theirs are trained like all others, but there is nothing to check them against."""
        kept, stored = checkpoint.read(self.run, step), self._stored()
        then = kept.get("recipe", {})
        if step and (adapters := then.get("train.lora")) != (now := recipe.of(self.config)["train.lora"]) and "train.lora" in then:
            where = checkpoint.path(self.run, step)
            raise checkpoint.CheckpointError(f"{where} was written with train.lora = {adapters}, now it is {now}: start a new run from it")
        changed = recipe.changes(then, self.config)
        unknown = range(*kept.get("unknown", (0, 0)))
        if changed:
            self._tell({"kind": "note", "text": f"going on from step {step} under another config: {'; '.join(changed)}"})
            unknown = range(unknown.start if unknown else step + 1, max(unknown.stop, stored + 1))
        return unknown

    def _stored(self) -> int:
        """Steps whose batches are stored, so that weights of as many versions may have been served. Rank 0's view on every rank."""
        from forge_ray.trajectories.store.location import Location
        from forge_ray.trajectories.store.samples import SampleStore

        found = 0
        if self._ranks.rank == 0:
            where = Location.of_run(self.config.store.location, self.config.name, self.run.data)
            found = max(SampleStore(where).steps, default=-1) + 1
        return self._ranks.most(found)

    def _load(self, directory: Path) -> Any:
        self._tell({"kind": "progress", "phase": "trainer", "detail": f"loading {directory.name}"})
        return models.load(directory)

    def _check_tree(self, model: Any) -> None:
        from forge_ray.train_loop.tree import model as tree_model

        tree_model.check(model)

    def _publish_base(self) -> str:
        """The base that adapters are added to, written once per run."""
        target = self.run.weights / lora.BASE
        if self._ranks.rank == 0 and not target.exists():
            named = ((name, value) for name, value in models.load(checkpoint.path(self.run, 0)).named_parameters())
            weight_sync.write(target, weight_sync.collect(named), {})
        return lora.BASE

    def _other_policies(self, teacher: Path | None) -> dict[str, Scorer]:
        """Policies that are not trained, by the field of `LossInputs` that they fill."""
        others: dict[str, Scorer] = {}
        loss = self.config.train.loss
        if loss.kl > 0 and self._lora is not None:

            def base(part: Part) -> Any:
                with lora.without(self._model):
                    return part.score(self.strategy.module, self.passes)

            others["reference_logprobs"] = base
        elif loss.kl > 0:
            before = checkpoint.path(self.run, 0)
            if not before.is_dir():
                raise checkpoint.CheckpointError(
                    f"train.loss.kl = {loss.kl:g} needs the policy before the first step, and {before} is gone: it is kept only where "
                    "train.loss.kl is above 0 from the first step on"
                )
            others["reference_logprobs"] = self._scorer(before)
        if teacher is not None:
            others["teacher_logprobs"] = self._scorer(teacher)
        elif loss.distillation is not None and loss.distillation.upstream is not None:
            others["teacher_logprobs"] = self._recorded
        return others

    def _recorded(self, part: Part) -> Any:
        """A served teacher's log-probabilities, which were stored with the step's batch."""
        from forge_ray.trajectories.ratings import gathered
        from forge_ray.trajectories.store import ratings
        from forge_ray.trajectories.store.location import Location

        where = Location.of_run(self.config.store.location, self.config.name, self.run.data)
        return gathered(*part.origin, ratings.of_step(where, self.step))

    def _scorer(self, directory: Path) -> Scorer:
        model = self._load(directory)
        # A teacher may be another architecture than the policy: what is exact for one is asked of the other too.
        if self.config.train.builder == "tree":
            self._check_tree(model)
        passes = replace(self.passes, packed=models.pack(model, self.config.train))
        frozen = self.strategy.frozen(model)
        return lambda part: part.score(frozen, passes)
