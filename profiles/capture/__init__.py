"""Capture: a look at any module; on fake tensors, without a device or memory, where they suffice.

Lives here: all that traces a step, and what a module, its batch and its units are.
Must not: sums over devices or plans.
"""
