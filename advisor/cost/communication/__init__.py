"""Communication of a step: which group sends what, its seconds, and what compute hides.

Lives here: gathers and reductions by unit, small collectives, aggregation by hand, compression, the
replay of queues. Must not: rates of links (`advisor.cost.collective`), or sends between stages.
"""
