"""Imported first by a process that ranks are forked from: what it imports next is no garbage."""

import gc

gc.disable()
