"""Reports: a decision in a terminal, a page, a notebook. They compute nothing."""
