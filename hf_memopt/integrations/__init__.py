"""Where the package meets transformers: the only files that import it."""
