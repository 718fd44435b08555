"""Expert parallelism: each rank of the ep axis holds some of the experts, and tokens travel.

The ep axis lies inside the data axes: its ranks see other rows, and every one of them sends the
tokens that its router gave to an expert to the rank that holds it, and gets them back computed
(GShard, arXiv:2006.16668). `container` finds modules that hold experts as weights with a dimension
of their own, as transformers ships them, and shows on the weights themselves that a rank's slice
computes its experts' part; `travel` exchanges the tokens; `experts` does it to a model.
"""
