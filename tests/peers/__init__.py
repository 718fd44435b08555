"""Peers: training and planning as people do it today, measured beside us in one run.

`python -m tests.peers` (`make peers`) trains the same models from the same parameters on the same
batches with plain torch, Accelerate, DeepSpeed, Transformers and `auto_parallelize`, on two local
ranks and on two nodes with a shaped link, in turns; bisects the deepest model that each trains in a
memory limit; and asks the planners of these packages about the runs that were measured.

Lives here: `subjects` (models), `scripts` (each tool as its users write it), `race` and `capacity`
(what ranks do), `run` (jobs), `planners`, `results` and `table`.
"""
