"""`auto_parallelize`: from a module to a model that trains on this job's ranks.

Lives here: the facts of a module and a job, the decision taken and applied, a plan checked by
running it. Must not: a choice (`advisor.decide`), an estimate (`advisor.cost`), an engine.
"""
