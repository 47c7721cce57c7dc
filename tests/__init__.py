"""The tests. How they are arranged stands in ``conftest``."""
