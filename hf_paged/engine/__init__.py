"""One step of the model, and the life of requests."""
