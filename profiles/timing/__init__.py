"""Clocks: how long a model's units take on a device, and what runs took.

Lives here: the stopwatch, straggler statistics, the store of measured runs.
Must not: predictions.
"""
