"""Step time as a function of one quantity: `advise sweep`."""
