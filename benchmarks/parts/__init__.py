"""What the benchmarks of the proxy are made of: conversations, a load generator, the servers that are compared, and the arithmetic."""
