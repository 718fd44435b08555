"""Bundled models with code: a GPT and ResNets, to plan, train and look at without any other
package.

Lives here: `nn.Module`s. Must not: knowledge of plans; they are wrapped like anybody's model.
"""
