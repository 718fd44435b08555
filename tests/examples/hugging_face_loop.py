"""A transformers model in its user's loop: AdamW, a linear schedule with warm-up, and generation.

torchrun --nproc-per-node 2 tests/examples/hugging_face_loop.py [PLAN]
"""

from __future__ import annotations

import sys

import torch
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, get_linear_schedule_with_warmup

from advisor import auto_parallelize

STEPS = 12
CONFIG = GPT2Config(
    vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=4,
    resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
)  # fmt: skip


def examples() -> list[dict[str, torch.Tensor]]:
    """Sequences that count up from somewhere."""
    rows = (torch.arange(start, start + 16) % 64 for start in range(0, 8 * STEPS))
    return [{"input_ids": ids, "labels": ids} for ids in rows]


def main(plan: str | None = None) -> float:
    torch.manual_seed(0)
    loader = DataLoader(examples(), batch_size=8, shuffle=True)
    parallel = auto_parallelize(
        GPT2LMHeadModel(CONFIG),
        sample=next(iter(loader)),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        scheduler=lambda optimizer: get_linear_schedule_with_warmup(optimizer, 3, STEPS),
        global_batch_size=8,
        plan=plan,
        learns=False,
    )
    parallel.train()
    loss = 0.0
    for batch in parallel.shard(loader):
        output = parallel(**batch)
        output.loss.backward()
        parallel.clip_grad_norm_(1.0)
        parallel.optimizer.step()
        parallel.optimizer.zero_grad()
        rows = len(batch["input_ids"])
        loss = parallel.global_mean({"loss": output.loss.detach()}, count=rows)["loss"]
    # Whole on every rank, whatever the plan: `parallel.config` is the model's own.
    whole = parallel.unwrap(into=GPT2LMHeadModel(parallel.config)).eval()
    written = whole.generate(torch.arange(8)[None], max_new_tokens=4, do_sample=False)
    assert written.shape == (1, 12)
    return loss


if __name__ == "__main__":
    print(f"loss {main(*sys.argv[1:]):.6f}")
