"""Predictions for tables of published training runs, one row a run.

Fills blank cells of a row and converts it to facts and a plan. Time and memory come from
`advisor.cost.estimate`, as for every decision.

    rows -> resolve (machines, architectures, software) -> Setup
    Setup -> case (networks) -> Facts, Plan -> advisor.cost.estimate
    prediction                                 with ranges, as a line of the answer
"""
