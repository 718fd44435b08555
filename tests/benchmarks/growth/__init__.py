"""Growth of planning, capture, bench and steps with layers, devices, experts, parameters and ranks.

Lives here: `curves` (what is measured, and at which sizes), `results` (the report, and exponents),
`picture`. Must not: fail a test; `python -m tests.benchmarks.growth` says what misses a mark.
"""
