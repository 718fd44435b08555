"""Teaching material: a demo that trains, and the notebook's experiments.

A small GPT and ResNet, data that ships with Python, and plots. The product does not import this
package.
"""
