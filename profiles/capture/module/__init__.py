"""Modules as they are before they run: units, state, placement, experts, parameters to keep whole.

Lives here: what a look at the module alone tells. Must not: a forward.
"""
