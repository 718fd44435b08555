"""Loads: what one rank has of every unit, after tensor, context and expert parallelism.

Lives here: units, their runs of equal ones, layers by the style that splits them, the products and
attention that are left. Must not: seconds, or a moment of the step.
"""
