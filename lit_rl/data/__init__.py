"""Rows in, prompt batches out: readers, formats, chat templates, orders, loaders, the data module, built-in tasks.

Import the modules directly; nothing is imported here, so that a task or a reader loads without Lightning.
"""
