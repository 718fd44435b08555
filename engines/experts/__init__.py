"""Expert parallelism: each rank of the ep axis holds some of the experts.

The ep axis lies inside the data axes: its ranks see other rows, and send each token to the rank of
its expert and back by all-to-all (GShard, arXiv:2006.16668).
Lives here: `container` (modules with a weight dimension of experts, as in transformers, and the
trial that a slice of it computes its part), `token_dispatch` and `experts`, which shards a model.
Must not: routing, which is the model's own.
"""
