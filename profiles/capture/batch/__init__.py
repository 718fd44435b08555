"""Batches as users have them: nested values, their rows and dimensions, the call of a model on one.

Lives here: what engines and traces alike do with a batch. Must not: fake tensors.
"""
