"""Sums over ranks, message by message: the ways that the literature names, to run and to read.

`rounds` says who sends what to whom, without torch; `aggregate` carries it out on any backend and
can be stepped through; `hooks` lets DistributedDataParallel sum up its gradients so, or send less
of them; `legality` says for which plans.
"""
