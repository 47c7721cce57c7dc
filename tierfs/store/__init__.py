"""Object stores behind one contract (``base``)."""
