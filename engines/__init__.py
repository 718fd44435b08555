"""Mechanisms: a plan and a module in, a trainable parallel model out. Engines never choose."""
