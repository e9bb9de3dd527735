"""Tree training: tokens that calls share are computed once, in pieces of bounded memory, with the gradients of training call by call.

    forest.py     the tries of a batch as flat arrays: what is visible to what, and what is trained where
    pieces.py     the forest cut into pieces for a budget of tokens, and the order in which they run (pure)
    lockstep.py   that order brought into step with the other ranks' (pure)
    attention.py  the attention of a piece, as transformers' AttentionInterface wants it; keys and values that pieces hand on
    cpu.py        its kernels on CPUs      flex.py  and on GPUs
    head.py       log-probabilities and entropies of a piece's emissions
    model.py      which models this is exact for
    passes.py     forward and backward over a program of pieces
    tries.py      a `Part` made of tries: what the learner's update sees of all this

See docs/tree.md.
"""
