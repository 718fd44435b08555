"""Random modules under every kind of plan: each trains like one process, or is refused by name.

Lives here: `common` and `unusual` (the blocks that programs are made of), `program` (a model and
its batches, drawn from a seed), `parity` (one of them on a rank, under a plan and alone), `run` and
`results` (many of them, and what came out), the command. A program whose plan fails is made smaller
by `shrink` and printed as the command that runs it again.
"""
