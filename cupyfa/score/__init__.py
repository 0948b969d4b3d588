"""Expressions that change and mask scores: parsed, traced, evaluated; dropout."""
