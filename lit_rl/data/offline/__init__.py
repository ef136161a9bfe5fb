"""Data sets that are learned from as they are: texts, pairs, verdicts and labelled steps."""
