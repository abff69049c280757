"""Generation as clients see it: OpenAI's routes, and how a service of it is put together."""
