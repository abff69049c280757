"""The wire between Routers and replicas. Pure asyncio."""
