"""Inverse questions: the resources a plan needs, or the largest size that fits.

Every answer comes from a decision, and so does the failing neighbor.
"""

from advisor.whatif.sizing.answer import Answer
from advisor.whatif.sizing.bandwidth import bandwidth_needed
from advisor.whatif.sizing.budget import Budget, Span, budget
from advisor.whatif.sizing.cheapest import Cheapest, Offer, cheapest_device
from advisor.whatif.sizing.devices import fewest_devices
from advisor.whatif.sizing.largest import largest_microbatch, largest_model, largest_sequence

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
