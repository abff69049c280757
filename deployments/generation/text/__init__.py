"""From a request to tokens and from tokens to text: chat templates, options, sampling; and the small model."""
