"""Learning from runs: measured steps that correct the constants of later estimates.

Lives here: the log of runs, constants corrected by it, anchors with one residual per term.
Must not: formulas of its own; estimates come from `advisor.cost`.
"""
