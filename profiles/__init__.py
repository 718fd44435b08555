"""Facts: what a model needs and what the machines have. Imports nothing of ours."""
