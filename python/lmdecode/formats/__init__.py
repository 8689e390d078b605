"""Models in files that are not transformers' own: a package for each format."""
