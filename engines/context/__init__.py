"""Context parallelism for any model: the sequence is sharded over the ranks of the cp axis.

Lives here: `tokens` (a rank's part of a sequence), `ring` (exact attention to all keys by
log-sum-exp, arXiv:2310.01889, in place of scaled_dot_product_attention), `proof` (that nothing else
in a model mixes tokens, on a small copy) and `input_sharding` (how a model gets the positions of
its tokens). Must not: other axes, but for the mesh.

torch has a ring of its own (torch.distributed.tensor.experimental.context_parallel). It replaces
CUDA kernels alone, so that nothing can be tried or tested without several GPUs, shards the
caller's buffers in place, and leaves positions of tokens and losses to the caller. The one here
takes the same steps over the same kernels on every device.
"""
