"""Abstract bases of several methods each, with every term of their objectives in the order of the formula."""
