"""Model families, one module each: translation of configs and tables of tensor names."""
