"""Networks on images as lists of layers with shapes: facts for a roofline, without torch."""
