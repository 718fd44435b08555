"""Estimates: memory, time and traffic of a plan as a whole, one module for each kind of plan.

Lives here: plans without stages, with stages, of threads, with asynchronous updates, and what puts
their terms together. Must not: rates and loads, which they share.
"""
