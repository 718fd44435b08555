"""Memory of a rank: model states, buffers, and activations over the moments of a step.

Lives here: what is held when, what is offloaded, what the allocator adds. Must not: pipelines,
whose stages hold several microbatches (`advisor.cost.stages`).
"""
