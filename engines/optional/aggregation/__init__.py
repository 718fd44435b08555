"""Gradient sums over ranks, message by message, by the algorithms that the literature names.

Lives here: `rounds` (the messages, without torch), `aggregate` (runs them on any backend, also step
by step) and `hooks` (DistributedDataParallel's gradients, summed so or compressed). Must not: the
backend's own all-reduce (`engines.data`).
"""
