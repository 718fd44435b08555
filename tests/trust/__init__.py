"""Trust: one table and one picture of everything that was measured, for the README.

    claim      a question, the committed report that answers it, and where it falls short
    training, choice, estimates, endurance    the claims, by what is asked
    runs, marks    what the picture shows: predicted beside measured, our choice and our speed
    picture    the picture as SVG
    page       the table, and the place of both in the README

`python -m tests.trust` writes them from what is committed under `tests/`. A report that is not
there gives a line that says how it is measured.
"""
