"""Tests, flat, named after what they test."""
