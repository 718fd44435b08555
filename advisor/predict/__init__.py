"""Predictions for rows of a table: one line a training run, in the columns of published figures.

A row says what was run on what; a cell may be blank. Blank cells are filled in by rules about the
software of the time (`software`), the same for every row, and named in the prediction's note.

    rows -> resolve (machines, architectures, software) -> Setup
    Setup -> work -> passes -> basis -> time       transformers: counted, then a few constants
          -> stages, activations -> memory
          -> convnet_step, convnet_memory          what is counted layer by layer
    prediction                                     both with ranges, as a line of the answer
"""
