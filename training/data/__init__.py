"""Training text from a seed: what is talked about (one module a subject), how it is written down, how it is packed."""
