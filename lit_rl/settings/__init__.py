"""Settings as frozen dataclasses, readable without PyTorch: a setting is one field, with its type and range in the
annotation, its default, and its sentence below."""
