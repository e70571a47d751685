"""What a person or `ray job submit` starts."""
