"""Every reader of the package on files that are wrong in every way that we could think of.

Lives here: `mutations` (real files made hostile), `readers` (what is read, and real files for it),
`saves` (checkpoints), `runner` (one reader on many cases), the command. A case passes where it is
read, or refused with one of our errors, within a second and 500 MiB.
"""
