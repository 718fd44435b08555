"""Stand-ins: fake tensors with which a model's own code runs without devices or memory.

Lives here: putting them in place, values that they are known to have, what they need of torch and
of transformers. Must not: what is counted meanwhile (`profiles.capture.traces`).
"""
