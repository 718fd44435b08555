"""Pipeline stages: where a model is cut, in which order microbatches run, what a stage holds.

Lives here: borders, schedules' orders, their simulation, one stage's memory. Must not: the estimate
of a pipeline as a whole (`advisor.cost.estimates`).
"""
