"""Operators: FLOP, bytes and cycles of each, and those that devices run in ways of their own.

Lives here: tables by name, kernels that shapes alone do not show. Must not: sums over units.
"""
