"""Makers of the demo models."""
