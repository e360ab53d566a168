"""Exercises and pictures of the lesson."""
