"""One transformer for all model families. The only package that imports linen."""
