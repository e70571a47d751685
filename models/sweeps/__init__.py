"""Ready-made sweeps: the settings that the papers compared or tuned, one YAML file each."""
