"""Optional mechanisms: the core reads and runs without them.

Lives here: asynchronous and periodic updates, gradients summed message by message,
`nn.DataParallel`, and modules placed on several devices by their authors. Must not: anything that
another mechanism imports.
"""
