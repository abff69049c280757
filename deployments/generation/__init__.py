"""Text generation with causal language models. A service of embeddings imports none of it.

A *sequence* is a prompt and the tokens generated after it. A *step* computes some tokens of several sequences at once:
a *chunk* of each, which is a piece of its prompt or its last token. The keys and values of these tokens stay in the
*cache* for later steps.

This package has the Router (`router`), the replica (`replica`, `step_loop`) and the frames between them (`frames`,
`channel`). `scheduler` decides what is admitted and what each step computes. `engine` computes it, on a CPU with
`kernels`. `text` turns requests into tokens, and tokens into text.
"""
