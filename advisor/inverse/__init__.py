"""Inverse questions: what is needed, or how large something may be, for a plan to fit or be done.

Every answer was decided on, and so was its neighbour that fails.
"""

from advisor.inverse.answer import Answer
from advisor.inverse.bandwidth import bandwidth_needed
from advisor.inverse.budget import Budget, Span, budget
from advisor.inverse.cheapest import Cheapest, Offer, cheapest_device
from advisor.inverse.devices import fewest_devices
from advisor.inverse.largest import largest_microbatch, largest_model, largest_sequence

__all__ = [
    "Answer",
    "Budget",
    "Cheapest",
    "Offer",
    "Span",
    "bandwidth_needed",
    "budget",
    "cheapest_device",
    "fewest_devices",
    "largest_microbatch",
    "largest_model",
    "largest_sequence",
]
