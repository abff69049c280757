"""Generation of text by causal language models. Nothing of it is imported by a service of embeddings.

A *sequence* is one prompt and what is generated after it. A *step* computes some tokens of several sequences at once: a
*chunk* of each, which is a piece of its prompt, or its last token. What a step leaves of each token, keys and values,
stays in the *cache* for the steps behind it.

Here are the Router (`router`), the replica (`replica`, `step_loop`) and what travels between them
(`frames`, `channel`). `scheduler` decides what is admitted and what each step computes; `engine` computes
it, on a CPU by `kernels`; `text` turns requests into tokens and tokens into text.
"""
