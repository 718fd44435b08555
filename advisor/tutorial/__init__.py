"""For people who learn the subject: a demo that trains, and the notebook's experiments.

Lives here: a small GPT and ResNet, data that ships with Python, pictures.
Must not: anything that the product needs.
"""
