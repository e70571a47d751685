"""The papers' models. `VARIANTS` names each system that can be trained and where its class is."""

VARIANTS: dict[str, str] = {}
"""What a user types -> `module:Class`, loaded on demand."""
