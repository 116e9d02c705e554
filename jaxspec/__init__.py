"""jaxspec: exact speculative decoding for Llama-family models in JAX."""
