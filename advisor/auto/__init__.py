"""`auto_parallelize`: from a module to a model that trains on this job's ranks.

Facts of a module and a job, the decision taken and applied, and a plan checked by running it.
Choices are made in `advisor.decide`, estimates in `advisor.cost`.
"""
