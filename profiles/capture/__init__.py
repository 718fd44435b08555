"""Capture: a look at any module on fake tensors, which takes no device and no memory.

Lives here: all that traces a step, and what a module, its batch and its units are.
Must not: sums over devices or plans.
"""
