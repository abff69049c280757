"""Text generation: OpenAI's routes, the gRPC call, and the application's composition root."""
