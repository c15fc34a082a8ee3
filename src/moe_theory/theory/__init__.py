"""Closed forms: bounds, sharp constants, witnesses, exact routing probabilities.

An argument outside the range that a docstring states is refused with a ValueError that names it.
"""
