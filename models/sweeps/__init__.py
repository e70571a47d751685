"""Ready-made sweeps: what the papers tried or say that they tuned, one YAML file each."""
