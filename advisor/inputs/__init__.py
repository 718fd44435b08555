"""Facts and policy: what is decided about, from names, files, configs and modules.

Lives here: `Facts`, `Policy`, models by name, and the same facts at another size or precision.
Must not: anything about plans.
"""
