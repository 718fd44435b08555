"""Facts and policy: inputs of a decision, from names, files, configs and modules.

`Facts`, `Policy`, models by name, and the same facts at another size or precision. No plans.
"""
