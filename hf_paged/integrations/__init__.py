"""How Transformers reaches the engine."""
