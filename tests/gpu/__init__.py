"""Everything that needs a GPU, behind one command: `make gpu`, or `python -m tests.gpu`.

Six parts, each useful alone, each result written as soon as it is there:

    a  exactness  every branch for CUDA of the engines and the probe, beside the CPU
    b  bench      products by size and dtype, memory, launches, copies to the host, attention
    c  training   steps of whole models: predicted from the data sheet and from the bench, measured
    d  one rank   of plans of 8 to 1,024 ranks: memory is real, collectives do nothing
    e  gains      compile, graphs, fused optimizers, chunked loss, offload: beside their price
    f  kernels    timings that refit the catalogue's curve, as a cluster file to commit

Lives here: the cases, the loop that runs them within a time, the table. Must not: a prediction, a
bench or a mechanism of its own; those are the library's. Without a GPU the same code runs on the
CPU at small size, so that it cannot have rotted when there is one.
"""
