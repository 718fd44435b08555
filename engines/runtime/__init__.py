"""Runtime: the ranks of a job, and what is watched while they train.

Lives here: the world and its mesh, failures by name, clocks, memory, learning rates, shared random
numbers. Must not: anything that knows how one mechanism splits a model.
"""
