"""Learning from runs: measured steps correct the constants of later estimates.

The run log, constants corrected by it, and anchors with a residual per term. Estimates come from
`advisor.cost`.
"""
