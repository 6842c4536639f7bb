"""Built-in device and storage backends; they come in through entry points."""
