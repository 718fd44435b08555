"""Run a plan that the command saved on the ranks of a job, and compare it with the whole model."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from advisor.decide.decision import Decision
from advisor.inputs.bundled.gpt import GPT, loss
from advisor.inputs.bundled.gpt_shapes import SHAPES, GPTConfig
from engines.apply import apply_plan
from engines.parallel.parity import relative_errors
from engines.plan import load_plan
from profiles.capture.batch.call import Batch, LossFn, call_model, loss_of
from tests.advisor.decide import fixed_heads
from tests.engines.cases import cpu_ranks

ROWS, TOKENS = 2, 16
IDS = torch.arange(ROWS * TOKENS).reshape(ROWS, TOKENS) % 90 + 3  # none of the special tokens
HEAD_WIDTH = 8
FIXED_HEADS = "tests.advisor.decide.fixed_heads:build"


def cut_down(name: str) -> GPTConfig:
    """Shrink a bundled GPT to two thin layers with its number of heads."""
    shape = SHAPES[name]
    width = shape.num_heads * HEAD_WIDTH
    return replace(shape, vocab_size=128, context=TOKENS, num_layers=2, width=width)


def built(model: str) -> tuple[nn.Module, Batch, LossFn | None]:
    """The model of a bundled name, of a config or of `fixed_heads`, equal on every rank; with a
    batch and a loss."""
    torch.manual_seed(0)
    if model == FIXED_HEADS:
        return fixed_heads.build()
    if not model.endswith(".json"):
        return GPT(cut_down(model)).eval(), (IDS, IDS), loss
    import transformers

    config = transformers.AutoConfig.from_pretrained(model)
    config.use_cache = False
    made: nn.Module = getattr(transformers, config.architectures[0])(config)
    return made.eval(), {"input_ids": IDS, "labels": IDS}, None


def worst_difference(model: str, saved: Path) -> tuple[float, str, float]:
    """Return the largest relative error of the gradients after one step under the saved plan, its
    parameter, and the share of all parameters that a rank holds."""
    module, batch, loss_fn = built(model)
    whole = copy.deepcopy(module)
    output = call_model(whole, batch, has_target=loss_fn is not None)
    loss_of(output, batch, loss_fn).backward()
    wanted = {n: p.grad for n, p in whole.named_parameters() if p.grad is not None}
    parallel = apply_plan(
        module,
        load_plan(saved),
        profile=Decision.load(saved).facts.model,
        cluster=cpu_ranks(2),
        loss_fn=loss_fn,
        sample=batch,
    )
    share = sum(p.numel() for p in module.parameters()) / sum(p.numel() for p in whole.parameters())
    parallel.forward_backward(batch)
    got = parallel.full_gradients()
    assert got.keys() == wanted.keys(), sorted(got.keys() ^ wanted.keys())
    errors = relative_errors(got, wanted)
    worst = max(errors, key=lambda name: errors[name])
    return errors[worst], worst, share
