"""The decision: the scalability decision tree, the plan that is taken, and why.

Lives here: rules of preference, the walk through the tree, refinements of the best plan, reasons,
and what to do where nothing fits. Must not: formulas of time or memory (`advisor.cost`).
"""
