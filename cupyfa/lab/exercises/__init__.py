"""Exercises of the course: a file with a hole, a judge that names the cause of a wrong solution."""
