"""Cluster, container and service definitions, and the settings of DeepSpeed, as data."""
