"""Random modules under every kind of plan: each trains like one process, or is refused by name.

Lives here: `common`, `unusual` and `unusual_code` (the blocks that programs are made of), `program`
(a model and its batches, drawn from a seed), `parity` (one of them on a rank, under a plan and
alone), `run` and `results` (many of them, and what came out), the command; `structures` and
`several_models`, what no block can be. With `--shrink` a program that fails loses the blocks that
it does not need to fail, and is printed as the options that run it again.
"""
