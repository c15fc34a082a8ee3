"""Closed forms: bounds, sharp constants, witnesses, exact routing probabilities."""
