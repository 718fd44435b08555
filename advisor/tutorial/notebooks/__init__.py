"""The notebook's experiments on the reader's own machine.

`parallel_training.ipynb` is the notebook. Each lesson has a module: `splitting`, `summing`,
`pipelining`, `updating`, `noise`; `ranks` starts their processes and `pictures` draws their results
without computing anything.
"""
