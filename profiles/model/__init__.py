"""Model profiles: parameters, FLOP, activations and traffic per unit, as data.

Lives here: `ModelProfile` and what it is made of. Must not: torch, or how a profile is obtained
(`profiles.capture`, `profiles.closed_forms`).
"""
