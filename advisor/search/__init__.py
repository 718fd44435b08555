"""Search: all legal plans as columns, bounds that leave most of them aside, exact answers."""
