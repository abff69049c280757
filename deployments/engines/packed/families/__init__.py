"""Model families. Each is a small module with two functions, and is listed in `packed/__init__.py`.

- `unsupported(config)`: why a config of this family has no packed form, or None.
- `build(config, weights, *, types)`: `Parts` on the weights' place, from a transformers config and `Weights` named as
  in the base model. With `types`, the ids distinguish first and second texts.
"""
