"""Generation of text by causal language models. Nothing of it is imported by a service of embeddings.

A *sequence* is one prompt and what is generated after it. A *step* computes some tokens of several sequences at once: a
*chunk* of each, which is a piece of its prompt, or its last token. What a step leaves of each token, keys and values,
stays in the *cache* for the steps behind it.
"""
