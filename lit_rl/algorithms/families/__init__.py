"""What some methods share: one abstract class a file, with every term of its objective in the order of the formula."""
