"""Predictions for rows of a table: one line a training run, in the columns of published figures.

A row says what was run on what; a cell may be blank. Blank cells are filled in by rules about the
software of the time (`software`), the same for every row, and named in the prediction's note.
"""
