"""Built-in eviction policies; they come in through the same entry points as everybody's."""
