"""Policy: which plan, and why."""
