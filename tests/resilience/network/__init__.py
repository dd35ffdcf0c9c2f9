"""Replicas on a real network of namespaces whose links fail."""
