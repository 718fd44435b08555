"""Bundled models with code: a GPT and ResNets, to plan and train without any other package.

Plain `nn.Module`s without knowledge of plans; they are wrapped like user models.
"""
