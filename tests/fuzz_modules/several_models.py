"""Trainings of more than one model or optimizer, and of a copy that follows: on a rank, beside one
process."""

from __future__ import annotations

import copy
import warnings

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engines.apply import apply_plan
from engines.parallel import ParallelModel
from engines.plan import Plan
from profiles.capture.capture import capture
from tests.engines.cases import cpu_ranks
from tests.fuzz_modules.parity import sgd
from tests.fuzz_modules.structures import Structure

ROWS, NOISE, WIDTH, STEPS = 8, 5, 12, 3


def adversaries_drift(plan_text: str) -> float:
    """Largest relative difference of a generator and a discriminator, each under the plan with its
    own optimizer, to both on one process after some steps."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        makes = nn.Sequential(nn.Linear(NOISE, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        judges = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
        alone = [copy.deepcopy(makes), copy.deepcopy(judges)]
        plan = Plan.parse(plan_text)
        spread = [
            _spread(makes, torch.randn(2, NOISE), plan),
            _spread(judges, torch.randn(2, WIDTH), plan),
        ]
        optimizers = [sgd(list(model.parameters())) for model in alone]
        mine = slice(spread[0].data_rank, None, spread[0].data_world_size)
        for step in range(STEPS):
            made = torch.Generator().manual_seed(step)
            noise = torch.randn(ROWS, NOISE, generator=made)
            real = torch.randn(ROWS, WIDTH, generator=made) + 1
            _play(alone[0], alone[1], optimizers, noise, real)
            theirs = [parallel.optimizer for parallel in spread]
            _play(spread[0], spread[1], theirs, noise[mine], real[mine])
        return max(
            _relative(value, parallel.state_dict()[name])
            for parallel, model in zip(spread, alone, strict=True)
            for name, value in model.state_dict().items()
        )


def _spread(model: nn.Module, sample: Tensor, plan: Plan) -> ParallelModel:
    profile = capture(model, sample)
    cluster = cpu_ranks(plan.world_size)
    return apply_plan(model, plan, profile=profile, cluster=cluster, optimizer=sgd)


def _play(
    makes: nn.Module,
    judges: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    noise: Tensor,
    real: Tensor,
) -> None:
    """A step of the discriminator, then one of the generator."""

    def says(made: Tensor, is_real: bool) -> Tensor:
        answer = judges(made)
        wanted = torch.full_like(answer, float(is_real))
        return F.binary_cross_entropy_with_logits(answer, wanted)

    of_maker, of_judge = optimizers
    (says(real, True) + says(makes(noise).detach(), False)).backward()
    of_judge.step()
    of_judge.zero_grad()
    says(makes(noise), True).backward()
    of_maker.step()
    of_maker.zero_grad()
    of_judge.zero_grad()


def averaged_drift(plan: Plan, profile: object) -> float:
    """Largest relative difference of an average of parameters that follows a training, taken from
    `state_dict()`, to that of one process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        structure = Structure("plain")
        model, loss_fn = structure.build(), structure.loss_fn
        assert loss_fn is not None
        parallel = apply_plan(
            structure.build(),
            plan,
            profile=profile,  # type: ignore[arg-type]
            cluster=cpu_ranks(plan.world_size),
            loss_fn=loss_fn,
            optimizer=sgd,
            sample=structure.batch(0),
        )
        optimizer = sgd(list(model.parameters()))
        mine = slice(parallel.data_rank, None, parallel.data_world_size)
        averages: list[dict[str, Tensor]] = [{}, {}]
        for step in range(STEPS):
            x, labels = structure.batch(step)
            loss_fn(model(x), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
            parallel.train_step((x[mine], labels[mine]))
            for average, state in zip(averages, (model, parallel), strict=True):
                for name, value in state.state_dict().items():
                    average[name] = torch.lerp(average.get(name, value.clone()), value, 0.1)
        wanted, got = averages
        return max(_relative(value, got[name]) for name, value in wanted.items())


def _relative(wanted: Tensor, got: Tensor) -> float:
    return ((got - wanted).abs().max() / wanted.abs().max()).item()
