"""A notebook that teaches the ideas by what the reader's own machine does, and what stands behind.

`parallel_training.ipynb` is the notebook. Its numbers come from one module a lesson: `splitting`,
`summing`, `pipelining`, `updating`, `noise`; `ranks` starts the processes that they run on;
`pictures` draws what they return, and computes nothing.
"""
