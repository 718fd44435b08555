"""Predictions for rows of a table: one line a training run, in the columns of published figures.

Lives here: how a row's blank cells are filled in, and what it is as facts and a plan. Not here: any
time or memory of its own; `advisor.cost.estimate` answers, as it does for every decision.

    rows -> resolve (machines, architectures, software) -> Setup
    Setup -> case (networks) -> Facts, Plan -> advisor.cost.estimate
    prediction                                 with ranges, as a line of the answer
"""
