"""Memory as an allocator sees it: the caching allocator simulated, a step replayed in it.

Lives here: blocks, pools, host memory while a model loads. Must not: which tensors a plan holds
(`advisor.cost`).
"""
