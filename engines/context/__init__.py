"""Context parallelism for any model: a sequence is shared out over the ranks of the cp axis.

Every rank runs the model's own forward over its own tokens (`tokens`). Where the model calls
scaled_dot_product_attention a ring stands in for it (`attention`, `ring`): keys and values go
round, and what a rank's queries see in each part is merged by its log-sum-exp, which is exact
(arXiv:2310.01889). `proof` shows on a small copy that nothing else in the model looks across
tokens, and finds how it gets the places of its tokens (`way`).

torch has a ring of its own (torch.distributed.tensor.experimental.context_parallel). It replaces
CUDA kernels alone, so that nothing can be tried or tested without several GPUs, cuts the caller's
buffers in place, and says nothing about the places of tokens or about losses. The one here takes
the same steps over the same kernels on every device.
"""
