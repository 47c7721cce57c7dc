"""Cache: which bytes are local."""
