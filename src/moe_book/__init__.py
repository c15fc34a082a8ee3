"""The apparatus of the book: claims and what decides them, long computations, sabotage, figures, and the build."""
