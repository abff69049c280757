"""Model families: a small module each, that names its config's types and builds its parts from weights.

A module has `unsupported(config)`, the reason why this config of its kind has no packed form or None, and
`build(config, weights, *, types)`: `Parts` from a transformers config and `Weights` under the base model's names, on
the weights' place; with `types` the ids tell first and second texts apart. `packed/__init__.py` lists it.
"""
