"""Built-in device and storage backends; they come in through the same entry points as everybody's."""
