"""Regret: the chosen plan against the best of the legal plans, all of them timed on real ranks.

    models     nine models of usual kinds, at sizes that two shared cores train
    cases      a model on machines with a memory budget: the cases, and the leaf that each is for
    picked     which legal plans of a case are run
    decided    the decision for a case, its facts, and the splits that its model proves
    live       a plan on one rank: built, its tensors counted, its steps timed
    finals     which plans live side by side and take turns, and what came of it
    ranks      one rank of a case: bench, decide, take each plan's memory and time
    launch     a case from start to end: its nodes, its ranks, and new ones after a plan broke them
    report     what came of it: regret, noise, correlation, errors, and the table

`python -m tests.regret` runs them. The limit on memory is on a rank's tensors, exact at any load.
"""
