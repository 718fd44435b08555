"""The work: batch, optimizer, and the software that runs it.

Lives here: `Workload`, optimizers' states, `Stack` and what it makes of a profile, LoRA, losses.
Must not: machines or plans.
"""
