"""Exercises of the course: files to complete, and a judge that explains wrong solutions."""
