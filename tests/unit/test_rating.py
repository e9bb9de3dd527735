"""A served teacher: who is asked what, and recorded log-probabilities that train as freshly computed ones do. Real torch and HTTP."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from forge_ray.config import Config
from forge_ray.errors import UserError
from forge_ray.job import rating
from forge_ray.job.offline import prepare
from forge_ray.job.rating import Rater
from forge_ray.job.runtime import RunFailed
from forge_ray.job.stored_batches import StoredBatches
from forge_ray.job.stored_source import StoredSource
from forge_ray.run_dir import RunDir
from forge_ray.train_loop.learner import Learner
from forge_ray.train_loop.ranks import Ranks
from forge_ray.trajectories.call import Call
from forge_ray.trajectories.ratings import Rating, RatingError, gathered
from forge_ray.trajectories.store import ratings
from forge_ray.trajectories.store.location import Location
from forge_ray.trajectories.store.reader import StoreReader
from forge_ray.trajectories.store.rollouts import Origin
from forge_ray.trajectories.store.writer import StoreWriter
from tests.unit.making import make_call, make_record
from tests.unit.test_edge_wire import serve
from tests.unit.test_learner import CPU, VOCABULARY, small_model


class Teacher:
    """A model behind vLLM's completions route, as far as a rating asks for it."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model, self.asked = model, []
        self.spell: Callable[[int], str] = lambda token: f"t{token}"
        self.answers: list[Response] = []
        """Given first, one a request."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        request = Request(scope, receive)
        body = json.loads(await request.body())
        self.asked.append((request.url.path, body, request.headers.get("authorization")))
        await (self.answers.pop(0) if self.answers else JSONResponse(self._rated(body["prompt"])))(scope, receive, send)

    def _rated(self, ids: list[int]) -> dict[str, Any]:
        logs = exact(self.model, ids)
        places = [{str(token): {"logprob": logs[at], "rank": 1, "decoded_token": self.spell(token)}} for at, token in enumerate(ids)]
        return {"choices": [{"prompt_logprobs": [None, *places[1:]]}]}


@torch.no_grad()
def exact(model: torch.nn.Module, ids: list[int]) -> list[float]:
    """Log-probabilities in float64 of each token given those before it; 0 for the first."""
    import copy

    logits = copy.deepcopy(model).double()(input_ids=torch.tensor([ids])).logits[0]
    logs = logits[:-1].log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    return [0.0, *logs.tolist()]


def settings(url: str, builder: str = "chain", **distillation: Any) -> Config:
    loss = {"name": "distillation", "distillation": {"upstream": "big", **distillation}}
    return Config.model_validate(
        {
            "name": "x", "policy": {"model": "m"}, "harnesses": [{"name": "react"}], "tasks": {"train": "t"},
            "proxy": {"upstreams": {"bi*": {"url": f"{url}/v1", "key_env": "RATING_KEY", "model": "big-1"}}},
            "train": {
                "steps": 1, "groups_per_step": 2, "group_size": 2, "builder": builder, "loss": loss, "offline": {"runs": ["old"]},
                "optimizer": {"lr": 1e-3},
            },
        }
    )  # fmt: skip


@pytest.fixture
def policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The policy's directory."""
    monkeypatch.setenv("RATING_KEY", "secret")
    small_model().save_pretrained(tmp_path / "policy")
    vocabulary = {f"t{token}": token for token in range(VOCABULARY)}
    Tokenizer(WordLevel(vocabulary, unk_token="t0")).save(str(tmp_path / "policy" / "tokenizer.json"))
    return tmp_path / "policy"


def sampled(model: torch.nn.Module, rollouts: int, temperature: float = 1.0) -> list[tuple[Any, list[Call]]]:
    """Rollouts of two calls that continue each other and one that does not, with the policy's log-probabilities."""
    draw = np.random.default_rng(3)
    made = []
    for number in range(rollouts):
        name = f"g{number // 2:05d}-{number % 2}.0"
        first, second, other = ([int(token) for token in draw.integers(1, VOCABULARY, size)] for size in (6, 5, 7))
        parts = [(first[:3], first[3:]), ([*first, *second[:2]], second[2:]), (other[:2], other[2:])]
        calls = [
            make_call(prompt, ids, order=order, session=name, logprobs=exact(model, prompt + ids)[len(prompt) :],
                      sampling={"temperature": temperature})
            for order, (prompt, ids) in enumerate(parts)
        ]  # fmt: skip
        made.append((make_record(name, float(number % 2), group=number // 2, calls=3), calls))
    return made


def stored(where: Path, rollouts: list[tuple[Any, list[Call]]]) -> StoredSource:
    writer = StoreWriter(Location.of(where), Origin("old"))
    for record, calls in rollouts:
        writer.add(record, calls)
    writer.flush()
    return StoredSource("old", StoreReader(str(where)))


@pytest.mark.parametrize("builder", ["chain", "per_call", "tree"])
@pytest.mark.parametrize("form", ["advantage", "loss"])
async def test_recorded_ratings_train_what_a_fresh_teacher_trains(tmp_path: Path, policy: Path, builder: str, form: str) -> None:
    own, teacher = small_model(), small_model(seed=1)
    teacher.save_pretrained(tmp_path / "teacher")
    rollouts = sampled(own, 4)
    source = stored(tmp_path / "data", rollouts)
    server = Teacher(teacher)
    found: dict[str, Any] = {}
    async with serve(server) as url:
        config, plan = prepare(settings(url, builder, form=form), [source])
        run = RunDir(tmp_path / "run").create()
        rater = Rater(config, policy)
        batches = StoredBatches(config, run, plan, [source], None, rater)
        await batches.rate(0)
        batches.form(0)
        await rater.close()
    # One request per conversation: the two calls that continue each other are one sequence.
    assert len(server.asked) == 8 and {path for path, _, _ in server.asked} == {"/v1/completions"}
    _, body, key = server.asked[0]
    assert (body["model"], body["max_tokens"], body["prompt_logprobs"], key) == ("big-1", 1, 0, "Bearer secret")
    table, _ = batches._samples.read(0)
    fresh = settings("http://unused", builder, form=form, upstream=None, teacher=str(tmp_path / "teacher"))
    for name, directory in (("recorded", None), ("fresh", tmp_path / "teacher")):
        mine = config if directory is None else fresh
        where = run if directory is None else RunDir(tmp_path / "fresh").create()
        learner = Learner(mine, where, policy, ranks=Ranks(), device=CPU, incarnation=1, teacher=directory)
        metrics = learner.train(learner.part(table))
        found[name] = metrics, [value.detach().clone() for value in learner.strategy.module.parameters()]
    # What the loss was told of the teacher, by an implementation of its own in float64.
    expected = [
        ours - theirs
        for _, calls in rollouts
        for call in calls
        for ours, theirs in zip(call.logprobs, exact(teacher, call.prompt_ids + call.ids)[len(call.prompt_ids) :], strict=True)
    ]
    assert found["recorded"][0]["teacher_kl"] == pytest.approx(np.mean(expected), abs=1e-5)
    assert found["recorded"][0]["loss"] == pytest.approx(found["fresh"][0]["loss"], abs=1e-5)
    assert found["recorded"][0]["grad_norm"] == pytest.approx(found["fresh"][0]["grad_norm"], rel=1e-4) and expected
    changed = max(float((value - before.detach()).abs().max()) for value, before in zip(found["fresh"][1], own.parameters(), strict=True))
    apart = max(float((a - b).abs().max()) for a, b in zip(found["recorded"][1], found["fresh"][1], strict=True))
    assert apart < changed / 10


async def test_what_is_recorded_is_not_asked_for_again(tmp_path: Path, policy: Path) -> None:
    own, teacher = small_model(), small_model(seed=1)
    rollouts = sampled(own, 4)
    source, server = stored(tmp_path / "data", rollouts), Teacher(teacher)

    async def formed(name: str, **changes: Any) -> dict[tuple[str, int], Any]:
        async with serve(server) as url:
            config = settings(url)
            config.proxy.upstreams["bi*"] = config.proxy.upstreams["bi*"].model_copy(update=changes)
            config, plan = prepare(config, [source])
            run, rater = RunDir(tmp_path / name).create(), Rater(config, policy)
            await StoredBatches(config, run, plan, [source], None, rater).rate(0)
            await rater.close()
        return ratings.of_step(Location.of(run.data), 0)

    first = await formed("first")
    asked = len(server.asked)
    given = {(record.id, call.id): first[record.id, ordinal] for record, calls in rollouts for ordinal, call in enumerate(calls)}
    rows = [Rating(*key, int(key[1][-1]), value) for key, value in given.items()]
    ratings.put(source.reader.location, 7, "big", "big-1", rows[:-1])
    source.reader.refresh()
    again = await formed("again")
    assert len(server.asked) == asked + 1, "the one call that is not recorded"
    assert again.keys() == first.keys() and all(np.allclose(again[key], first[key], atol=1e-6) for key in first)
    await formed("other", model="big-2")
    assert len(server.asked) == 2 * asked + 1, "another model is another teacher"


async def test_a_teacher_that_cannot_rate_is_named(tmp_path: Path, policy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (record, calls), *_ = sampled(small_model(), 2)
    group = [(record, calls), *sampled(small_model(), 2)[1:]]
    server = Teacher(small_model(seed=1))
    async with serve(server) as url:
        rater = Rater(settings(url), policy)
        server.answers = [JSONResponse({"choices": [{"text": "hi"}]})] * 9
        with pytest.raises(UserError, match=r"upstream: .* does not rate tokens: its reply has no prompt_logprobs"):
            await rater.rate(group)
        server.answers = []
        server.spell = lambda token: f"u{token}"
        with pytest.raises(UserError, match="big-1 has another tokenizer than the policy"):
            await rater.rate(group)
        server.spell = lambda token: f"t{token}"
        server.answers = [JSONResponse({"error": "it is 9 tokens, key secret"}, 400)] * 9
        with pytest.raises(RunFailed, match=r"the teacher big does not rate rollout g00000-[01].0 .* status 400: .*key \*\*\*"):
            await rater.rate(group)
        with pytest.raises(UserError, match=r"sampled at temperature 0.7, and a server rates at 1"):
            await rater.rate(sampled(small_model(), 2, temperature=0.7))
        # Away for a moment: asked again; for long: said.
        monkeypatch.setattr(rating, "WAIT_S", 0.01)
        server.answers = [JSONResponse({}, 503), JSONResponse({}, 429)]
        assert len(await rater.rate(group)) == 6
        monkeypatch.setattr(rating, "PATIENCE_S", -1.0)
        server.answers = [JSONResponse({}, 503)] * 9
        with pytest.raises(RunFailed, match="has rated nothing for"):
            await rater.rate(group)
        await rater.close()
    monkeypatch.delenv("RATING_KEY")
    with pytest.raises(UserError, match=r"\$RATING_KEY is not set"):
        Rater(settings("http://x"), policy)


def test_a_rating_is_of_its_call_s_tokens_or_none() -> None:
    owner, call = np.array([1, 0, 1, 1]), np.array([0, 2, 0, 3])
    found = {("b", 0): np.array([1.0, 2.0]), ("a", 2): np.array([3.0]), ("b", 3): np.array([4.0])}
    assert gathered(["a", "b"], owner, call, found).tolist() == [1.0, 3.0, 2.0, 4.0]
    assert gathered([], owner[:0], call[:0], {}).tolist() == []
    with pytest.raises(RatingError, match="call 0 of rollout b has 2 tokens in the loss and a rating of 1 tokens"):
        gathered(["a", "b"], owner, call, {**found, ("b", 0): np.array([1.0])})
    with pytest.raises(RatingError, match="no rating"):
        gathered(["a", "b"], owner, call, {("b", 0): found["b", 0], ("b", 3): found["b", 3]})


def test_the_config_says_who_teaches() -> None:
    tree = settings("http://x").model_dump(mode="json")
    for changes, said in (
        ({"upstream": "none"}, "no name in proxy.upstreams fits 'none'"),
        ({"upstream": "big", "teacher": "/m"}, "give one of them"),
        ({"upstream": None}, "give one of them"),
    ):
        tree["train"]["loss"]["distillation"] = changes
        with pytest.raises(ValueError, match=said):
            Config.model_validate(tree)
    tree["train"]["loss"]["distillation"] = {"upstream": "big"}
    tree["policy"]["sampling"] = {"temperature": 0.7}
    with pytest.raises(ValueError, match="a server rates at temperature 1"):
        Config.model_validate(tree)
